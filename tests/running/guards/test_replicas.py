"""One device whose bits have flipped is named by its copies; and a process that keeps the others
waiting is.
"""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from faults.damage import flip_copy
from helpers import prepared, tiny

from spmdtrain.config.errors import CorruptedError
from spmdtrain.running import loop
from spmdtrain.running.guards import stragglers
from spmdtrain.running.guards.replicas import ReplicaCheck
from spmdtrain.running.guards.stragglers import Stragglers, slowest
from spmdtrain.running.start import compiling
from spmdtrain.train.fresh import init_state

SETTINGS = (
    "model.layers=1",
    "model.embed=16",
    "train.global_batch=8",
    "optimizer.schedule=constant",
)


class Told:
    """A reporter that keeps what it is told."""

    def __init__(self):
        self.events: list[tuple] = []
        self.said: list[str] = []

    def event(self, event, step, line="", /, **values):
        self.events.append((event, step, values))
        if line:
            self.said.append(line)

    def say(self, text):
        self.said.append(text)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "alone"),
    [
        (("mesh.data=4", "mesh.tensor=2"), True),
        (("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"), False),  # two copies: either may be wrong
        (("mesh.pipeline=2", "mesh.data=4", "train.microbatch=1"), True),
    ],
)
def test_the_device_is_named(mesh, alone):
    draw = random.Random(0)
    setup = prepared(*SETTINGS, *mesh)
    state = init_state(setup)
    held = {}
    for path, x in state.params.items():
        parts = set(map(str, x.sharding.devices_indices_map(x.shape).values()))
        held[path] = x.sharding.num_devices // len(parts)
    copied = [path for path, count in held.items() if count > 1]
    told = Told()
    check = ReplicaCheck(setup.mesh, 7, told)
    check.before_save(0, state)  # no false alarm
    for device, path in itertools.islice(
        itertools.product(setup.mesh.devices.flat, copied), 0, None, 5
    ):
        params = state.params | {path: flip_copy(state.params[path], device, draw)}
        broken = type(state)(state.step, params, state.opt_state)
        check.after_step(6, broken)
        check.after_step(7, broken)
        with pytest.raises(CorruptedError, match=f"a copy of {path} that differs") as raised:
            check.after_step(8, state)
        _, step, values = told.events[-1]
        assert step == 7 and values["leaf"] == path
        assert device.id in values["devices"]
        if held[path] > 2:
            assert values["devices"] == [device.id] and f"device {device.id} (cpu) holds" in str(
                raised.value
            )
        else:
            assert len(values["devices"]) == 2 and not alone


@pytest.mark.long
def test_items_of_the_state_are_compared_too():
    setup = prepared(*SETTINGS, "mesh.data=4", "guard.policy=skip")
    state = init_state(setup)
    other = flip_copy(state.items["recent"], setup.mesh.devices.flat[2], random.Random(0))
    broken = replace(state, items=state.items | {"recent": other})
    with pytest.raises(CorruptedError, match="device 2 .* holds a copy of recent.* that differs"):
        ReplicaCheck(setup.mesh, 1, Told()).before_save(0, broken)


@pytest.mark.long
def test_a_run_ends_before_it_saves_and_goes_on_from_before_the_fault(tmp_path, monkeypatch):
    settings = (
        *SETTINGS,
        "mesh.data=4",
        "train.steps=8",
        "checkpoint.every=3",
        "guard.replica_check=4",
    )
    devices = jax.devices()[:4]

    def run(directory: Path):
        return loop.run(tiny(*settings), directory, devices=devices)

    run(tmp_path / "clean")
    compile_step = compiling.compile_step

    def compile_broken(setup, lowered):
        step, report = compile_step(setup, lowered)

        def broken_at_5(state, batch):
            state, metrics = step(state, batch)
            if int(state.step) == 5:
                name = (
                    "final_norm.scale"
                    if "final_norm.scale" in state.params
                    else sorted(state.params)[0]
                )
                state.params[name] = flip_copy(state.params[name], devices[2], random.Random(0))
            return state, metrics

        return broken_at_5, report

    with monkeypatch.context() as patched:
        patched.setattr(compiling, "compile_step", compile_broken)
        with pytest.raises(CorruptedError, match="after step 6 device 2 "):
            run(tmp_path / "run")
    assert CorruptedError.exit_code == 11
    steps = [path.name for path in (tmp_path / "run" / "checkpoints").glob("[0-9]*")]
    assert steps == ["3"]
    assert run(tmp_path / "run").status == "finished"
    losses = [
        [
            json.loads(line)["loss"]
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("clean", "run")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("own", "step", "slow"),
    [
        ([0.01, 0.01, 0.5, 0.01], 1.0, 2),
        ([0.01, 0.5], 1.0, 1),
        ([0.01, 0.015, 0.01], 0.02, None),  # not beyond the factor
        ([0.001, 0.02, 0.001], 1.0, None),  # beyond it, and nobody waits
        ([0.0, 0.0], 0.1, None),
    ],
)
def test_who_is_slow(own, step, slow):
    assert slowest(own, step) == slow


def test_a_slow_process_is_reported_once_without_its_waits(monkeypatch):
    now = [0.0]
    told = Told()
    monkeypatch.setattr(stragglers.jax, "process_count", lambda: 2)
    mesh = prepared(*SETTINGS, "mesh.data=2").mesh
    watch = Stragglers(mesh, 2, told, lambda: now[0])
    own_of_0 = 0.1
    asked = []
    monkeypatch.setattr(
        watch, "_gather", lambda row: asked.append(row) or np.array([row, [own_of_0, 2.0]])
    )
    monkeypatch.setattr(watch, "_rows", lambda own, whole: [own, whole])
    for step in range(1, 9):
        now[0] += 0.5
        with watch.waiting():
            now[0] += 1.5
        watch.after_step(step)
    np.testing.assert_allclose(asked, [[0.5, 2.0]] * 4)
    assert [(event, step, values["process"]) for event, step, values in told.events] == [
        ("straggler", 6, 0)
    ]
    assert told.said == [
        "process 0 keeps the others waiting: its host works 0.5 s in each step, the others 0.1 s"
    ]
