"""A run directory of another run: the line names the setting. What may change goes on."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.config import CheckpointError

ONE: dict[str, Any] = {"devices": jax.devices()[:1]}
SMALL = (
    "model.layers=2",
    "model.embed=16",
    "model.heads=2",
    "train.sequence_length=8",
    "train.global_batch=4",
    "train.steps=2",
)


def go(run: Path, *more: str, devices=ONE["devices"], **exchanged: Any) -> st.Outcome:
    return st.run(tiny(*SMALL, *more), run, devices=devices, **exchanged)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained")
    go(run)
    return run


@pytest.mark.parametrize(
    "change",
    [
        "model.layers=3",
        "model.embed=32",
        "model.heads=4 model.head_dim=8",
        "model.head_dim=4",
        "model.kv_heads=1",
        "model.ffn=40",
        "model.vocab=80",
        "model.tied=false",
        "model.bias=false",
        "model.mlp=swiglu",
        "model.norm=rmsnorm",
        "model.positions=rope",
        "model.max_length=9",
        "optimizer.name=sgd",
        "optimizer.name=lion",
        "optimizer.name=adafactor",
    ],
)
@pytest.mark.seconds
def test_the_setting_that_has_changed_is_named(trained, change):
    settings = change.split()
    with pytest.raises(CheckpointError) as raised:
        go(trained, *settings, "train.steps=3")
    name, _, value = settings[-1].partition("=")
    asked = str(raised.value).partition("; asked ")[2].partition("; ")[0]
    assert value in asked, str(raised.value)
    assert name in str(raised.value)


def test_an_optimizer_of_the_callers_is_named(trained):
    import optax

    with pytest.raises(CheckpointError, match="asked optimizer=optax.*; found optimizer=none"):
        go(trained, "train.steps=3", optimizer=optax.scale_by_lion())


@pytest.mark.seconds
def test_another_corpus_is_named_by_its_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("a.txt", "one and two\n"), ("b.txt", "one and more\n")):
        Path(name).write_text(text * 99)
    own = ("model.vocab=256", "data.corpus=text", "data.path=a.txt")
    go(tmp_path / "run", *own)
    with pytest.raises(CheckpointError, match="the corpus is not the one") as raised:
        go(tmp_path / "run", *own, "data.path=b.txt", "train.steps=3")
    assert "asked data.path=b.txt; found data.path=a.txt in the run" in str(raised.value)
    assert "try --set data.path=a.txt, or another --run" in str(raised.value)


@pytest.mark.long
@pytest.mark.parametrize(
    ("then", "mesh"), [("float32", ()), ("bfloat16", ("mesh.pipeline=2", "train.microbatch=2"))]
)
def test_the_width_of_the_weights_may_change_on_the_way(tmp_path, capsys, then, mesh):
    now = {"float32": "bfloat16", "bfloat16": "float32"}[then]
    go(tmp_path, f"precision.params={then}")
    config = tiny(*SMALL, f"precision.params={now}", *mesh)
    devices = jax.devices()[: 2 if mesh else 1]
    before = st.restore(tmp_path, st.shard(tiny(*SMALL, f"precision.params={then}"), **ONE))
    state = st.restore(tmp_path, st.shard(config, devices=devices))
    for path, x in before.params.items():
        assert state.params[path].dtype == now
        rounded = np.asarray(x.astype(now))
        np.testing.assert_array_equal(np.asarray(state.params[path]).reshape(x.shape), rounded)
    moments = {str(x.dtype) for x in jax.tree.leaves(state.opt_state) if x.dtype != "int32"}
    assert moments == {now}
    if mesh:
        return
    capsys.readouterr()
    more = (f"precision.params={now}", *mesh, "train.steps=3")
    assert go(tmp_path, *more, devices=devices).step == 3
    assert f"precision.params: {then}, now {now}" in capsys.readouterr().out


@pytest.mark.seconds
def test_adapters_on_another_model_are_not_told_to_go(trained, tmp_path):
    lora = ("finetune.kind=lora", "finetune.rank=2", f"train.init_from={trained}")
    with pytest.raises(CheckpointError) as raised:
        go(tmp_path / "run", "model.layers=3", *lora)
    line = str(raised.value)
    assert "asked model.layers=3; found model.layers=2" in line
    assert line.endswith(f"try --set model.from={trained}")
