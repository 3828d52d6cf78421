"""`import spmdtrain as st`: the public names, there when they are asked for and not before."""

import importlib
import pkgutil
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.config import CheckpointError, ConfigError
from spmdtrain.train.compared.in_order import plain_arrays


@pytest.mark.parametrize("name", st.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(st, name).__doc__, f"{name} has no docstring"
    assert name in dir(st)


def test_a_name_that_is_none_is_said_so():
    with pytest.raises(AttributeError, match="attribute trian"):
        _ = st.trian


def test_no_room_takes_the_name_of_a_public_one():
    """Importing a room binds its name in the package: a verb of that name would be gone."""
    rooms = {room.name for room in pkgutil.iter_modules(st.__path__)}
    assert "running" in rooms
    assert not rooms & set(st.__all__)
    importlib.import_module("spmdtrain.running.loop")
    assert callable(st.run)


@pytest.mark.core
def test_importing_the_package_imports_neither_jax_nor_numpy():
    program = (
        "import sys, spmdtrain; sys.exit(bool({'jax', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with our configs and a run of the quickstart, three steps long."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "configs").symlink_to(NOTEBOOK.parent.parent / "configs")
    settings = ["train.steps=3", "optimizer.warmup=1", "eval.every=0"]
    config = st.load(folder / "configs" / "quickstart.toml", settings)
    st.run(config, folder / "runs" / "quickstart")
    return folder


@pytest.fixture
def cell(workplace, monkeypatch, capsys):
    """`cell(name)`: what the names of the example are after it ran, and what it printed."""
    monkeypatch.chdir(workplace)

    def run(name: str) -> tuple[dict, str]:
        names = runpy.run_path(str(NOTEBOOK / f"{name}.py"))
        return names, capsys.readouterr().out

    return run


@pytest.mark.parametrize("path", sorted(NOTEBOOK.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_of_a_notebook_is_short_and_run_by_a_test(path):
    assert len(path.read_text().splitlines()) < 15
    assert f'cell("{path.stem}")' in Path(__file__).read_text()


@pytest.mark.seconds
def test_a_config_comes_from_a_file_or_from_code(cell):
    names, _ = cell("config")
    assert names["config"].train.steps == names["same_model"].train.steps == 20
    assert names["same_model"].model == names["config"].model


@pytest.mark.seconds
def test_a_state_has_the_weights_of_a_run_on_another_mesh(cell):
    names, printed = cell("imported")
    weights = st.weights("runs/quickstart")
    params = plain_arrays(names["setup"], names["state"].params)
    assert names["setup"].mesh.shape["fsdp"] == 4 and printed.startswith("step 0: ")
    assert all(np.array_equal(params[path], x) for path, x in weights.items())


@pytest.mark.seconds
def test_one_step_by_hand(cell):
    names, printed = cell("step")
    assert int(names["state"].step) == 1
    assert printed.startswith("loss 5.") and "after step 1" in printed


@pytest.mark.seconds
def test_gradients_and_a_state_changed_by_hand(cell):
    names, printed = cell("gradients")
    assert printed.startswith("loss ")
    for path, x in st.weights("runs/by_hand").items():
        assert np.array_equal(x, names["params"][path])


@pytest.mark.seconds
def test_logits_of_a_batch_are_those_that_the_loss_is_of(cell):
    names, printed = cell("logits")
    assert printed == "(2, 64, 256)\n"
    setup, params = names["setup"], names["state"].params
    with st.batches(setup, names["data"], 0, 0) as ahead:
        batch = next(ahead)
    total, tokens = st.make_eval_step(setup)(params, batch)
    probability = jax.nn.log_softmax(names["logits"](params, batch["tokens"][0]))
    losses = -np.take_along_axis(
        np.asarray(probability), np.asarray(batch["targets"][0])[..., None], -1
    )
    assert losses.size == tokens
    assert losses.sum() == pytest.approx(float(total), rel=1e-5)


@pytest.mark.seconds
def test_weights_of_a_run_are_plain_arrays(cell):
    names, printed = cell("weights")
    config = st.run_config(
        "runs/quickstart", [f"mesh.{axis}=1" for axis in ("data", "fsdp", "tensor")]
    )
    setup = st.shard(config, devices=jax.devices()[:1])
    state = st.restore("runs/quickstart", setup)
    assert names["weights"].keys() == state.params.keys() == setup.model.parameters.keys()
    for path, x in names["weights"].items():
        assert type(x) is np.ndarray and np.array_equal(x, state.params[path])
        assert f"{path:35} {x.shape} float32" in printed


@pytest.mark.seconds
def test_text_and_ids_from_a_run(cell):
    names, printed = cell("text")
    assert printed.startswith("def main(")
    assert names["ids"].shape == (12,) and list(names["ids"][:4]) == [100, 101, 102, 32]
    setup = st.shard(st.run_config("runs/quickstart"))
    params = st.restore("runs/quickstart", setup).params
    same = st.generate_ids(setup, params, [[100, 101, 102, 32]], 8)
    assert same.tolist() == [names["ids"].tolist()]


def test_an_estimate_and_a_plan(cell):
    names, printed = cell("plan")
    assert names["found"].fits and names["best"].fits
    assert names["best"].seconds <= names["found"].time.seconds * 1.05
    assert "s a step" in printed and "--set mesh.pipeline=" in printed


@pytest.mark.seconds
def test_weights_of_a_pipelined_run_have_their_layers_in_order(tmp_path):
    pipelined = ("mesh.pipeline=2", "model.layers=3", "train.microbatch=4")  # a place is padding
    st.run(
        tiny("train.steps=2", "checkpoint.every=1", *pipelined), tmp_path, devices=jax.devices()[:2]
    )
    setup = st.shard(tiny("model.layers=3"), devices=jax.devices()[:1])
    for step in (1, 2):
        state = st.restore(tmp_path, setup, step)
        assert int(state.step) == step
        found = st.weights(tmp_path, step)
        assert found.keys() == state.params.keys()
        assert all(np.array_equal(found[path], state.params[path]) for path in found)


def test_what_is_no_run_costs_one_line(tmp_path, workplace):
    (tmp_path / "empty").mkdir()
    for ask in (st.run_config, st.weights, lambda run: st.generate(run, "a")):
        with pytest.raises(CheckpointError, match="no checkpoint|is not a run directory"):
            ask(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; found 3"):
        st.weights(workplace / "runs" / "quickstart", 7)
    with pytest.raises(ConfigError, match="a prompt of shape .2,. and dtype float64; try text"):
        st.generate(workplace / "runs" / "quickstart", [0.5, 1.5])
