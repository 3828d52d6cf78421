"""Draws the initial values of a mixer's taps and decays, as Mamba-2 and FLA draw them.

A head's decay is exp(-exp(decay_log) softplus(x + decay_bias)). Drawn like this, heads remember
from about one token to a thousand.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spmdtrain.models.projection import FullPrecision

SLOWEST, FASTEST = 1.0, 16.0  # exp(decay_log)
SHORTEST, LONGEST = 1e-3, 1e-1  # softplus(decay_bias)


def drawn_taps(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """Returns the taps of a convolution [*shape]; the last dim, the taps, has no logical axis."""
    limit = shape[-1] ** -0.5
    drawn = jax.random.uniform(rngs.params(), shape, minval=-limit, maxval=limit)
    return nnx.Param(drawn, out_sharding=(*axes, None))


def drawn_decay_log(rngs: nnx.Rngs, heads: int, axis: str = "kv_heads") -> FullPrecision:
    """Returns a logarithm for each value head; those of a key head follow each other."""
    drawn = jax.random.uniform(rngs.params(), (heads,), minval=SLOWEST, maxval=FASTEST)
    return FullPrecision(jnp.log(drawn), out_sharding=(axis,))


def drawn_decay_bias(rngs: nnx.Rngs, size: int, axis: str = "kv_heads") -> FullPrecision:
    """Returns a bias for each value head, or for each channel of each value head, in one vector."""
    low, high = np.log(SHORTEST), np.log(LONGEST)
    step = jnp.exp(jax.random.uniform(rngs.params(), (size,), minval=low, maxval=high))
    inverse_softplus = step + jnp.log(-jnp.expm1(-step))
    return FullPrecision(inverse_softplus, out_sharding=(axis,))
