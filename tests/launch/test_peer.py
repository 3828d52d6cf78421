"""What a host leaves in memory is on the next one, whole, and comes back when the host is lost."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
from helpers import tiny

from spmdtrain.config import to_toml
from spmdtrain.config.errors import ConfigError
from spmdtrain.launch.peer import peer as module
from spmdtrain.launch.peer import wire
from spmdtrain.launch.peer.peer import Peer
from spmdtrain.launch.place import COORDINATOR, HOST, HOSTS, Place
from spmdtrain.launch.snapshot_memory import HostMemory
from spmdtrain.processes.coordinator import ThreadServer
from spmdtrain.processes.snapshots.slot import Head, newest_of
from spmdtrain.running import loop

SIZE = 3 * wire.CHUNK + 17


def free_ports() -> int:
    """A port that is free, as is the one after it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("", port + 1))
                return port


def write(memory: HostMemory, process: int, number: int) -> None:
    slots = memory.slots(process)
    slot = next(slot for slot in slots if slot is not newest_of(slots))
    slot.begin(SIZE)[:] = bytes([number]) * SIZE
    slot.finish(number, 10 * number, SIZE, {"process": process})


def contents(memory: HostMemory, process: int) -> dict[Head, bytes]:
    return {
        head: bytes(slot.contents(head)) for slot in memory.slots(process) if (head := slot.head())
    }


def wait_for(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@contextlib.contextmanager
def hosts(count: int, memories: dict[int, HostMemory], token: str = "the run"):
    """Peers of hosts with a process each, all in this program; yields what starts another one."""
    coordinator = f"localhost:{free_ports()}"
    with contextlib.ExitStack() as held:

        def start(host: int, named: str = token) -> Peer:
            place = Place(count, host, coordinator)
            return held.enter_context(Peer(place, named, memories[host], [host]))

        yield start


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.02)
    monkeypatch.setattr(module, "FETCH_SECONDS", 10.0)


@pytest.mark.usefixtures("at_once")
def test_a_host_that_takes_the_place_of_a_lost_one_fetches_its_snapshots():
    memories = {host: HostMemory() for host in range(3)}
    with hosts(3, memories) as start:
        peers = [start(host) for host in range(3)]
        waiting = [threading.Thread(target=peer.fetch) for peer in peers]
        for each in waiting:
            each.start()
        for each in waiting:
            each.join()
        for number in (1, 2, 3):
            for host in range(3):
                write(memories[host], host, number)
                newest = newest_of(memories[host].slots(host))
                assert newest is not None
                wait_for(lambda: newest.arrived == number)  # noqa: B023 - at once
        lost = contents(memories[1], 1)
        assert {head.step for head in lost} == {20, 30}
        peers[1].__exit__()

        memories[1] = HostMemory()
        assert start(1).fetch()
        assert contents(memories[1], 1) == lost
        found = newest_of(memories[1].slots(1))
        assert found is not None and found.arrived == 3
        write(memories[0], 0, 4)  # to the new host, which has nothing yet
        newest = newest_of(memories[0].slots(0))
        assert newest is not None
        wait_for(lambda: newest.arrived == 4)


@pytest.mark.usefixtures("at_once")
def test_another_run_is_given_nothing(monkeypatch):
    memories = {host: HostMemory() for host in range(2)}
    with hosts(2, memories) as start:
        start(0)
        peer = start(1)
        peer.fetch()
        write(memories[1], 1, 1)
        newest = newest_of(memories[1].slots(1))
        assert newest is not None
        wait_for(lambda: newest.arrived == 1)
        peer.__exit__()
        monkeypatch.setattr(module, "FETCH_SECONDS", 0.5)
        memories[1] = HostMemory()
        assert not start(1, "another run").fetch() and not contents(memories[1], 1)


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("", free_ports() + 1), family=ThreadServer.address_family) as taken:
        port = taken.getsockname()[1] - 1
        with pytest.raises(ConfigError, match="the one after .* another port in SPMDTRAIN_COORD"):
            Peer(Place(2, 0, f"localhost:{port}"), "the run", HostMemory(), [0])


@pytest.mark.parametrize("what", ["nothing", "a bit", "the end", "overwritten"])
def test_what_does_not_arrive_as_it_was_is_not_kept(what):
    sent, kept = HostMemory(), HostMemory()
    write(sent, 0, 1)
    [slot] = [slot for slot in sent.slots(0) if slot.head()]
    [into, _] = kept.slots(0)
    head = slot.head()
    assert head is not None
    here, there = socket.socketpair()
    outbox, inbox = socket.socketpair()

    def on_the_way() -> None:
        data = bytearray()
        while part := there.recv(1 << 20):
            data += part
        if what == "a bit":
            data[SIZE // 2] ^= 4
        outbox.sendall(data[:-1] if what == "the end" else data)
        outbox.close()

    carrier = threading.Thread(target=on_the_way)
    carrier.start()
    with here:
        if what == "overwritten":
            slot.head = lambda: None  # as its process writes the next one
        wire.send(here, slot, head)
    if what == "the end":
        with pytest.raises(ConnectionError):
            wire.receive(inbox.makefile("rb"), into, head)
    else:
        assert wire.receive(inbox.makefile("rb"), into, head) == (what == "nothing")
    carrier.join()
    assert (into.head() == head) == (what == "nothing")


STEPS, DIES = 40, 12
PATIENT = 500.0  # seconds, on a busy machine
SETTINGS = (
    "model.layers=1", "model.embed=16", "model.heads=2", "train.global_batch=4",
    "optimizer.name=sgd", f"train.steps={STEPS}", "checkpoint.every=0", "mesh.data=2",
)  # fmt: skip
# Slows the steps down, so that the other one can be killed in the middle of them.
HOOK = """
import time
def slow(event, step, figures):
    time.sleep(0.05)
"""


@pytest.mark.long
def test_a_run_that_loses_a_host_goes_on_with_the_same_bits(tmp_path):
    """The launcher of one of two hosts is killed, with its process; another takes its place."""
    (tmp_path / "hook.py").write_text(HOOK)
    memory = ("checkpoint.memory_every=1", "checkpoint.memory_peer=true")
    own = f"own.hooks=['{tmp_path / 'hook.py'}:slow']"
    (tmp_path / "run.toml").write_text(to_toml(tiny(*SETTINGS, *memory, own)))
    coordinator = f"localhost:{free_ports()}"

    def launcher(host: int) -> subprocess.Popen:
        place = {HOSTS: "2", HOST: str(host), COORDINATOR: coordinator}
        train = ("train", "run.toml", "--run", "run", "--simulate-devices", "1")
        with (tmp_path / f"{host}.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "spmdtrain.cli", "launch", *train],
                cwd=tmp_path, env=os.environ | place, stdout=log, stderr=log,
            )  # fmt: skip

    def events(name: str) -> list[int]:
        path = tmp_path / "run" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event["step"] for event in found if event["event"] == name]

    launchers = [launcher(0), launcher(1)]
    try:
        wait_for(lambda: DIES in events("snapshot"), PATIENT)
        kill_with_children(launchers[1])
        launchers[1] = launcher(1)
        assert [each.wait(PATIENT) for each in launchers] == [0, 0]
    finally:
        for each in launchers:
            kill_with_children(each)
    [resumed] = events("resumed")
    assert DIES - 1 <= resumed < STEPS and events("finished") == [STEPS]
    assert "fetched from the next host" in (tmp_path / "1.log").read_text()

    loop.run(tiny(*SETTINGS), tmp_path / "undisturbed", devices=jax.devices()[:2])
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")


def kill_with_children(process: subprocess.Popen) -> None:
    """Kills a launcher and what it has started, as the loss of a host does."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = children.read_text().split() if children.exists() else []
    for child in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
    process.kill()
    process.wait()


def losses(directory: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]
