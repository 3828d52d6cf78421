"""A checkpoint says which code and which settings it was trained with; nothing goes on as another
in silence.
"""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.checkpoints import identity, model_code
from spmdtrain.config import CheckpointError, ConfigError
from spmdtrain.models.layers import Mlp

ONE = {"devices": jax.devices()[:1]}
SMALL = (
    "model.layers=1",
    "model.embed=16",
    "model.heads=2",
    "train.sequence_length=8",
    "train.global_batch=4",
)


class Doubled(st.Transformer):
    """It has the parameters of the shipped model and computes something else."""

    def embed(self, tokens_bt, ctx):
        return 2 * super().embed(tokens_bt, ctx)


class NegatedMlp(Mlp):
    def __call__(self, x_bte, ctx):
        return -super().__call__(x_bte, ctx)


def constant(step):
    return jnp.float32(1e-3) + 0 * step


def settings(*more: str):
    return tiny(*SMALL, "train.steps=2", *more)


@pytest.fixture(scope="module")
def doubled(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("doubled")
    st.run(settings(), directory, make=Doubled, **ONE)
    return directory


def record(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())["model_code"]


@pytest.mark.long
def test_a_run_records_the_class_and_a_hash_of_its_source(doubled):
    assert record(doubled)["class"] == "test_identity.Doubled"
    sources = record(doubled)["sources"]
    assert set(sources) == {"test_identity.Doubled", "spmdtrain"}
    assert len(sources["test_identity.Doubled"]) == 16


@pytest.mark.seconds
def test_another_class_is_refused_wherever_weights_are_read(doubled, tmp_path):
    said = (
        r"belongs to another model; asked spmdtrain.Transformer; found test_identity.Doubled; "
        r"try make=Doubled in Python"
    )
    with pytest.raises(CheckpointError, match=said):
        st.run(settings("train.steps=3"), doubled, **ONE)
    with pytest.raises(CheckpointError, match=said):
        st.run(settings(f"train.init_from={doubled}"), tmp_path / "new", **ONE)
    with pytest.raises(
        ConfigError,
        match="uses the model test_identity.Doubled, whose code runs only if you name it",
    ):
        st.generate(doubled, [1, 2], 2)
    with pytest.raises(
        CheckpointError, match="asked spmdtrain.Transformer; found test_identity.Doubled"
    ):
        st.generate(doubled, [1, 2], 2, make=st.Transformer)
    with pytest.raises(CheckpointError, match=said):
        st.restore(doubled, st.shard(settings(), **ONE))
    assert st.generate(doubled, [1, 2], 2, make=Doubled).shape == (4,)
    assert st.run(settings(), doubled, make=Doubled, **ONE).status == "nothing to do"


@pytest.mark.seconds
def test_parts_of_ones_own_make_another_model_of_the_shipped_class(tmp_path):
    make = partial(st.Transformer, mlp=NegatedMlp)
    st.run(settings(), tmp_path, make=make, **ONE)
    assert record(tmp_path)["class"] == "spmdtrain.Transformer with test_identity.NegatedMlp"
    with pytest.raises(
        CheckpointError, match="found spmdtrain.Transformer with test_identity.NegatedMlp"
    ):
        st.run(settings("train.steps=3"), tmp_path, **ONE)


def test_the_same_class_with_other_source_is_said_and_goes_on(doubled, capsys, monkeypatch):
    then = {"class": "m.Model", "sources": {"m.Model": "1", "spmdtrain": "0.1.0"}, "make": None}
    now = then | {"sources": then["sources"] | {"m.Model": "2"}}
    assert model_code.check_model_code(then, now, "step 3 of runs/x") == [
        "the source of m.Model is not that of step 3 of runs/x any more"
    ]
    assert model_code.check_model_code(then, then, "it") == []
    moved = {"class": "n.Model", "sources": {"n.Model": "1", "spmdtrain": "0.1.0"}, "make": None}
    assert "its source is the same" in model_code.check_model_code(then, moved, "it")[0]
    monkeypatch.setattr(model_code, "source_hash", lambda _: "another")
    st.run(settings(), doubled, make=Doubled, **ONE)
    assert "the source of test_identity.Doubled is not that of step 2 of" in capsys.readouterr().out


def test_comments_and_the_width_of_lines_are_not_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    bodies = {
        "narrow": "return (1 +\n            2)  # three",
        "wide": "return 1 + 2",
        "other": "return 3",
    }
    hashes = {}
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(f"class A:\n    def f(self):\n        {body}\n")
        hashes[name] = model_code.source_hash(__import__(name).A)
    assert hashes["narrow"] == hashes["wide"] != hashes["other"]


@pytest.mark.long
def test_what_is_trained_otherwise_is_said_in_one_line_and_kept(tmp_path, capsys):
    st.run(settings("optimizer.warmup=0"), tmp_path, learning_rate=constant, **ONE)
    other = (
        "train.steps=3",
        "optimizer.warmup=0",
        "optimizer.learning_rate=0.02",
        "train.global_batch=8",
        "optimizer.beta2=0.99",
    )
    capsys.readouterr()
    st.run(settings(*other), tmp_path, **ONE)
    line = next(text for text in capsys.readouterr().out.splitlines() if "changed" in text)
    assert line == (
        "changed since step 2: optimizer.learning_rate: 0.01, now 0.02; "
        "optimizer.beta2: 0.95, now 0.99; train.steps: 2, now 3; train.global_batch: 4, now 8; "
        "learning_rate=: test_identity.constant, now none"
    )
    events = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    resumed = next(event for event in events if event["event"] == "resumed")
    assert resumed["changed"]["train.global_batch"] == [4, 8]
    assert resumed["changed"]["learning_rate="] == ["test_identity.constant", None]
    capsys.readouterr()
    st.run(settings(*other), tmp_path, **ONE)
    assert "changed since" not in capsys.readouterr().out, "as the last checkpoint has it"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.windows=4,0", "--set 'model.windows=[4, 0]'"),
        ("model.score_cap=30", "--set model.score_cap=30.0"),
        ("model.rope_layers=true,false", "--set 'model.rope_layers=[true, false]'"),
        ("model.norm_offset=1", "--set model.norm_offset=1.0"),
    ],
)
def test_every_setting_of_the_function_is_compared_and_how_to_set_it_said(change, said):
    """As JSON keeps them; the settings of shapes are known by the leaves."""
    llama = ("model.name=llama", "model.vocab=64")
    name = change.partition("=")[0]
    saved = json.loads(json.dumps({"model": identity.model_function(tiny(*llama, change))}))
    assert identity.model_changes(saved, tiny(*llama, change, "model.ffn=80")) == []
    ((found, then, _),) = identity.model_changes(saved, tiny(*llama))
    assert (found, identity.as_setting(found, then)) == (name, said)


@pytest.mark.parametrize("change", ["context_attention=ulysses", "attention=xla"])
def test_how_attention_is_computed_may_change_when_a_run_resumes(change):
    saved = {"model": identity.model_function(tiny("model.vocab=64"))}
    assert identity.model_changes(saved, tiny("model.vocab=64", f"model.{change}")) == []
