"""Defines the caches of earlier tokens, for sampling: of a layer of each kind, and of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spmdtrain.config.schema import LayerStack, Mixer, TransformerConfig
from spmdtrain.models.layers.recurrent_cache import (
    RecurrentCache,
    empty_conv_cache,
    empty_delta_cache,
    empty_ssd_cache,
)

Constrain = Callable[..., jax.Array]  # constrain(x, *logical axes) shards it
Shape = tuple[int, int]  # sequences b and places s


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The keys and values so far of a layer with attention, or with a leading layer dim.

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


def empty_keys_and_values(
    config: TransformerConfig, layers: int, shape: Shape, dtype: str, constrain: Constrain
) -> Cache:
    """Returns the empty cache of so many layers with attention, stacked."""
    heads, *widths = config.cached
    of_heads = "kv_heads" if config.latent is None else None

    def zeros(width: int) -> jax.Array:
        made = jnp.zeros((layers, *shape, heads, width), jnp.dtype(dtype))
        return constrain(made, None, "batch", None, of_heads, "head_dim")

    return Cache(zeros(widths[0]), zeros(widths[1]), jnp.zeros(layers, jnp.int32))


class CacheOfBoth(NamedTuple):
    """The caches of a layer whose mixer is attention and a state space."""

    attention: Cache
    ssd: RecurrentCache


def _empty_of_both(*of_layers: Any) -> CacheOfBoth:
    return CacheOfBoth(empty_keys_and_values(*of_layers), empty_ssd_cache(*of_layers))


EMPTY: Mapping[Mixer, Callable[..., Any]] = {
    "attention": empty_keys_and_values,
    "delta": empty_delta_cache,
    "ssd": empty_ssd_cache,
    "conv": empty_conv_cache,
    "both": _empty_of_both,
    "none": lambda *_: None,
}
# The caches of a stack: one for each layer of a round, with a leading dim of the rounds.
StackCache = tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelCache:
    """The caches of all stacks of a model (`TransformerConfig.stacks`) after `length` tokens."""

    stacks: tuple[StackCache, ...]
    length: jax.Array


def empty_cache(
    config: TransformerConfig,
    shape: Shape,
    dtype: str = "float32",
    constrain: Constrain = lambda x, *_: x,
) -> ModelCache:
    """Returns the empty cache of a model for `shape`: sequences b and places s.

    `constrain(x, *logical axes)` shards its arrays.
    """

    def of_stack(stack: LayerStack) -> StackCache:
        return tuple(
            None
            if layer.shares_keys
            else EMPTY[layer.mixer](config.of_layer(layer), stack.rounds, shape, dtype, constrain)
            for layer in stack.pattern
        )

    return ModelCache(tuple(of_stack(stack) for stack in config.stacks), jnp.int32(0))
