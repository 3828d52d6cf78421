"""One evaluation of a step, whatever the mesh, the batch and the command; a mean over nothing."""

import json
import math
import re
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import prepared, tiny

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.config import DataError
from spmdtrain.config.schema import DataConfig, MixSource
from spmdtrain.data.source import EvalSet
from spmdtrain.train import evaluation
from spmdtrain.train.evaluation import Predicted, mean_loss, window_losses
from spmdtrain.train.step import make_losses

SMALL = (
    "model.layers=1",
    "model.embed=16",
    "model.heads=2",
    "train.steps=2",
    "train.sequence_length=8",
    "train.global_batch=6",
    "optimizer.warmup=0",
    "eval.every=2",
)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reported(run: Path) -> dict:
    """The last evaluation that a run has written down."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "eval_tokens" in line][-1]


@pytest.mark.parametrize("batches", [None, 1, 3])
@pytest.mark.parametrize("packing", ["stream", "documents", "best_fit"])
def test_the_windows_of_an_evaluation_do_not_depend_on_the_batch(batches, packing):
    """An odd limit, an odd batch: each window once, and then nothing but padding."""
    seen = {}
    for size in (1, 4, 6, 50):
        setup, data = opened(size, packing)
        (only,) = data.eval_sets(setup.config)
        limit = None if batches is None else 6 * batches
        counting = lambda params, batch: (0.0, batch["mask"].sum())  # noqa: ARG005, E731
        found = list(window_losses(setup, counting, {}, only.windows, limit))
        ids = np.concatenate([ids for ids, _, _ in found])
        count = only.windows.windows if limit is None else limit
        assert ids[:count].tolist() == list(range(count))
        assert (ids[count:] == only.windows.windows).all()
        seen[size] = sum(tokens for _, _, tokens in found)
    assert len(set(seen.values())) == 1


@cache
def opened(size: int, packing: str):
    config = tiny(*SMALL, f"train.global_batch={size}", f"data.packing={packing}")
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"validation_fraction": 0.0005})}
    )
    config, data = st.open_data(config)
    return st.shard(config, devices=jax.devices()[:1]), data


@pytest.mark.long
def test_the_command_and_the_run_have_one_loss_of_a_limited_evaluation(here, capsys):
    """Whose own batches are of 6 windows, where the command computes 8 at once."""
    st.run(tiny(*SMALL, "eval.batches=3"), "run", devices=jax.devices()[:1])
    said = capsys.readouterr()
    own = reported(here / "run")
    assert own["eval_tokens"] == 3 * 6 * 8
    for asked in ((), ("mesh.data=2", "mesh.tensor=2"), ("train.global_batch=1",)):
        found = st.evaluate("run", overrides=asked)
        assert found["loss"] == pytest.approx(own["eval_loss"], rel=1e-6)
        assert found["data"] == "data.corpus=synthetic"
        assert found["tokens"] == own["eval_tokens"]
        assert found["split_tokens"] == own["eval_split_tokens"] == 104857
    assert "(144 of 104,857 tokens)" in said.out + said.err
    more = st.evaluate("run", overrides=["eval.batches=4"])
    assert more["tokens"] == 4 * 6 * 8, "batches are the run's"


MIX = {"a": ("ab" * 300, 3), "b": ("é" * 200, 1), "c": ("xyz" * 99, 4)}  # text, weight


@pytest.mark.long
def test_loss_and_bits_of_a_mixture_are_those_of_its_shares(here, capsys):
    sources = []
    for name, (text, weight) in MIX.items():
        (here / f"{name}.txt").write_text(text)
        assert main(["data", "prepare", f"{name}.txt", "--out", name]) == 0
        sources.append(MixSource(name=name, path=f"{name}.bin", weight=weight))
    config = tiny(*SMALL, "model.vocab=none")
    data = DataConfig(corpus="tokens", mix=tuple(sources))
    config = config.model_copy(update={"data": data})
    st.run(config, "run", devices=jax.devices()[:1])
    own = reported(here / "run")
    found = st.evaluate("run")
    shares = {"a": 3 / 8, "b": 1 / 8, "c": 4 / 8}
    nats = sum(share * found[f"loss/{name}"] for name, share in shares.items())
    assert found["loss"] == pytest.approx(nats) == pytest.approx(own["eval_loss"])
    # A token is a byte, but for the one that ends the only document of each source.
    bytes_a_token = {name: 1 - 1 / found[f"tokens/{name}"] for name in MIX}
    of_all = sum(share * bytes_a_token[name] for name, share in shares.items())
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / of_all)
    for name, of_one in bytes_a_token.items():
        assert found[f"loss/{name}"] == pytest.approx(own[f"eval_loss/{name}"])
        bits = found[f"loss/{name}"] / math.log(2) / of_one
        assert found[f"bits_per_byte/{name}"] == pytest.approx(bits)
    capsys.readouterr()
    assert main(["eval", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["loss", *MIX]
    assert "tokens of a, b, c, step" in lines[0]


def figures_of(predicted: dict[str, tuple[float, int]], monkeypatch) -> dict:
    """The figures of an evaluation of a mixture, of what was predicted of each source."""

    class Data:
        def eval_sets(self, _):
            return [EvalSet(name, 1 / len(predicted), name, 100) for name in predicted]

    setup, _ = opened(6, "stream")
    monkeypatch.setattr(
        evaluation, "window_losses", lambda _, __, ___, name, ____: [(None, *predicted[name])]
    )
    return evaluation.make_eval_figures(setup, Data())(st.init_state(setup))


def test_a_mean_over_nothing_is_absent_and_named(monkeypatch):
    found = figures_of({"a": (30.0, 10), "b": (0.0, 0), "c": (50.0, 10)}, monkeypatch)
    assert found == {
        "eval_loss": 4.0,
        "eval_loss/a": 3.0,
        "eval_loss/c": 5.0,
        "eval_tokens": 20,
        "eval_tokens/a": 10,
        "eval_tokens/b": 0,
        "eval_tokens/c": 10,
        "eval_split_tokens": 300,
    }
    said = evaluation.describe(found)
    assert said.endswith("(20 of 300 tokens)  b: no token with a loss")
    nothing = figures_of({"": (0.0, 0)}, monkeypatch)
    assert nothing == {"eval_tokens": 0, "eval_split_tokens": 100}
    assert evaluation.describe(nothing) == "(0 of 100 tokens)  no eval loss: no token with a loss"
    assert mean_loss([Predicted("", 1.0, 0.0, 0, 5)]) is None


def test_nothing_to_evaluate_is_an_error_where_one_number_is_asked_for(monkeypatch):
    setup, data = opened(6, "stream")
    monkeypatch.setattr(evaluation, "window_losses", lambda *_: [])
    with pytest.raises(DataError, match="there is nothing to evaluate: no token with a loss"):
        st.make_evaluate(setup, data)(st.init_state(setup))


@pytest.mark.parametrize("layout", [(), ("mesh.pipeline=2", "train.microbatch=4")], ids=str)
def test_an_evaluation_in_bfloat16_sums_as_training_does(layout):
    """On CPUs also in matmuls, so that both have one loss on a mesh that splits what they sum."""
    setup = prepared("precision.compute=bfloat16", *layout)
    losses = jax.jit(make_losses(setup)).lower(setup.state.params, setup.batch)
    outputs = re.findall(r"stablehlo\.dot_general .* -> tensor<\S*x(\w+)>", losses.as_text())
    assert outputs and set(outputs) == {"f32"}
