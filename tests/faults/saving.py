"""A run that saves after each step and is killed at a named phase of a save.

python -m faults.saving PHASE STEP RUN     PHASE: one of PHASES; STEP: whose save it is
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import tiny

from faults.runs import SMALLEST

SETTINGS = (*SMALLEST, "train.steps=6", "checkpoint.every=1", "checkpoint.keep=2")
# The phases of a save, and whether its step is complete by then.
PHASES = {
    "data written": False,
    "metadata written": False,
    "renamed": True,
    "begin": False,
    "data being written": False,
    "old step half deleted": True,
}


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(phase: str, step: int, run: Path) -> None:
    """From now on this process dies when the save of `step` comes to the phase."""
    from orbax.checkpoint._src.checkpointers import async_checkpointer
    from orbax.checkpoint._src.path.deleter import StandardCheckpointDeleter

    background = async_checkpointer.AsyncCheckpointer
    started: list[int] = []  # steps whose saves have begun, one at a time

    def is_due() -> bool:
        return bool(started) and started[-1] == step

    def before(do: Callable) -> Callable:
        return lambda *given, **named: die() if is_due() else do(*given, **named)

    def after(do: Callable) -> Callable:
        def call(*given: Any, **named: Any) -> Any:
            found = do(*given, **named)
            return die() if is_due() else found

        return call

    def in_callback(make: Callable) -> Callable:
        """Call what `make` gives when all arrays are on disk."""
        return lambda *given, **named: before(make(*given, **named))

    def half_deleted(delete: Callable) -> Callable:
        def call(deleter: Any, steps: list[int]) -> None:
            if not is_due():
                return delete(deleter, steps)
            for path in sorted((run / "checkpoints" / str(min(steps)) / "params").rglob("d/*")):
                path.unlink()
            return die()

        return call

    places = {
        "begin": (background, "save", before),
        "data being written": (async_checkpointer._AsyncManager, "start_async_commit", before),
        "data written": (background, "_make_on_commit_callback", in_callback),
        "metadata written": (async_checkpointer, "_on_commit_callback", before),
        "renamed": (async_checkpointer, "_on_commit_callback", after),
        "old step half deleted": (StandardCheckpointDeleter, "delete_steps", half_deleted),
    }
    owner, name, change = places[phase]
    setattr(owner, name, change(getattr(owner, name)))
    save = background.save

    def noted(checkpointer: Any, folder: Any, *given: Any, **named: Any) -> Any:
        started.append(int(folder.name))
        return save(checkpointer, folder, *given, **named)

    background.save = noted


def main(phase: str, step: int, run: Path) -> None:
    import jax

    from spmdtrain.running import loop

    kill_at(phase, step, run)
    loop.run(tiny(*SETTINGS), run, devices=jax.devices()[:1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
