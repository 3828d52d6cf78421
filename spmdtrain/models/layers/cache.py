"""Defines the cache of earlier tokens' keys and values, for sampling."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from spmdtrain.config.schema import TransformerConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The keys and values so far, of one layer or with a leading layer dim.

    The first `length` of the s places are filled. In latent attention, the keys are the rotated
    channels and the values are the latent: one head of each, which all query heads share.
    """

    k_bskd: jax.Array
    v_bskd: jax.Array
    length: jax.Array

    def extended(self, k_btkd: jax.Array, v_btkd: jax.Array) -> "Cache":
        start = (0, self.length, 0, 0)
        put = jax.lax.dynamic_update_slice
        k_bskd = put(self.k_bskd, k_btkd, start)
        v_bskd = put(self.v_bskd, v_btkd, start)
        return Cache(k_bskd, v_bskd, self.length + k_btkd.shape[1])


def empty_cache(
    config: TransformerConfig,
    shape: tuple[int, int],
    dtype: str = "float32",
    constrain: Callable[..., jax.Array] = lambda x, *_: x,
) -> Cache:
    """Returns the empty cache of all layers [layer, b, s, k, d].

    `shape`: sequences b and places s. `constrain(x, *logical axes)` shards it.
    """
    heads, *widths = config.cached
    of_heads = "kv_heads" if config.latent is None else None

    def zeros(width: int) -> jax.Array:
        made = jnp.zeros((config.layers, *shape, heads, width), jnp.dtype(dtype))
        return constrain(made, None, "batch", None, of_heads, "head_dim")

    return Cache(zeros(widths[0]), zeros(widths[1]), jnp.int32(0))
