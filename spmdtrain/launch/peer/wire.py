"""Sends a snapshot through a connection, and receives it: whole, or not at all.

Requests and answers are lines of JSON. The contents of a snapshot follow as raw bytes, and then a
trailer: whether they stayed the same while they were sent, and their CRC-32.
"""

import json
import socket
import struct
import zlib
from io import BufferedIOBase
from typing import Any

from spmdtrain.processes.snapshots.slot import Head, Slot

CHUNK = 1 << 20  # bytes at a time
LONGEST = 1 << 16  # bytes of a line
TRAILER = struct.Struct("<?I")


def send_line(connection: socket.socket, words: Any) -> None:
    connection.sendall(json.dumps(words).encode() + b"\n")


def read_line(source: BufferedIOBase) -> Any:
    """Returns the value in a line of JSON. Raises ConnectionError if the line is cut."""
    line = source.readline(LONGEST)
    if not line.endswith(b"\n"):
        raise ConnectionError("a line is cut")
    try:
        return json.loads(line)
    except ValueError:
        raise ConnectionError("a line is no JSON") from None


def send(connection: socket.socket, slot: Slot, head: Head) -> None:
    """Sends the contents of the snapshot with this head."""
    contents = slot.contents(head)
    checksum = 0
    for start in range(0, len(contents), CHUNK):
        chunk = contents[start : start + CHUNK]
        connection.sendall(chunk)
        checksum = zlib.crc32(chunk, checksum)
    connection.sendall(TRAILER.pack(slot.head() == head, checksum))


def receive(source: BufferedIOBase, slot: Slot, head: Head) -> bool:
    """Receives the contents of a snapshot into a slot. Returns True if they are whole.

    If not, the slot is left empty. Raises ConnectionError if the connection ends first.
    """
    memory = slot.begin(head.arrays + head.document)
    checksum = 0
    for start in range(0, len(memory), CHUNK):
        chunk = memory[start : start + CHUNK]
        read_into(source, chunk)
        checksum = zlib.crc32(chunk, checksum)
    trailer = memoryview(bytearray(TRAILER.size))
    read_into(source, trailer)
    if TRAILER.unpack(trailer) != (True, checksum):
        return False
    slot.seal(head)
    return True


def read_into(source: BufferedIOBase, memory: memoryview) -> None:
    """Fills memory. Raises ConnectionError if the connection ends first."""
    done = 0
    while done < len(memory):
        count = source.readinto(memory[done:])  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise ConnectionError("a snapshot is cut")
        done += count
