"""Writes the change of an island as one row of numbers, on disk or on devices.

The weights of a fragment follow one another in the row, in the order of their paths and in the
shapes of the model, each padded with zeros to whole blocks. So the row is the same on any mesh. It
is float32, or 8 bits with one scale for each block (parallel/compress.py).

m: islands, n: numbers in a row, b: blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.config.schema import IslandsConfig
from spmdtrain.parallel.compress import Codec, EightBits
from spmdtrain.parallel.padding import Shape, round_up
from spmdtrain.train.items.outer import MOMENTUM, OUTER, Weights, outer_step
from spmdtrain.train.setup import Setup

BLOCK = 256
AT_ONCE = BLOCK << 16  # numbers of each island that are averaged at a time


class Row(NamedTuple):
    """The numbers of a message on the host: uint8 with a float32 scale for each block, or float32
    without scales.
    """

    numbers_n: np.ndarray
    scales_b: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.numbers_n.nbytes + self.scales_b.nbytes


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


def codec_of_changes(settings: IslandsConfig) -> Codec | None:
    """Returns the codec with which changes are written; None: uncompressed."""
    return None if settings.codec == "none" else Codec(settings.codec, BLOCK)


class Meet(NamedTuple):
    """The two halves of a meeting about some weights, compiled at their first call.

    `change(outer, params)` returns (numbers [n], scales [b], whether all are finite).
    `take(outer, momentum, params, numbers, scales)` returns the first three after the meeting.
    """

    change: jax.stages.Wrapped
    take: jax.stages.Wrapped


def make_meet(setup: Setup, places: PlacesInRow, in_step: bool, mix: float) -> Meet:
    """Makes the halves of a meeting; `mix`: the part of its own weights that an island keeps."""
    settings = setup.config.islands
    codec = codec_of_changes(settings)
    everywhere = NamedSharding(setup.mesh, P())

    def change(outer: Weights, params: Weights) -> tuple[jax.Array, jax.Array, jax.Array]:
        parts = []
        for path in places.starts:
            x = outer[path] - params[path].astype(jnp.float32)
            flat = setup.padding.from_rest(path, x).reshape(-1)
            parts.append(jnp.pad(flat, (0, -flat.size % BLOCK)))
        row_n = jnp.concatenate(parts)
        return *_encode(codec, row_n), jnp.isfinite(row_n).all()

    def take(
        outer: Weights, momentum: Weights, params: Weights, numbers_n: jax.Array, scales_b
    ) -> tuple[Weights, Weights, Weights]:
        row_n = _decode(codec, numbers_n[None], scales_b[None])[0]
        found = {}
        for path, start in places.starts.items():
            shape = places.shapes[path]
            x = row_n[start : start + int(np.prod(shape))].reshape(shape)
            found[path] = setup.padding.to_rest(path, x)
        outer, momentum = outer_step(settings, in_step, outer, momentum, found)
        return outer, momentum, _moved_to(outer, params, places.starts, mix)

    items = setup.state.items
    of_momentum = items.get(MOMENTUM.name, {})
    trained = {path: setup.state.params[path] for path in items[OUTER.name]}
    rest = jax.tree.map(lambda x: x.sharding, (items[OUTER.name], of_momentum, trained))
    return Meet(
        jax.jit(change, out_shardings=everywhere),
        jax.jit(take, out_shardings=rest, donate_argnums=(0, 1, 2)),
    )


def _moved_to(outer: Weights, params: Weights, paths: Mapping[str, int], mix: float) -> Weights:
    """Returns the weights of an island after a meeting."""

    def moved(path: str) -> jax.Array:
        x = outer[path]
        if mix:
            x = mix * params[path].astype(jnp.float32) + (1 - mix) * x
        return x.astype(params[path].dtype)

    return params | {path: moved(path) for path in paths}


def mean_of(settings: IslandsConfig, rows: Sequence[Row], weights: Sequence[float]) -> Row:
    """Returns the weighted mean of rows, encoded like them. A row of weight 0 does not count."""
    present = [(row, weight) for row, weight in zip(rows, weights, strict=True) if weight]
    codec = codec_of_changes(settings)
    if not present:
        empty = jnp.zeros(rows[0].numbers_n.size, jnp.float32)
        return Row(*map(np.asarray, _encode(codec, empty)))
    total = sum(weight for _, weight in present)
    weights_m = np.array([weight / total for _, weight in present], np.float32)
    pieces = _pieces([row for row, _ in present])
    found = [jax.device_get(_mean(codec, *piece, weights_m)) for piece in pieces]
    return Row(*(np.concatenate(each) for each in zip(*found, strict=True)))


def _pieces(rows: Sequence[Row]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the numbers and scales of all rows, some blocks at a time."""
    for start in range(0, rows[0].numbers_n.size, AT_ONCE):
        numbers = np.stack([row.numbers_n[start : start + AT_ONCE] for row in rows])
        blocks = slice(start // BLOCK, (start + AT_ONCE) // BLOCK)
        yield numbers, np.stack([row.scales_b[blocks] for row in rows])


@partial(jax.jit, static_argnums=0)
def _mean(
    codec: Codec | None, numbers_mn: jax.Array, scales_mb: jax.Array, weights_m: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rows_mn = _decode(codec, numbers_mn, scales_mb)
    return _encode(codec, (weights_m[:, None] * rows_mn).sum(0))


def _encode(codec: Codec | None, row_n: jax.Array) -> tuple[jax.Array, jax.Array]:
    if codec is None:
        return row_n, jnp.zeros(0, jnp.float32)
    bits_1n, scales_1b = codec.encode(row_n[None])
    return bits_1n[0], scales_1b[0]


def _decode(codec: Codec | None, numbers_mn: jax.Array, scales_mb: jax.Array) -> jax.Array:
    return numbers_mn if codec is None else codec.decode(EightBits(numbers_mn, scales_mb))
