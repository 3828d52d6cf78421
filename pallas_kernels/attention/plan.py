"""Which tiles a program of a kernel visits, and in which order; what kernels on Triton and on Mosaic GPU share.

Letters as in problem.py. A program has one tile of queries (or of keys) and walks over tiles of the other kind: it
skips those that hold no pair that sees, and spares the mask in those that hold no other.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.problem import Inputs, Problem, sees, tiles


def bounds(problem: Problem, inputs: Inputs, block_q: int, block_k: int, over: int) -> jax.Array:
    """[1 or b, tiles, 4]: of each tile, the tiles of the other kind (dim `over` of `tiles`) it meets, as `visit` takes
    them."""
    visible, full = tiles(problem, inputs, block_q, block_k)
    xp = np if isinstance(visible, np.ndarray) else jnp
    visible, full = xp.broadcast_arrays(visible, full)
    visible, full = (xp.moveaxis(x, over, 2) for x in (visible, full))
    count = visible.shape[2]
    number = xp.arange(count)
    first = xp.min(xp.where(visible, number, count), -1)
    last = xp.max(xp.where(visible, number + 1, 0), -1)
    last = xp.maximum(first, last)
    clear = full & visible
    free = xp.where(clear.any(-1), xp.min(xp.where(clear, number, count), -1), first)
    stop = xp.minimum(xp.min(xp.where((number >= free[..., None]) & ~clear, number, count), -1), last)
    return jnp.asarray(xp.stack([first, free, stop, last], -1), jnp.int32)


def parts(problem: Problem, inputs: Inputs, whole: bool, by_query: bool) -> tuple[int, ...]:
    """Of the three that `visit` walks over, those that may have tiles. `whole`: no padding of keys."""
    if inputs.segments is not None or inputs.positions is not None or problem.left is not None:
        return 0, 1, 2
    if problem.right is not None:
        return (1, 2) if by_query else (0, 1, 2)
    return (1,) if whole else (1, 2)


def visit(parts: Sequence[int], bounds, body: Callable, carry):
    """`body(masked)(at, carry)` over [bounds 0, 1) masked, [1, 2) not, [2, 3) masked."""
    for part in parts:
        carry = jax.lax.fori_loop(bounds[part], bounds[part + 1], body(part != 1), carry)
    return carry


def scores(problem: Problem, products, base: float, tanh: Callable = jnp.tanh):
    """(scores times `base`, slope of the softcap or None) given q k^T"""
    if problem.softcap is None:
        return products * (problem.scale * base), None
    capped = tanh(products * (problem.scale / problem.softcap))
    return capped * (problem.softcap * base), 1 - capped * capped


def padded(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """x with zeros behind it in every dim, up to `shape`."""
    extra = [(0, want - have) for have, want in zip(x.shape, shape, strict=True)]
    return jnp.pad(x, extra) if any(after for _, after in extra) else x


def padded_places(inputs: Inputs, b: int, lengths: tuple[int, int]) -> list[jax.Array | None]:
    """Segments of queries and of keys, then positions, each padded to `lengths`; None where the call has none."""
    pairs = [pair or (None, None) for pair in (inputs.segments, inputs.positions)]
    return [
        None if x is None else padded(x, (b, n)) for pair in pairs for x, n in zip(pair, lengths, strict=True)
    ]  # fmt: skip


def seen_keys(problem: Problem, inputs: Inputs):
    """[1 or b, s], which keys some query sees; None: all. What they hold may be NaN where none does.

    With segments or positions it compares all pairs, unless XLA finds that every key's own query has its segment, as
    where both have the same array.
    """
    t, s = inputs.lengths
    if inputs.segments is None and inputs.positions is None:
        first = 0 if problem.left is None else max(s - t - problem.left, 0)
        return jnp.arange(s)[None] >= first if first else None
    q_position, k_position = inputs.positions or (jnp.arange(t)[None] + s - t, jnp.arange(s)[None])
    split = () if inputs.segments is None else (inputs.segments[0][:, :, None], inputs.segments[1][:, None])
    seen = sees(problem, q_position[:, :, None], k_position[:, None], *split)
    if seen is None:
        return None
    if t == s and inputs.positions is None:
        return seen.any(1) | (inputs.segments[0] == inputs.segments[1])
    return seen.any(1)


def kept(x: jax.Array, seen) -> jax.Array:
    """x [b, time, ...] where `seen` [b or 1, time], else 0; all of it where None."""
    return x if seen is None else jnp.where(seen.reshape(*seen.shape, *[1] * (x.ndim - 2)), x, 0)
