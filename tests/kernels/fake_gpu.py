"""A GPU with faults, in the place of a real one: `python fake_gpu.py FOLDER`.

The batch of a call is its number in FAULTS. Candidates are "first" (the default), "second" (half
the time of the others, so that only its fault keeps it from being taken) and THIRD, a tiling.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from pallas_kernels.tuning.worker import serve

ROWS, WIDTH = 256, 16
THIRD = "third/deep"  # a tiling
# What is wrong with "second", by the batch of the call.
FAULTS = (
    "nothing",
    "crashes at compile",
    "crashes at run",
    "hangs",
    "runs out of memory",
    "gives NaN",
    "is wrong",
    "is wrong in a tile",
    "is late",
    "is as fast",
    "is unsteady",
    "is too large",
    "kills the default",
    "compiles slowly",
    "disappears",
)
SECONDS = {"is late": 2.0, "is as fast": 1.0}


class FakeGpu:
    """Times are planted, and a slow drift slows all candidates alike."""

    def __init__(self, folder: Path):
        self.gone = folder / "gone"
        self.turns = 0

    def describe(self):
        if self.gone.exists():
            sys.exit(1)
        return {"gpu": "Fake GPU", "jax": "none"}

    def candidates(self, _):
        return ["first", "second", THIRD], {"fourth": "it never runs"}

    def prepare(self, call, name):
        fault = self._fault(call, name)
        if fault == "crashes at compile":
            os.kill(os.getpid(), signal.SIGABRT)
        if fault == "compiles slowly":
            time.sleep(1.2)
        if FAULTS[call.batch] == "is too large" and name == THIRD:
            raise RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded")
        if fault == "runs out of memory":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory while\n allocating 1 byte")
        return lambda: (call, name)

    def values(self, call, run):
        fault = self._fault(*run())
        if fault == "crashes at run":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "hangs":
            time.sleep(600)
        if fault == "disappears":
            self.gone.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        found = self.wanted(call)
        if fault == "gives NaN":
            found["out"][0, 3, 3] = np.nan
        if fault == "is wrong":
            found["out"] *= 1.01
        if fault == "is wrong in a tile":
            found["dk"][0, 64:128] *= 1.01
        return found

    def wanted(self, _):
        random = np.random.default_rng(0)
        return {
            name: random.standard_normal((1, ROWS, WIDTH)).astype(np.float32)
            for name in ("out", "dq", "dk", "dv")
        }

    def seconds(self, run):
        call, name = run()
        self.turns += 1
        drift = 1 + 0.3 * np.sin(self.turns / 20)
        if name != "second":
            return drift
        fault = self._fault(call, name)
        if fault == "is unsteady":
            return drift * (0.1, 3.0, 0.5, 0.2)[self.turns % 4]
        return drift * SECONDS.get(fault, 0.5)

    def _fault(self, call, name):
        fault = FAULTS[call.batch]
        if fault == "kills the default":  # each but THIRD is wrong
            return "is wrong" if name != THIRD else ""
        return fault if name == "second" else ""


if __name__ == "__main__":
    serve(FakeGpu(Path(sys.argv[1])))
