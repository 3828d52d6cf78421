"""Gives the dtype in which sums, means, softmaxes and activations are computed."""

from collections.abc import Callable
from functools import wraps

import jax
import jax.numpy as jnp


def wide_dtype(x: jax.Array) -> type:
    """Returns float64 if x has it, else float32."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def widen(x: jax.Array) -> jax.Array:
    """Returns x in `wide_dtype`."""
    return x.astype(wide_dtype(x))


def rounded_once(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `function`, computed from its arrays widened, with a result of the first one's dtype.

    In 16 bits jax rounds the constants of a formula and XLA each of its steps: 1.702 is 1.703, and
    1 + tanh is 0 or 1/256 in the tail of GELU.
    """

    @wraps(function)
    def computed(x: jax.Array, *others: jax.Array) -> jax.Array:
        return function(widen(x), *map(widen, others)).astype(x.dtype)

    return computed


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns x in `dtype`, rounded to it even where XLA would keep the wide values.

    On GPUs XLA drops a cast to a narrow float and back. The forward pass then computes from other
    values than those that the backward pass gets. It never drops `reduce_precision`.
    """
    narrow = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, narrow.nexp, narrow.nmant).astype(dtype)
