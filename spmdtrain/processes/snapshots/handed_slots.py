"""Hands the slots of a process from the launcher to it: their descriptors, in the environment."""

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmdtrain.processes.snapshots.slot import Slot

SLOTS = "SPMDTRAIN_SNAPSHOTS"  # environment variable with the file descriptors
PER_PROCESS = 2  # one is whole while the other one is written

_slots: "list[Slot]" = []
_are_copied = False


def described(files: Sequence[int], *, are_copied: bool) -> str:
    """Returns the value of the environment variable for slots with these files.

    `are_copied`: the launcher sends their contents to another host.
    """
    return json.dumps([are_copied, *files])


def take() -> None:
    """Takes the slots that the launcher has opened for this process, if there is one."""
    global _are_copied
    text = os.environ.pop(SLOTS, "")
    _slots.clear()
    if not text:
        return
    _are_copied, *files = json.loads(text)
    try:
        for file in files:
            os.set_inheritable(file, False)
            os.fstat(file)
    except OSError:  # inherited from a launcher that is not ours
        return
    from spmdtrain.processes.snapshots.slot import Slot

    _slots.extend(Slot(file) for file in files)


def slots() -> "list[Slot]":
    """Returns the slots of this process; none without a launcher, or not on Linux."""
    return [*_slots]


def are_copied() -> bool:
    """Returns True if the launcher copies the snapshots of this process to another host."""
    return bool(_slots) and _are_copied
