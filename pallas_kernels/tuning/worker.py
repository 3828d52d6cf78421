"""Tries the candidates of one call after another, in the process that touches the GPU.

A line of JSON on standard input asks for a call; the answers are lines of JSON. Before each step
that may crash or hang, a line names the step, so that the listening process (measure.py) knows what
ended this one.

    {"call": {...}, "without": [...], "right": [...], "rounds": 12, "seconds": 40.0}
        -> {"candidates": [...], "refused": {...}}
        -> {"at": "compiling", "of": NAME}, then {"right": NAME} or {"fault": WHY, "of": NAME}
           or {"too_large": WHY, "of": NAME}, of a tiling
        -> {"late": [NAME, ...]}, those for which time ran out
        -> {"at": "timing", "of": NAME}, {"seconds": S, "of": NAME}, again and again
        -> {"end": true}

`without` names candidates that are not tried again, `right` those that need no second check. After
`seconds` no further candidate is begun: those that are ready by then are timed.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from pallas_kernels.calls import Call, from_json
from pallas_kernels.tuning.right import complaint

VARIANT = "/"  # in the name of a tiling: as in choose.py, which imports jax
TOO_LARGE = "Shared memory size limit"  # in XLA's message about a tiling that does not fit this GPU
WARM_UP = 2  # turns of each candidate before those that count


class Backend(Protocol):
    """The backend that runs candidates: on_jax.py, or in tests a fake GPU with faults."""

    def describe(self) -> dict[str, Any]: ...
    def candidates(self, call: Call) -> tuple[list[str], dict[str, str]]: ...
    def prepare(self, call: Call, name: str) -> Callable[[], Any]: ...
    def values(self, call: Call, run: Callable[[], Any]) -> Mapping[str, np.ndarray]: ...
    def wanted(self, call: Call) -> Mapping[str, np.ndarray]: ...
    def seconds(self, run: Callable[[], Any]) -> float: ...


def serve(backend: Backend) -> None:
    """Answers every line of standard input."""
    _say(machine=backend.describe())
    for line in sys.stdin:
        _try_call(backend, **json.loads(line))
        _say(end=True)


def _try_call(backend, call, without, right, rounds, seconds) -> None:
    deadline = time.monotonic() + seconds
    call = from_json(call)
    names, refused = backend.candidates(call)
    _say(candidates=names, refused=refused)
    if len(names) < 2:
        return
    names = [name for name in names if name not in without]
    ready = _prepared(backend, call, names, right, deadline)
    if len(ready) < 2:
        return
    for number in range(WARM_UP + rounds):
        turns = list(ready) if number % 2 == 0 else list(reversed(ready))
        for name in turns:
            if name not in ready:
                continue
            _say(at="timing", of=name)
            try:
                seconds = backend.seconds(ready[name])
            except Exception as error:  # a kernel may fail with whatever jax or the driver raises
                _say(fault=_reason(error), of=name)
                del ready[name]
                continue
            if number >= WARM_UP:
                _say(seconds=seconds, of=name)


def _prepared(backend, call, names, right, deadline) -> dict[str, Callable[[], Any]]:
    """Returns the candidates with correct values, compiled; none is begun after the deadline."""
    ready = {}
    wanted = None
    for number, name in enumerate(names):
        if time.monotonic() > deadline:
            _say(late=names[number:])
            break
        run = None
        try:
            _say(at="compiling", of=name)
            run = backend.prepare(call, name)
            _say(at="running", of=name)
            fault = ""
            if name not in right:
                if wanted is None:
                    wanted = backend.wanted(call)
                fault = complaint(backend.values(call, run), wanted, call.dtype)
        except Exception as error:  # a compiler or a driver may raise anything
            fault = _reason(error)
        if VARIANT in name and TOO_LARGE in fault:
            _say(too_large=fault, of=name)
        elif fault:
            _say(fault=fault, of=name)
        elif run is not None:
            ready[name] = run
            _say(right=name)
    return ready


def _reason(error: Exception) -> str:
    """Returns one line of the message of a compiler or a driver."""
    message = " ".join(str(error).split())
    if "RESOURCE_EXHAUSTED" in message or isinstance(error, MemoryError):
        return f"out of memory: {message[:160]}"
    return f"{type(error).__name__}: {message[:160]}"


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    from pallas_kernels.tuning.on_jax import OnJax

    serve(OnJax(interpreted="--interpreted" in sys.argv))
