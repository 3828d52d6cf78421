"""Keeps the memory in which the processes of this host leave snapshots of their state.

It is opened here and handed to each attempt, so it outlives the processes. An anonymous file takes
no memory before something is written into it, and none when the launcher has ended, even if it was
killed.
"""

import os

from spmdtrain.processes.snapshots.handed_slots import PER_PROCESS
from spmdtrain.processes.snapshots.slot import Slot


class HostMemory:
    """The slots of each process, opened on first use.

    `are_copied`: their contents are sent to another host (launch/peer).
    """

    def __init__(self, *, are_copied: bool = False):
        self.are_copied = are_copied
        self._slots: dict[int, list[Slot]] = {}

    def slots(self, process: int) -> list[Slot]:
        """Returns the slots of a process, by its number; none on other systems than Linux."""
        if not hasattr(os, "memfd_create"):
            return []
        if process not in self._slots:
            names = (f"spmdtrain snapshot {process}.{number}" for number in range(PER_PROCESS))
            self._slots[process] = [Slot(os.memfd_create(name)) for name in names]
        return self._slots[process]

    def files(self, process: int) -> list[int]:
        """Returns the file descriptors of a process's slots."""
        return [slot.file for slot in self.slots(process)]

    def clear(self) -> None:
        """Forgets all snapshots."""
        for slots in self._slots.values():
            for slot in slots:
                slot.clear()

    def close(self) -> None:
        """Gives the memory back to the system."""
        for slots in self._slots.values():
            for slot in slots:
                os.close(slot.file)
        self._slots = {}
