"""Computes the change of an island, and applies the mean change of all islands.

Both are rows (fragment_rows.py).

m: islands, n: numbers in a row, b: blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.config.schema import IslandsConfig
from spmdtrain.parallel.compress import Codec, EightBits
from spmdtrain.train.islands.fragment_rows import BLOCK, OnDevices, PlacesInRow, Row, joined, split
from spmdtrain.train.islands.outer_step import MOMENTUM, OUTER, Weights, outer_step
from spmdtrain.train.setup import Setup

AT_ONCE = BLOCK << 16  # numbers of each island that are averaged at a time


def codec_of_changes(settings: IslandsConfig) -> Codec | None:
    """Returns the codec with which changes are written; None: uncompressed."""
    return None if settings.codec == "none" else Codec(settings.codec, BLOCK)


class Meet(NamedTuple):
    """The two halves of a meeting about some weights, compiled at their first call.

    `change(outer, params)` returns (the change as a row on devices, whether all are finite).
    `take(outer, momentum, params, mean change)` returns the first three after the meeting.
    """

    change: jax.stages.Wrapped
    take: jax.stages.Wrapped


def make_meet(setup: Setup, places: PlacesInRow, in_step: bool, mix: float) -> Meet:
    """Makes the halves of a meeting; `mix`: the part of its own weights that an island keeps."""
    settings = setup.config.islands
    codec = codec_of_changes(settings)

    def change(outer: Weights, params: Weights) -> tuple[OnDevices, jax.Array]:
        changes = {path: _change(outer[path], params[path]) for path in places.starts}
        finite = [jnp.isfinite(x).all() for x in changes.values()]
        return _as_row(setup, places, codec, changes), jnp.stack(finite).all()

    def take(
        outer: Weights, momentum: Weights, params: Weights, mean: OnDevices
    ) -> tuple[Weights, Weights, Weights]:
        mean_change = _of_row(setup, places, codec, mean)
        outer, momentum = outer_step(settings, in_step, outer, momentum, mean_change)
        return outer, momentum, _moved_to(outer, params, places.starts, mix)

    items = setup.state.items
    of_momentum = items.get(MOMENTUM.name, {})
    trained = {path: setup.state.params[path] for path in items[OUTER.name]}
    rest = jax.tree.map(lambda x: x.sharding, (items[OUTER.name], of_momentum, trained))
    everywhere = NamedSharding(setup.mesh, P())
    return Meet(
        jax.jit(change, out_shardings=(split(setup.mesh), everywhere)),
        jax.jit(take, out_shardings=rest, donate_argnums=(0, 1, 2)),
    )


def _change(outer: jax.Array, x: jax.Array) -> jax.Array:
    """Returns how far the weights x have come from where the meeting before left them, float32.

    That is the outer weights in the dtype of x. What its rounding took from them is no change: it
    would come back to the outer weights, and whatever is less than a spacing of x be lost for good.
    A cast to and fro would not do, because XLA leaves it out on GPUs.
    """
    info = jnp.finfo(x.dtype)
    begun = jax.lax.reduce_precision(outer, info.nexp, info.nmant)
    return begun - x.astype(jnp.float32)


class Copying(NamedTuple):
    """The outer weights, or their momentum, as an uncompressed row and back."""

    to_row: jax.stages.Wrapped
    from_row: jax.stages.Wrapped


def make_copying(setup: Setup, places: PlacesInRow) -> Copying:
    """Makes both conversions; `places`: of all weights that are trained."""
    rest = {path: x.sharding for path, x in setup.state.items[OUTER.name].items()}
    return Copying(
        jax.jit(partial(_as_row, setup, places, None), out_shardings=split(setup.mesh)),
        jax.jit(partial(_of_row, setup, places, None), out_shardings=rest),
    )


def _as_row(setup: Setup, places: PlacesInRow, codec: Codec | None, values: Weights) -> OnDevices:
    """Returns the weights as a row on devices, converted one after another.

    Each is briefly whole on every device, where all of them at once might not fit.
    """
    numbers, scales = {}, {}
    last = None
    for path in places.starts:
        x = values[path]
        if last is not None:
            x, numbers[last] = jax.lax.optimization_barrier((x, numbers[last]))
        flat_n = setup.padding.from_rest(path, x).reshape(-1)
        length = places.size_on_devices(path, setup.mesh.size)
        flat_n = jnp.pad(flat_n, (0, length - flat_n.size))
        flat_n = jax.lax.with_sharding_constraint(flat_n, split(setup.mesh))
        numbers[path], scales_b = _encode(codec, flat_n)
        if codec is not None:
            scales[path] = scales_b
        last = path
    return OnDevices(numbers, scales)


def _of_row(setup: Setup, places: PlacesInRow, codec: Codec | None, row: OnDevices) -> Weights:
    """Inverts `_as_row`."""
    weights: Weights = {}
    last = None
    for path, flat_n in row.numbers.items():
        if last is not None:
            flat_n, weights[last] = jax.lax.optimization_barrier((flat_n, weights[last]))
        if codec is not None:
            flat_n = _decode(codec, flat_n[None], row.scales[path][None])[0]
        x = flat_n[: places.size(path)].reshape(places.shapes[path])
        x = setup.padding.to_rest(path, x)
        rest = setup.state.params[path].sharding
        weights[path] = jax.lax.with_sharding_constraint(x, rest)
        last = path
    return weights


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
    if not rows[0].numbers_n.size:
        return rows[0]
    present = [(row, weight) for row, weight in zip(rows, weights, strict=True) if weight]
    codec = codec_of_changes(settings)
    if not present:
        empty = jnp.zeros(rows[0].numbers_n.size, jnp.float32)
        return Row(*map(np.asarray, _encode(codec, empty)))
    total = sum(weight for _, weight in present)
    weights_m = np.array([weight / total for _, weight in present], np.float32)
    pieces = _pieces([row for row, _ in present])
    return joined(Row(*jax.device_get(_mean(codec, *piece, weights_m))) for piece in pieces)


def _pieces(rows: Sequence[Row]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the numbers and scales of all rows, some blocks at a time."""
    for start in range(0, rows[0].numbers_n.size, AT_ONCE):
        parts = [row.part(start, start + AT_ONCE) for row in rows]
        yield np.stack([part.numbers_n for part in parts]), np.stack([p.scales_b for p in parts])


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
