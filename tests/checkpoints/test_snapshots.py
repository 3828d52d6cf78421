"""A run whose process has died goes on from the newest whole snapshot, with the same bits."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from helpers import assert_same_bits, tiny

import spmdtrain as st
from spmdtrain.config.errors import ConfigError
from spmdtrain.launch.snapshot_memory import HostMemory
from spmdtrain.processes.snapshots import handed_slots
from spmdtrain.processes.snapshots import slot as slot_module
from spmdtrain.processes.snapshots.slot import PAGE, Slot
from spmdtrain.running import loop
from spmdtrain.running.start import open_snapshots
from spmdtrain.train.shard import shard

pytestmark = pytest.mark.usefixtures("shared_programs", "memory")

STEPS, DIES = 6, 4  # the figures of a step are read before its snapshot is taken
TINIEST = (
    f"train.steps={STEPS}",
    "train.global_batch=4",
    "model.layers=1",
    "checkpoint.every=2",
    "optimizer.ema=0.9",
)
MESHES = {
    "one device": (),
    "data 2 fsdp 2, zero": ("mesh.data=2", "mesh.fsdp=2", "train.zero=1"),
}


@pytest.fixture
def memory(monkeypatch):
    """The memory of a launcher whose one process is this one."""
    kept = HostMemory()
    monkeypatch.setattr(handed_slots, "_slots", kept.slots(0))
    yield kept
    kept.close()


class Died(Exception):
    """Stands for the end of a process that saves nothing more."""


def dies(event: str, step: int, _: object) -> None:
    if (event, step) == ("step", DIES):
        raise Died


def devices_of(mesh: tuple[str, ...]) -> dict:
    count = 1
    for setting in mesh:
        if setting.startswith("mesh."):
            count *= int(setting.partition("=")[2])
    return {"devices": jax.devices()[:count]}


def run(directory: Path, mesh: tuple[str, ...], *more: str, hooks=(), **chosen) -> dict:
    """Runs to the end, and returns the event with which it began."""
    config = tiny(*TINIEST, *mesh, *more)
    loop.run(config, directory, hooks=hooks, **chosen, **devices_of(mesh))
    return [each for each in events(directory) if each["event"] in ("started", "resumed")][-1]


def killed(directory: Path, mesh: tuple[str, ...], *more: str) -> None:
    """Begins a run that dies; what the launcher kept of an earlier one is forgotten."""
    with contextlib.suppress(Died):
        run(directory, mesh, "checkpoint.memory_every=1", *more, hooks=[dies], fresh=True)


def events(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def assert_as_undisturbed(directory: Path, mesh: tuple[str, ...], tmp_path: Path) -> None:
    run(tmp_path / "undisturbed", mesh)
    setup = shard(tiny(*TINIEST, *mesh), **devices_of(mesh))
    found, wanted = (st.restore(each, setup) for each in (directory, tmp_path / "undisturbed"))
    assert_same_bits(found, wanted)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES.keys())
def test_it_goes_on_from_the_step_before_and_ends_with_the_same_bits(tmp_path, mesh):
    killed(tmp_path / "run", mesh)
    taken = [each for each in events(tmp_path / "run") if each["event"] == "snapshot"]
    assert [each["step"] for each in taken] == list(range(1, DIES))
    assert all(each["bytes"] > 0 and each["seconds"] > 0 for each in taken)

    begun = run(tmp_path / "run", mesh, "checkpoint.memory_every=1")
    assert (begun["from_step"], begun["from_memory"]) == (DIES - 1, True)
    assert_as_undisturbed(tmp_path / "run", mesh, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("every", ["0", "2"])
def test_a_snapshot_that_has_changed_counts_as_none(memory, tmp_path, every):
    more = f"checkpoint.every={every}"
    killed(tmp_path / "run", (), more)
    damage(newest(memory.slots(0)))
    again = (more, "checkpoint.memory_every=1")
    begun = run(tmp_path / "run", (), *again, hooks=[stops])
    assert (begun["from_step"], begun["from_memory"]) == (DIES - 2, True)

    killed(tmp_path / "second", (), more)
    for slot in memory.slots(0):
        damage(slot)
    begun = run(tmp_path / "second", (), *again, hooks=[stops])
    assert begun.get("from_step", 0) == (0 if every == "0" else 2)
    assert "from_memory" not in begun


def stops(event: str, *_: object) -> bool:
    return event == "step"


def newest(slots: list[Slot]) -> Slot:
    return max(slots, key=lambda slot: slot.head() or (0,))


def damage(slot: Slot) -> None:
    head = slot.head()
    assert head is not None
    slot.contents(head)[8] ^= 1


@pytest.mark.long
def test_what_does_not_fit_is_left_for_the_disk(memory, tmp_path):
    """Another mesh, a step that was chosen, a newer checkpoint."""
    killed(tmp_path / "run", ("mesh.data=2",))
    assert newest(memory.slots(0)).head() is not None
    wide = ("mesh.fsdp=2",)
    begun = run(tmp_path / "run", wide, "checkpoint.memory_every=1", hooks=[stops])
    assert begun["from_step"] == 2 and "from_memory" not in begun

    killed(tmp_path / "chosen", ())
    begun = run(tmp_path / "chosen", (), "checkpoint.memory_every=1", hooks=[stops], step=2)
    assert begun["from_step"] == 2 and "from_memory" not in begun

    killed(tmp_path / "newer", ())
    run(tmp_path / "newer", (), "train.steps=4")  # by somebody else
    begun = run(tmp_path / "newer", (), "checkpoint.memory_every=1", hooks=[stops])
    assert begun["from_step"] == 4 and "from_memory" not in begun


def test_it_needs_a_launcher_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(open_snapshots, "available_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match="too little memory .* found 0.0 GB available; try"):
        run(tmp_path / "run", (), "checkpoint.memory_every=1")
    monkeypatch.setattr(handed_slots, "_slots", [])
    with pytest.raises(ConfigError, match="only a launcher .* asked checkpoint.memory_every=1"):
        run(tmp_path / "run", (), "checkpoint.memory_every=1")


# Writes snapshots whose bytes are all their number, until it is killed.
WRITER = """
import sys
from spmdtrain.processes.snapshots.slot import Slot
slots = [Slot(int(file)) for file in sys.argv[1:]]
number = max(slot.head().number if slot.head() else 0 for slot in slots)
while True:
    number += 1
    size = 100_000 + 1000 * (number % 7)
    slots[number % 2].begin(size)[:] = bytes([number % 251]) * size
    slots[number % 2].finish(number, number, size, number)
"""


def test_wherever_its_writer_is_killed_one_snapshot_is_whole():
    memory = HostMemory()
    slots = memory.slots(0)
    chosen = random.Random(0)
    before = 0
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, *map(str, memory.files(0))], pass_fds=memory.files(0)
        )
        wait_for(lambda: (newest(slots).head() or (0,))[0] > before + 2)  # noqa: B023 - at once
        time.sleep(chosen.uniform(0, 0.02))
        writer.kill()
        writer.wait()
        whole = [head for slot in slots if (head := slot.head())]
        assert whole and max(whole).number > before
        before = max(whole).number
        for slot in slots:
            if head := slot.head():
                arrays = bytes(slot.contents(head)[: head.arrays])
                assert set(arrays) == {head.number % 251} and slot.document() == head.number
    memory.close()


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # asked once: it may be true for an instant only
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_head_of_which_a_part_is_written_is_none(monkeypatch):
    """A writer may be killed between any two fields."""
    memory = HostMemory()
    [slot, _] = memory.slots(0)
    slot.begin(10)[:] = b"0123456789"
    whole = slot_module.FACTS

    class Killed(Exception):
        pass

    class Torn:
        unpack_from, size = whole.unpack_from, whole.size

        @staticmethod
        def pack_into(buffer, offset, *facts):
            whole.pack_into(buffer, offset, *facts[:-1], 0)
            raise Killed

    monkeypatch.setattr(slot_module, "FACTS", Torn)
    with pytest.raises(Killed):
        slot.finish(3, 7, 10, {"a": 1})
    assert slot.head() is None and slot.document() is None
    memory.close()


def test_a_slot_takes_no_memory_before_it_is_used_and_forgets():
    memory = HostMemory()
    [slot, _] = memory.slots(0)
    assert slot.head() is None and slot.document() is None and slot.reserved == 0
    slot.begin(10)[:] = b"0123456789"
    assert slot.head() is None and slot.reserved == PAGE + 10
    slot.finish(3, 7, 10, {"a": 1})
    head = slot.head()
    assert head and (head.number, head.step) == (3, 7) and slot.document() == {"a": 1}
    slot.clear()
    assert slot.head() is None
    memory.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(slot.file)
