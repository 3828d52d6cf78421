"""The folders of the steps of a run, RUN/checkpoints/N: found by their names alone."""

from pathlib import Path
from typing import TYPE_CHECKING

from spmdtrain.config.run_files import CHECKPOINTS

if TYPE_CHECKING:
    from etils import epath  # the paths that Orbax expects

QUARANTINE = "quarantine"  # the folder of damaged steps, next to the good ones


def newest_step(run: Path) -> int | None:
    """Returns the newest checkpoint below `run`; reads directory names only."""
    return max(steps_in(run), default=None)


def steps_in(run: Path) -> list[int]:
    """Returns the checkpoints below `run`, oldest first; reads directory names only."""
    folders = [path for path in (run / CHECKPOINTS).glob("*") if path.is_dir()]
    return sorted(int(path.name) for path in folders if path.name.isdecimal())


def set_aside(folder: "epath.Path") -> None:
    """Moves the folder of a step into `quarantine`, under a name that is free there."""
    quarantine = folder.parent / QUARANTINE
    quarantine.mkdir(exist_ok=True)
    taken = len(list(quarantine.glob(f"{folder.name}*")))
    folder.rename(quarantine / (f"{folder.name}.{taken}" if taken else folder.name))
