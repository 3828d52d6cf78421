"""Islands train apart and meet: equal after a meeting on any mesh, resumed to the bit, never held up
by one that is gone.

Each island is a run of its own in a thread of its own, on devices of its own.
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import assert_same_bits, mesh_of, tiny

import spmdtrain as st
from spmdtrain.config import ConfigError
from spmdtrain.running import loop
from spmdtrain.running.islands.meetings import Meetings
from spmdtrain.train.state import TrainState

SMALL = (
    "model.embed=16",
    "model.vocab=32",
    "model.layers=1",
    "train.sequence_length=8",
    "train.global_batch=4",
    "optimizer.schedule=constant",
    "checkpoint.every=2",
    "checkpoint.keep=20",
    "islands.count=2",
    "islands.every=4",
)
MESHES = (("mesh.fsdp=2",), ("mesh.tensor=2",))  # islands need not be alike
STEPS = 12


def settings(root: Path, index: int, *more: str) -> tuple[str, ...]:
    own = (f"islands.index={index}", f"islands.directory={root / 'meetings'}")
    return (*SMALL, *MESHES[index], *own, *more)


def train(root: Path, index: int, *more: str, stop: int | None = None) -> loop.Outcome:
    """One island; `stop`: the step after which it is gone."""
    all_settings = settings(root, index, *more)
    first = 2 * index
    devices = jax.devices()[first : first + mesh_of(MESHES[index])]
    hooks = [lambda event, step, _: event == "step" and step == stop]
    return loop.run(tiny(*all_settings), root / str(index), devices=devices, hooks=hooks)


def together(root: Path, *more: str, stop: int | None = None) -> list[loop.Outcome]:
    with ThreadPoolExecutor(2) as threads:
        started = [threads.submit(train, root, i, *more, stop=stop) for i in range(2)]
        return [each.result(timeout=300) for each in started]


def state_of(root: Path, index: int, step: int, *more: str) -> TrainState:
    setup = st.shard(
        tiny(*settings(root, index, *more)), devices=jax.devices()[: mesh_of(MESHES[index])]
    )
    return st.restore(setup, root / str(index), step=step)


def events(root: Path, index: int, name: str) -> list[dict]:
    lines = (root / str(index) / "events.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["event"] == name]


def shared(state: TrainState) -> dict:
    return {"params": state.params, "items": state.items}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("islands")
    more = (f"train.steps={STEPS}", "islands.after=4", "islands.codec=int8")
    assert together(root, *more) == [loop.Outcome("finished", STEPS, pytest.approx(0, abs=60))] * 2
    return root


def test_all_are_equal_after_a_meeting_and_apart_before_it(trained):
    more = (f"train.steps={STEPS}", "islands.after=4", "islands.codec=int8")
    states = {
        step: [state_of(trained, index, step, *more) for index in range(2)] for step in (6, 8, 12)
    }
    for step in (8, 12):
        assert_same_bits(shared(states[step][0]), shared(states[step][1]))
    apart = [
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(*(states[6][i].params.values() for i in range(2)), strict=True)
    ]
    assert max(apart) > 1e-4
    assert [each["step"] for each in events(trained, 0, "met")] == [1, 2, 3, 4, 8, 12]
