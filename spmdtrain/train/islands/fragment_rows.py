"""Writes the weights of a fragment as one row of numbers, on disk or over the devices of an island.

The weights follow one another in the row, in the order of their paths and in the shapes of the
model, each padded with zeros to whole blocks. So the row is the same on any mesh. It is float32, or
8 bits with one scale for each block (parallel/compress.py).

On devices each weight is flat, and split over all of them. So a process has some ranges of the row,
and no host has to write or read what the other hosts of its island can.

n: numbers in a row, b: blocks.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.parallel.padding import Shape, round_up

BLOCK = 256
Range = tuple[int, int]  # of the numbers of a row: whole blocks, the first number and the end


class Row(NamedTuple):
    """A part of a row on the host: uint8 with a float32 scale for each block, or float32 without
    scales.
    """

    numbers_n: np.ndarray
    scales_b: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.numbers_n.nbytes + self.scales_b.nbytes

    def part(self, start: int, stop: int) -> "Row":
        """Returns the numbers from `start` to `stop`, which begin and end blocks."""
        scales = slice(start // BLOCK, stop // BLOCK) if self.scales_b.size else slice(0)
        return Row(self.numbers_n[start:stop], self.scales_b[scales])


def joined(rows: Iterable[Row]) -> Row:
    """Concatenates rows; there must be at least one."""
    return Row(*(np.concatenate(field) for field in zip(*rows, strict=True)))


@dataclass(frozen=True)
class Held:
    """The ranges of a row that a process has, in order, with the numbers of all of them."""

    ranges: Sequence[Range]
    row: Row


class OnDevices(NamedTuple):
    """A row on devices: each weight by its path, flat and split over all devices of the mesh.

    Each device has the same number of blocks, so the last ones may have zeros that are no part of
    the row.
    """

    numbers: dict[str, jax.Array]
    scales: dict[str, jax.Array]  # empty where numbers are float32


@dataclass(frozen=True)
class PlacesInRow:
    """The places of a fragment's weights in its row: from `starts` on, in their shapes."""

    shapes: Mapping[str, Shape]
    starts: Mapping[str, int]
    length: int

    @classmethod
    def of(cls, shapes: Mapping[str, Shape]) -> "PlacesInRow":
        starts, end = {}, 0
        for path in sorted(shapes):
            starts[path] = end
            end += round_up(int(np.prod(shapes[path])), BLOCK)
        return cls(shapes, starts, end)

    def size(self, path: str) -> int:
        """Returns how many numbers a weight has."""
        return int(np.prod(self.shapes[path]))

    def size_on_devices(self, path: str, devices: int) -> int:
        """Returns the length of a weight that is split over devices in whole blocks."""
        return round_up(self.size(path), BLOCK * devices)

    def ranges(self, mesh: Mesh, process: int) -> list[Range]:
        """Returns the ranges of the row on the devices of a process; adjacent ones are merged."""
        owners = [device.process_index for device in mesh.devices.flat]
        ranges: list[Range] = []
        for path, start in self.starts.items():
            share = self.size_on_devices(path, len(owners)) // len(owners)
            size = round_up(self.size(path), BLOCK)
            for number, owner in enumerate(owners):
                first, end = (start + min(index * share, size) for index in (number, number + 1))
                if owner != process or first == end:
                    continue
                if ranges and ranges[-1][1] == first:
                    first, _ = ranges.pop()
                ranges.append((first, end))
        return ranges


def split(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a flat weight on devices."""
    return NamedSharding(mesh, P(mesh.axis_names))


def to_host(places: PlacesInRow, on_devices: OnDevices, ranges: Sequence[Range]) -> Held:
    """Fetches the `ranges` of the row that are on the devices of this process."""
    arrays = [*on_devices.numbers.values(), *on_devices.scales.values()]
    for array in arrays:
        array.copy_to_host_async()
    numbers, scales = [], [np.zeros(0, np.float32)]
    for path in places.starts:
        size = round_up(places.size(path), BLOCK)
        numbers += _shards(on_devices.numbers[path], size)
        if on_devices.scales:
            scales += _shards(on_devices.scales[path], size // BLOCK)
    return Held(ranges, Row(np.concatenate(numbers), np.concatenate(scales)))


def _shards(flat: jax.Array, size: int) -> list[np.ndarray]:
    """Returns this process's shards of the first `size` elements, in order."""
    by_start = {shard.index[0].start or 0: shard.data for shard in flat.addressable_shards}
    return [np.asarray(by_start[start])[: max(size - start, 0)] for start in sorted(by_start)]


def to_devices(places: PlacesInRow, held: Held, mesh: Mesh, in_blocks: bool) -> OnDevices:
    """Puts a row on all devices of a mesh; each process has its own ranges of it.

    `in_blocks`: the row has 8 bits a number, and a scale for each block.
    """
    firsts = [first for first, _ in held.ranges]
    offsets = np.cumsum([0, *(end - first for first, end in held.ranges)])

    def own_part(start: int, stop: int) -> Row:
        at = bisect_right(firsts, start) - 1
        offset = int(offsets[at]) + start - firsts[at]
        return held.row.part(offset, offset + stop - start)

    def put(path: str, field: str, block: int, dtype: type) -> jax.Array:
        """Puts a field of Row, in which an element is about `block` numbers."""
        begin, size = places.starts[path], round_up(places.size(path), BLOCK)
        length = places.size_on_devices(path, mesh.size) // block

        def shard(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(length)
            x = np.zeros(stop - start, dtype)
            first, end = start * block, min(stop * block, size)
            if first < end:
                part = own_part(begin + first, begin + end)
                x[: (end - first) // block] = getattr(part, field)
            return x

        return jax.make_array_from_callback((length,), split(mesh), shard)

    of_numbers = np.uint8 if in_blocks else np.float32
    numbers = {path: put(path, "numbers_n", 1, of_numbers) for path in places.starts}
    if not in_blocks:
        return OnDevices(numbers, {})
    scales = {path: put(path, "scales_b", BLOCK, np.float32) for path in places.starts}
    return OnDevices(numbers, scales)
