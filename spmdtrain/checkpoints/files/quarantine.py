"""Moves steps that a run has given up out of the way, without deleting them."""

from typing import Any

from spmdtrain.config.run_files import QUARANTINE


def set_aside(folder: Any) -> None:
    """Moves a folder into `quarantine` beside it, under a name that is free there.

    `folder` is a path, of pathlib or of Orbax. Raises OSError if it cannot be moved.
    """
    quarantine = folder.parent / QUARANTINE
    quarantine.mkdir(exist_ok=True)
    taken = len(list(quarantine.glob(f"{folder.name}*")))
    folder.rename(quarantine / (f"{folder.name}.{taken}" if taken else folder.name))
