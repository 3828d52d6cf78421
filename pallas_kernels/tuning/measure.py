"""Measures calls in a separate process.

That process may crash, hang or lose its GPU: each costs one line, and nothing else.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pallas_kernels.calls import Call, to_json
from pallas_kernels.tuning.decide import decide

WORKER = (sys.executable, "-m", "pallas_kernels.tuning.worker")
ROUNDS = 12
PREPARING = 0.7  # share of a call's time, after which what has been compiled is timed


@dataclass(frozen=True)
class Limits:
    """The seconds until the worker counts as hung, or a call as done."""

    start: float = 90.0  # of the process: jax and its GPU
    step: float = 20.0  # of one compilation, or one turn
    call: float = 60.0


@dataclass(frozen=True)
class Process:
    """The settings with which the worker process is started."""

    command: Sequence[str] = WORKER
    environment: Mapping[str, str] | None = None  # None: this process's
    limits: Limits = field(default_factory=Limits)


@dataclass
class Finding:
    """The result of measuring one call."""

    call: Call
    chosen: str | None = None
    order: list[str] = field(default_factory=list)
    right: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    remark: str = ""

    def document(self) -> dict[str, Any]:
        """Returns the entry of the table: times in milliseconds, the median of the rounds."""
        return {
            "implementation": self.chosen,
            "milliseconds": {
                name: round(1e3 * median(seconds), 4) for name, seconds in self.times.items()
            },
            "faults": self.faults,
            "refused": self.refused,
            "remark": self.remark,
            "call": to_json(self.call),
        }


class WorkerLost(Exception):
    """The worker ended or, if it `is_silent`, gave no answer in time."""

    def __init__(self, what: str, is_silent: bool = False):
        super().__init__(what)
        self.is_silent = is_silent


def measure(
    calls: Sequence[Call],
    say: Callable[[str], None],
    process: Process | None = None,
    is_known: Callable[[str, Call], bool] = lambda *_: False,
) -> Iterator[tuple[dict[str, Any], Finding]]:
    """Yields (the worker's machine, the finding) for each call, as soon as it is known.

    `say` takes a line for each fault. A call that `is_known` on the worker's GPU is left out. Ends
    early, with a line, if the worker cannot be started.
    """
    process = process or Process()
    worker = None
    try:
        for call in calls:
            finding = Finding(call)
            deadline = time.monotonic() + process.limits.call
            while True:
                try:
                    if worker is None or worker.has_ended:
                        worker = _Worker(process)
                        deadline += worker.start_seconds
                except WorkerLost as lost:
                    say(f"kernels: the GPU cannot be measured: {lost}")
                    return
                if is_known(worker.machine["gpu"], call):
                    break
                if _try_call(worker, finding, deadline, say):
                    break
                worker.end()
            if not finding.order:
                continue
            finding.order = [name for name in finding.order if name not in finding.refused]
            finding.chosen, finding.remark = decide(finding.order, finding.faults, finding.times)
            if finding.remark:
                say(f"kernels: {call.name}: {finding.remark}")
            yield worker.machine if worker else {}, finding
    finally:
        if worker is not None:
            worker.end()


def _try_call(worker: "_Worker", finding: Finding, deadline: float, say) -> bool:
    """Lets the worker try a call. Returns False if it was lost and the rest must be tried again."""
    finding.times = {}
    at = {"at": "starting", "of": None}
    try:
        worker.send(
            call=to_json(finding.call),
            without=[*finding.faults, *finding.refused],
            right=finding.right,
            rounds=ROUNDS,
            seconds=PREPARING * max(deadline - time.monotonic(), 0),
        )
        while True:
            remaining = deadline - time.monotonic()
            message = worker.read(min(worker.limits.step, max(remaining, 0.1)))
            if "end" in message:
                return True
            if "candidates" in message:
                finding.order = message["candidates"]
                finding.refused |= message["refused"]
            elif "at" in message:
                at = message
            elif "right" in message:
                finding.right = list(dict.fromkeys([*finding.right, message["right"]]))
            elif "seconds" in message:
                finding.times.setdefault(message["of"], []).append(message["seconds"])
            elif "too_large" in message:
                finding.refused[message["of"]] = message["too_large"]
            elif "late" in message:
                say(f"kernels: {finding.call.name}: no time left for {', '.join(message['late'])}")
            elif "fault" in message:
                _fault(finding, message["of"], message["fault"], say)
    except WorkerLost as lost:
        name = at["of"]
        if name is None:
            _fault(finding, "every implementation", str(lost), say)
            finding.faults |= dict.fromkeys(finding.order, str(lost))
            worker.end()
            return True
        if time.monotonic() >= deadline and lost.is_silent:  # slow, perhaps, and not hung
            say(f"kernels: {finding.call.name}: no time left for {name} ({at['at']})")
            finding.times.pop(name, None)
            worker.end()
            return True
        _fault(finding, name, f"{lost} while {at['at']}", say)
        return False


def _fault(finding: Finding, name: str, reason: str, say) -> None:
    finding.faults[name] = reason
    finding.times.pop(name, None)
    say(f"kernels: {finding.call.name}: {name} is not used: {reason}")


class _Worker:
    """The worker process, and the lines that it writes."""

    def __init__(self, process: Process):
        self.limits = process.limits
        self.has_ended = False
        inherited = os.environ if process.environment is None else process.environment
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | dict(inherited)
        begin = time.monotonic()
        self._process = subprocess.Popen(
            process.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            start_new_session=True,  # so that all that it starts ends with it
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.machine: dict[str, Any] = self.read(self.limits.start)["machine"]
        except WorkerLost:
            self.end()
            raise
        self.start_seconds = time.monotonic() - begin

    def _listen(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        with contextlib.suppress(ValueError):  # closed
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def send(self, **request: Any) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError:
            raise WorkerLost(self._end_text()) from None

    def read(self, seconds: float) -> dict[str, Any]:
        """Returns the worker's next line; libraries may print others in between."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                raise WorkerLost(f"no answer for {seconds:.0f} s", is_silent=True) from None
            if line is None:
                raise WorkerLost(self._end_text())
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    return message

    def _end_text(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        if code < 0:
            return f"crashed ({signal.Signals(-code).name})"
        return f"ended with code {code}"

    def end(self) -> None:
        """Ends the process and everything that it has started."""
        self.has_ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
