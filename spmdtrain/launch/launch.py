"""Runs attempt after attempt under a launcher, until one ends properly.

An attempt ends when one of its processes does. The others, which learn of it from the coordinator
(processes/peers.py), then have EXIT_SECONDS to end by themselves; after that they are ended. If all
are silent for longer than their phases may take, the run hangs: all print their stacks, and all are
ended.

A failure that may not recur (a process was killed or hung, a bug) is followed by another attempt,
after a pause that doubles. A failure that would recur (the settings, the data, numbers that
diverged, a full disk) is not, and neither are CYCLES failures in a row without a new checkpoint or
snapshot. The last of them starts from the disk: the snapshots may be the cause.
"""

import contextlib
import hashlib
import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spmdtrain.config.errors import (
    DONE,
    PREEMPTED,
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    HangError,
    PeerLostError,
    StorageError,
)
from spmdtrain.launch.patience import Patience
from spmdtrain.launch.peer.peer import Peer
from spmdtrain.launch.place import Place
from spmdtrain.launch.ranks import Rank, Ranks
from spmdtrain.launch.snapshot_memory import HostMemory
from spmdtrain.processes import closed_outputs, pulse, signals
from spmdtrain.processes.goodput import DOWN, Goodput
from spmdtrain.processes.signals import COMMANDS, WARNINGS

POLL_SECONDS = 0.1
EXIT_SECONDS = 15.0  # for the others to end after one has failed
ORDERLY_SECONDS = 60.0  # for the others to end after one has ended properly
CYCLES = 3
NAMED = 4  # processes named in the line about a hang
PAUSE_SECONDS = 1.0  # before the second attempt
LONGEST_PAUSE = 60.0
FINAL = {
    kind.exit_code
    for kind in (ConfigError, DataError, CheckpointError, DivergedError, StorageError)
} | {
    DONE,
    PREEMPTED,
}


@dataclass(frozen=True)
class Ending:
    """The end of an attempt: its exit code, and a line if something went wrong."""

    code: int
    line: str = ""


def resume_command(command: Sequence[str]) -> list[str]:
    """Returns the arguments for the next attempt: it resumes, without `--fresh` and `--step`.

    argparse accepts an abbreviated option if it is unambiguous.
    """
    passed = []
    arguments = iter(command)
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if len(name) > len("--s") and "--step".startswith(name):
            if not equals:
                next(arguments, None)  # its value
        elif not (len(name) > len("--") and "--fresh".startswith(name)):
            passed.append(argument)
    return passed


class Launcher:
    """The launcher of `command`: the arguments of `spmdtrain`, normally those of `train`.

    With `copies`, the next host keeps copies of the snapshots that the processes leave in memory.
    """

    def __init__(
        self,
        command: Sequence[str],
        place: Place,
        processes: int,
        step_seconds: float,
        *,
        copies: bool = False,
    ):
        self._command = list(command)
        self._place = place
        self._processes = processes
        self._patience = Patience(step_seconds)
        self._commands = 0  # signals received
        self._warnings = 0
        self._saved = -1  # the newest step on disk, or in the memory of all processes
        self._restored = False  # in this attempt
        self._memory = HostMemory(are_copied=copies)
        self.goodput = Goodput()
        self.attempts = 0

    def run(self) -> int:
        """Returns the exit code of the last attempt."""
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (*COMMANDS, *WARNINGS)
            if number in COMMANDS or signals.is_free(number)  # not one ignored by nohup
        }
        try:
            with self._copied():
                return self._attempts()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._memory.close()

    @contextlib.contextmanager
    def _copied(self) -> Iterator[None]:
        """Copies snapshots to the next host while in the block, if they are to be copied.

        First it fetches the copies that the next host keeps, in case this host replaces a lost one.
        """
        if not self._memory.are_copied:
            yield
            return
        run = json.dumps([self._command, self._place.hosts, self._place.coordinator])
        token = hashlib.sha256(run.encode()).hexdigest()
        processes = list(self._place.flags(self._processes))
        with Peer(self._place, token, self._memory, processes) as peer:
            if peer.fetch(lambda: self._end_requests > 0):
                say("the snapshots of this host's processes were fetched from the next host")
            yield

    def _attempts(self) -> int:
        without_progress = 0
        while True:
            saved_before = self._saved
            self.attempts += 1
            ending = self._attempt()
            if ending.line:
                say(ending.line)
            if ending.code in FINAL or self._end_requests:
                return self._over(ending.code)
            progressed = self._saved > saved_before
            without_progress = 1 if progressed else without_progress + 1
            if without_progress >= CYCLES:
                say(f"{CYCLES} attempts without a new checkpoint: giving up")
                return self._over(ending.code)
            if without_progress == CYCLES - 1 and self._restored:
                self._memory.clear()
            pause = min(PAUSE_SECONDS * 2 ** (without_progress - 1), LONGEST_PAUSE)
            say(f"attempt {self.attempts + 1} starts in {pause:.0f} s")
            self._sleep(pause)
            if self._end_requests:
                return self._over(ending.code)

    def _over(self, code: int) -> int:
        """Ends the account of a run whose last attempt ended with `code`; returns the code."""
        if code not in (DONE, PREEMPTED):
            self.goodput.over()
        return code

    def _attempt(self) -> Ending:
        flags = self._place.flags(self._processes)
        self._restored = False
        self.goodput.enter(pulse.BEGIN)
        commands = {number: [*self._command, *more] for number, more in flags.items()}
        with Ranks(commands, self._memory) as ranks:
            ending = self._watch(ranks)
        if ending.code not in (DONE, PREEMPTED):
            self.goodput.failed(hung=ending.code == HangError.exit_code)
        else:
            self.goodput.enter(DOWN)
        return ending

    def _watch(self, ranks: Ranks) -> Ending:
        forwarded = 0
        since = -math.inf
        while True:
            for rank, what, step in ranks.listen(POLL_SECONDS):
                self._note(ranks, rank, what, step)
            is_another = time.monotonic() - since > 2 * signals.HANDED_ON_SECONDS
            if self._end_requests > forwarded and is_another:
                forwarded += 1
                since = time.monotonic()
                ranks.signal(signal.SIGTERM)
            if len(ranks.running()) < len(ranks.ranks):
                return self._ended(ranks)
            if ending := self._hang(ranks):
                return ending

    def _note(self, ranks: Ranks, rank: Rank, what: str, step: int) -> None:
        """Handles a message. The first process of this host drives the account of time."""
        if rank is ranks.ranks[0]:
            self.goodput.heard(what, step)
        if what == pulse.DONE:
            rank.done = True
        elif what == pulse.SAVED:
            self._saved = max(self._saved, step)
        elif what == pulse.HELD:
            rank.held = step
            self._saved = max(self._saved, min(other.held for other in ranks.ranks))
        elif what != pulse.UNDONE:
            now = time.monotonic()
            self._patience.learn(rank.phase, now - rank.since)
            rank.phase = what
            rank.step = step
            rank.since = now
            if what not in (pulse.BEGIN, pulse.RESTORE):
                self._restored = True
                self._command = resume_command(self._command)

    def _hang(self, ranks: Ranks) -> Ending | None:
        """Ends all processes if all have been silent for longer than their phases may take.

        While one is in a phase that may take longer, such as compiling, the others wait for it.
        """
        now = time.monotonic()
        if any(now - rank.since <= self._patience.limit(rank.phase) for rank in ranks.ranks):
            return None
        last = max(ranks.ranks, key=lambda rank: rank.since)
        # The process that is furthest behind is the likeliest to hang; the others wait for it.
        order = sorted(ranks.ranks, key=lambda rank: (rank.step, rank.since))
        where = ", ".join(f"process {rank.number} {_describe(rank)}" for rank in order[:NAMED])
        line = (
            f"the run hangs: {where}; silent for {now - last.since:.0f} s, "
            f"and {self._patience.limit(last.phase):.0f} s is the limit"
        )
        say(f"{line}; the stacks of all follow")
        ranks.print_stacks()
        ranks.end()
        return Ending(HangError.exit_code, line)

    def _ended(self, ranks: Ranks) -> Ending:
        """Waits until all processes have ended, and finds out why the attempt ended."""
        early = [rank for rank in ranks.ranks if rank.code is not None]
        orderly = early[0].done or early[0].code == PREEMPTED
        ranks.wait(ORDERLY_SECONDS if orderly else EXIT_SECONDS)
        by_themselves = [rank for rank in ranks.ranks if rank.code is not None]
        ranks.end()
        for rank, what, step in ranks.listen(0.0):
            self._note(ranks, rank, what, step)

        codes = {rank.code for rank in ranks.ranks}
        if codes == {DONE} and all(rank.done for rank in ranks.ranks):
            return Ending(DONE)
        if codes == {PREEMPTED}:
            return Ending(PREEMPTED)
        # The first process that failed by itself: those that only lost a peer end with code 8.
        by_age = [*early, *(rank for rank in by_themselves if rank not in early)]
        cause = next((rank for rank in by_age if _failed(rank)), early[0])
        code = cause.process.wait()  # it has ended, like all others
        ending = _failure(cause, code)
        if self._end_requests and code < 0:  # before it could save
            return Ending(128 - code, ending.line)
        return ending

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._end_requests:
            time.sleep(min(0.1, seconds))

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGHUP:
            closed_outputs.drop_closed()
        if number in COMMANDS:
            self._commands += 1
        else:
            self._warnings += 1

    @property
    def _end_requests(self) -> int:
        """The number of requests to end so far.

        A second one ends a process immediately, so warnings count at most once.
        """
        return max(self._commands, min(self._warnings, 1))


def _failed(rank: Rank) -> bool:
    """Returns True if this process failed, and not only because another one did."""
    if rank.code == DONE:
        return not rank.done
    return rank.code not in (PREEMPTED, PeerLostError.exit_code)


def _failure(rank: Rank, code: int) -> Ending:
    where = f"process {rank.number} {{}}, {_describe(rank)}"
    if code < 0:
        name = signal.Signals(-code).name
        return Ending(PeerLostError.exit_code, where.format(f"was ended by {name}"))
    if code == DONE:
        what = "ended with code 0 before the run was over"
        return Ending(PeerLostError.exit_code, where.format(what))
    return Ending(code, where.format(f"ended with code {code}"))


def _describe(rank: Rank) -> str:
    words = rank.phase.replace("_", " ")
    return f"in {words} {rank.step}" if rank.step else f"in {words}"


def say(text: str) -> None:
    """Prints a line of the launcher, among the lines of the processes."""
    with closed_outputs.tolerated():
        print(f"spmdtrain launch: {text}", file=sys.stderr, flush=True)
