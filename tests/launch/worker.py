"""A trainer that computes nothing: it says what one says, and fails as it is told.

    worker.py FAULTS FOLDER [--process I ...]

FAULTS are words "RANK:STEP:KIND", of the first attempt; with an `a` before the kind, of every
attempt.
"""

import os
import signal
import sys
import time
from pathlib import Path

from spmdtrain.processes import pulse

STEPS = int(os.environ.get("WORKER_STEPS", 12))
EVERY = 4


def fail(kind: str) -> None:
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(1000)
        case "gil":
            import re

            re.match("(a*)*b", "a" * 40)  # in C, and it does not give the lock back
        case "exit":
            os._exit(0)
        case code:
            sys.exit(int(code))


def agreed(folder: Path, name: str, rank: int, count: int, asked: bool) -> bool:
    """Whether any process is asked to end; waits for all, as a collective does."""
    spare = folder / f"spare.{rank}"
    spare.write_text("x" if asked else "")
    spare.rename(folder / f"{name}.{rank}")
    while len(votes := list(folder.glob(f"{name}.*"))) < count:
        time.sleep(0.01)
    return any(vote.read_text() for vote in votes)


def main() -> None:
    how, folder = sys.argv[1], Path(sys.argv[2])
    rank = int(sys.argv[sys.argv.index("--process") + 1]) if "--process" in sys.argv else 0
    attempt = folder / f"attempts.{rank}"
    number = int(attempt.read_text()) if attempt.exists() else 0
    attempt.write_text(str(number + 1))
    faults = [word.split(":") for word in how.split(",") if word]
    mine = {int(step): kind for at, step, kind in faults if int(at) == rank}
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    pulse.begin()
    count = int(sys.argv[sys.argv.index("--processes") + 1]) if "--processes" in sys.argv else 1
    saved = folder / f"saved.{rank}"
    pulse.tell(pulse.RESTORE)
    first = int(saved.read_text()) if saved.exists() else 0
    pulse.tell(pulse.COMPILE)
    for step in range(first + 1, STEPS + 1):
        pulse.tell(pulse.STEP, step)
        if step in mine and (number == 0 or mine[step].startswith("a")):
            fail(mine[step].removeprefix("a"))
        time.sleep(0.05)
        ending = agreed(folder, f"at.{number}.{step}", rank, count, bool(asked))
        if step % EVERY == 0 or ending:
            pulse.tell(pulse.SAVE, step)
            saved.write_text(str(step))
            pulse.tell(pulse.SAVED, step)
        if ending:
            sys.exit(3)
    pulse.tell(pulse.END, STEPS)
    pulse.tell(pulse.DONE, STEPS)


if __name__ == "__main__":
    main()
