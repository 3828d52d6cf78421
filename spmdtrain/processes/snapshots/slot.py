"""The memory of one snapshot: a head, arrays, and a JSON document about them.

The memory is an anonymous file (memfd_create) that the launcher opens, so it lives as long as the
launcher, however its processes end, and the kernel frees it with the launcher. It does not count
towards /dev/shm, which containers often limit to 64 MB.

The head is cleared before anything is written, and written last. Its first 8 bytes, which make it
valid, are cleared first and written last of all, in one store. So a snapshot is whole or absent,
wherever its writer was killed: every store of a killed process is seen by later readers.
"""

import json
import mmap
import os
import struct
import zlib
from typing import Any, NamedTuple

PAGE = 4096  # bytes before the arrays: the head, and the number that has arrived
MAGIC = b"snapshot"
FACTS = struct.Struct("<5Q")
ARRIVED = struct.Struct("<Q")
AFTER_HEAD = len(MAGIC) + FACTS.size  # the place of the number that has arrived


class Head(NamedTuple):
    """The facts about a snapshot. A later snapshot has a larger number."""

    number: int
    step: int
    arrays: int  # bytes
    document: int  # bytes
    checksum: int  # CRC-32 of the document

    @property
    def end(self) -> int:
        """The size of the snapshot, including its head."""
        return PAGE + self.arrays + self.document


class Slot:
    """The memory of one snapshot. `file` is the descriptor of an anonymous file."""

    def __init__(self, file: int):
        self.file = file
        self._map: mmap.mmap | None = None

    def reserve(self, size: int) -> None:
        """Takes memory for `size` bytes from the system now, not during the first snapshot.

        Raises OSError if there is none.
        """
        if size > self.reserved:
            os.posix_fallocate(self.file, 0, size)

    @property
    def reserved(self) -> int:
        """The bytes that the slot has taken from the system."""
        return os.fstat(self.file).st_size

    def head(self) -> Head | None:
        """Returns the facts about the snapshot; None if there is no whole one."""
        if self.reserved < PAGE:
            return None
        first = self._mapped()[:AFTER_HEAD]
        head = Head(*FACTS.unpack_from(first, len(MAGIC)))
        return head if first.startswith(MAGIC) and head.end <= self.reserved else None

    def document(self) -> Any:
        """Returns the document of a whole snapshot; None if there is no such snapshot."""
        head = self.head()
        if head is None:
            return None
        text = bytes(self._mapped()[head.end - head.document : head.end])
        return json.loads(text) if zlib.crc32(text) == head.checksum else None

    def contents(self, head: Head) -> memoryview:
        """Returns the bytes of arrays and document. They may be overwritten at any time."""
        return memoryview(self._mapped())[PAGE : head.end]

    def clear(self) -> None:
        """Makes the slot hold no snapshot."""
        if self.reserved >= PAGE:
            self._mapped()[: len(MAGIC)] = bytes(len(MAGIC))
            self._mapped()[:PAGE] = bytes(PAGE)

    def begin(self, size: int) -> memoryview:
        """Clears the slot, and returns memory of `size` bytes to write into."""
        self.clear()
        self.reserve(PAGE + size)
        return memoryview(self._mapped())[PAGE : PAGE + size]

    def finish(self, number: int, step: int, arrays: int, document: Any) -> None:
        """Writes the document behind `arrays` bytes, and then the head: the snapshot is whole."""
        text = json.dumps(document).encode()
        self.reserve(PAGE + arrays + len(text))
        start = PAGE + arrays
        self._mapped()[start : start + len(text)] = text
        self.seal(Head(number, step, arrays, len(text), zlib.crc32(text)))

    def seal(self, head: Head) -> None:
        """Writes the head of a snapshot whose contents have been written."""
        FACTS.pack_into(self._mapped(), len(MAGIC), *head)
        self._mapped()[: len(MAGIC)] = MAGIC

    @property
    def arrived(self) -> int:
        """The number of the snapshot that has arrived on another host; 0: none."""
        if self.reserved < PAGE:
            return 0
        [number] = ARRIVED.unpack_from(self._mapped(), AFTER_HEAD)
        return number

    @arrived.setter
    def arrived(self, number: int) -> None:
        ARRIVED.pack_into(self._mapped(), AFTER_HEAD, number)

    def _mapped(self) -> mmap.mmap:
        """Returns the memory. An older, shorter map stays as long as something refers to it."""
        if self._map is None or len(self._map) < self.reserved:
            self._map = mmap.mmap(self.file, 0)
        return self._map


def newest_of(slots: list[Slot]) -> Slot | None:
    """Returns the slot with the latest whole snapshot; None if there is none."""
    whole = [(head.number, slot) for slot in slots if (head := slot.head())]
    return max(whole, key=lambda pair: pair[0])[1] if whole else None
