"""Computes the products of rows and keys within a chunk, decayed by what lies between them:

    P_ij = sum_k rows_ik keys_jk exp(total_ik - total_jk)     for i >= j

`total` is the sum of log decays since the start of the document or chunk, so it falls. An exponent
is a difference, taken before exp: exp(-total_j) alone overflows float32 after a few dozen fast
tokens.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.recurrence.products import product

SUBCHUNK = 16  # tokens of a chunk whose decays per channel are computed pair by pair


def decayed_products(
    rows: Sequence[jax.Array], keys: jax.Array, total: jax.Array, sees: jax.Array, dtype: jnp.dtype
) -> list[jax.Array]:
    """Returns P [..., h, r, i, j] of each of `rows` [..., h, i, k] with `keys` [..., h, j, k].

    total: [..., h, r, i, 1], one decay for all channels, or [..., h, r, i, k].
    sees: [..., i, j], False where P is 0; it is False for i < j.
    dtype: that of the factors of matmuls; they are summed in float32.
    """
    sees = sees[..., None, None, :, :]
    if total.shape[-1] == 1:
        decay = masked_exp(total - jnp.swapaxes(total, -1, -2), sees)
        plain = [product("...ik,...jk->...ij", x, keys, dtype) for x in rows]
        return [x[..., None, :, :] * decay for x in plain]
    # With one dim for all leading ones: XLA's CPU backend transposes at most 8 dims, and crashes
    # at more (jaxlib 0.10).
    leading = total.shape[:-4]
    rows = [_flat(x, 3) for x in rows]
    keys, total, sees = _flat(keys, 3), _flat(total, 4), _flat(sees, 4)
    near = _within_subchunks(rows, keys, total, sees)
    far = _across_subchunks(rows, keys, total, sees, dtype)
    return [(x + y).reshape(*leading, *x.shape[1:]) for x, y in zip(near, far, strict=True)]


def masked_exp(exponent: jax.Array, where: jax.Array) -> jax.Array:
    """Returns exp(exponent), and 0 where `where` is False: there the exponent may be large."""
    return jnp.exp(jnp.where(where, exponent, -jnp.inf))


def _within_subchunks(
    rows: Sequence[jax.Array], keys: jax.Array, total: jax.Array, sees: jax.Array
) -> list[jax.Array]:
    """Returns the products of tokens of the same subchunk, elsewhere 0: [..., h, r, i, j]."""
    size = total.shape[-2]
    width = min(SUBCHUNK, size)
    count = size // width
    total = _cut(total, width)  # [..., h, r, s, i, k] for s subchunks
    places = np.arange(size).reshape(count, width)
    own_sees = sees[..., places[:, :, None], places[:, None, :]]  # [..., s, i, j]
    decay = masked_exp(total[..., :, None, :] - total[..., None, :, :], own_sees[..., None])
    keys = _cut(keys, width)[..., None, :, None, :, :] * decay
    is_own = jnp.eye(count, dtype=bool)[:, None, :, None]
    products = []
    for x in rows:
        own = (_cut(x, width)[..., None, :, :, None, :] * keys).sum(-1)
        spread = jnp.where(is_own, own[..., :, :, None, :], 0)
        products.append(spread.reshape(*own.shape[:-3], size, size))
    return products


def _across_subchunks(
    rows: Sequence[jax.Array],
    keys: jax.Array,
    total: jax.Array,
    sees: jax.Array,
    dtype: jnp.dtype,
) -> list[jax.Array]:
    """Returns the products with tokens of earlier subchunks, elsewhere 0: [..., h, r, i, j].

    The first token of the row's subchunk lies between both: exp(total_i - total_first) times
    exp(total_first - total_j), and neither exponent is above 0.
    """
    size = total.shape[-2]
    width = min(SUBCHUNK, size)
    firsts = slice(None, None, width)
    of_rows = _cut(total, width)
    first = of_rows[..., :1, :]  # [..., h, r, s, 1, k]
    is_earlier = jnp.arange(size) < width * jnp.arange(size // width)[:, None]
    of_keys = sees[..., firsts, :] & is_earlier  # [..., s, j]
    decay = masked_exp(first - total[..., None, :, :], of_keys[..., None])
    keys = keys[..., None, None, :, :] * decay  # [..., h, r, s, j, k]
    places = np.arange(size).reshape(-1, width)
    own_first = sees[..., places, places[:, :1]]  # [..., s, i]
    lead = masked_exp(of_rows - first, own_first[..., None])
    products = []
    for x in rows:
        led = _cut(x, width)[..., None, :, :, :] * lead
        own = product("...ik,...jk->...ij", led, keys, dtype)
        products.append(own.reshape(*own.shape[:-3], size, size))
    return products


def _flat(x: jax.Array, dims: int) -> jax.Array:
    """Returns x with one dim in place of all but the last `dims`."""
    return x.reshape(-1, *x.shape[x.ndim - dims :])


def _cut(x: jax.Array, width: int) -> jax.Array:
    """Returns x [..., i, k] in subchunks of `width` tokens: [..., s, i, k]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // width, width, x.shape[-1])
