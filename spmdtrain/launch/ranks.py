"""Starts and watches the processes of one attempt."""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from spmdtrain.launch.snapshot_memory import HostMemory
from spmdtrain.processes import pulse
from spmdtrain.processes.snapshots import handed_slots

STACKS_SECONDS = 2.0  # for the stacks of all processes to be printed
TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL
PROGRAM = [sys.executable, "-m", "spmdtrain.cli"]
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class Rank:
    """A process: its number in the run, and its last message."""

    number: int
    process: subprocess.Popen
    pipe: int
    phase: str = pulse.BEGIN
    step: int = 0
    since: float = field(default_factory=time.monotonic)
    done: bool = False
    held: int = 0  # the step of its newest snapshot
    heard: bytes = b""  # the start of a line

    @property
    def code(self) -> int | None:
        """The exit code of the process; None while it runs."""
        return self.process.poll()


class Ranks:
    """The processes of this host. Use it as a context: all have ended when it ends."""

    def __init__(self, commands: Mapping[int, Sequence[str]], memory: HostMemory):
        """Starts the processes, with the slots that `memory` keeps for each.

        `commands`: the arguments of `spmdtrain` for each, by its number.
        """
        self._selector = selectors.DefaultSelector()
        self._memory = memory
        self.ranks = [self._started(number, command) for number, command in commands.items()]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        self.end()
        self._selector.close()
        for rank in self.ranks:
            os.close(rank.pipe)

    def _started(self, number: int, command: Sequence[str]) -> Rank:
        read, write = os.pipe()
        slots = self._memory.files(number)
        described = handed_slots.described(slots, are_copied=self._memory.are_copied)
        process = subprocess.Popen(
            [*PROGRAM, *command],
            env=os.environ | {pulse.PIPE: str(write), handed_slots.SLOTS: described},
            pass_fds=[write, *slots],
            start_new_session=True,  # Ctrl-C reaches the launcher, which forwards it
            preexec_fn=_end_with_the_launcher,  # noqa: PLW1509 - the launcher's other thread waits for signals
        )
        os.close(write)
        os.set_blocking(read, False)
        rank = Rank(number, process, read)
        self._selector.register(read, selectors.EVENT_READ, rank)
        return rank

    def listen(self, seconds: float) -> Iterator[tuple[Rank, str, int]]:
        """Waits up to `seconds` for messages of the processes, and yields (rank, phase, step)."""
        for key, _ in self._selector.select(seconds):
            rank = key.data
            try:
                chunk = os.read(rank.pipe, 1 << 16)
            except BlockingIOError:
                continue
            if not chunk:  # it has closed its end
                self._selector.unregister(rank.pipe)
                continue
            *lines, rank.heard = (rank.heard + chunk).split(b"\n")
            for line in lines:
                if news := pulse.parse(line.decode(errors="replace")):
                    yield rank, *news

    def running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.code is None]

    def signal(self, number: int) -> None:
        """Sends a signal to all running processes."""
        for rank in self.running():
            rank.process.send_signal(number)

    def print_stacks(self) -> None:
        """Makes every process print the stacks of its threads, and gives them time to do so."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGUSR1)
        time.sleep(STACKS_SECONDS)

    def end(self) -> None:
        """Sends SIGTERM, and SIGKILL to processes that still run TERM_SECONDS later."""
        if not self.running():
            return
        self.signal(signal.SIGCONT)  # a stopped process receives nothing else
        self.signal(signal.SIGTERM)
        self.wait(TERM_SECONDS)
        self.signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.process.wait()

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` until all have ended. Returns True if they have."""
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.running()


def _end_with_the_launcher() -> None:
    """Asks the kernel, in the child, to end it when the launcher is gone (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
