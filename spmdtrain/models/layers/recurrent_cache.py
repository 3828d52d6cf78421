"""Defines the cache of a layer whose mixer keeps a state of a fixed size, for sampling."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from spmdtrain.config.schema import TransformerConfig

Constrain = Callable[..., jax.Array]  # constrain(x, *logical axes) shards it
Axes = tuple[str | None, ...]  # logical axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentCache:
    """The state and inputs that a linear-time mixer keeps, whatever the number of earlier tokens.

    They are of one layer, or have a leading layer dim. Letters as in mixers/.
    """

    state_bhrkv: jax.Array | None  # float32: the state of each head; None: the mixer has none
    # [b, w, ...]: the last inputs of each convolution, one fewer than it has taps
    tails: tuple[jax.Array, ...]


def empty_delta_cache(
    config: TransformerConfig, layers: int, shape: tuple[int, int], dtype: str, constrain: Constrain
) -> RecurrentCache:
    """Returns the empty cache of so many layers with [model.delta], stacked.

    `shape`: sequences b and tokens, which do not change its size.
    """
    delta = config.delta
    assert delta is not None, "a model with [model.delta]"
    of_state = (delta.key_heads, delta.group, delta.key_dim, delta.value_dim)
    of_tail = (delta.taps - 1, delta.key_heads, delta.mixed_width)
    make = _Empty(layers, shape[0], constrain)
    tail = make(of_tail, (None, "kv_heads", "head_dim"), dtype)
    return RecurrentCache(make(of_state, ("kv_heads", None, None, None)), (tail,))


def empty_ssd_cache(
    config: TransformerConfig, layers: int, shape: tuple[int, int], dtype: str, constrain: Constrain
) -> RecurrentCache:
    """Returns the empty cache of so many layers with [model.ssd], as `empty_delta_cache` does."""
    ssd = config.ssd
    assert ssd is not None, "a model with [model.ssd]"
    heads = (ssd.groups, ssd.group)
    of_heads = (None, "heads") if ssd.groups == 1 else ("kv_heads", None)
    make = _Empty(layers, shape[0], constrain)
    state = make((*heads, ssd.state, ssd.head_dim), (*of_heads, None, None))
    reach = ssd.taps - 1
    of_value = make((reach, *heads, ssd.head_dim), (None, *of_heads, "head_dim"), dtype)
    of_shared = make((reach, ssd.groups, 2 * ssd.state), (None, of_heads[0], "head_dim"), dtype)
    return RecurrentCache(state, (of_value, of_shared))


def empty_conv_cache(
    config: TransformerConfig, layers: int, shape: tuple[int, int], dtype: str, constrain: Constrain
) -> RecurrentCache:
    """Returns the empty cache of so many layers with [model.conv], as `empty_delta_cache` does."""
    conv = config.conv
    assert conv is not None, "a model with [model.conv]"
    make = _Empty(layers, shape[0], constrain)
    tail = make((conv.taps - 1, config.embed), (None, "channels"), dtype)
    return RecurrentCache(None, (tail,))


@dataclass(frozen=True)
class _Empty:
    """The maker of zeros for stacked layers and a batch of sequences."""

    layers: int
    batch: int
    constrain: Constrain

    def __call__(self, shape: tuple[int, ...], axes: Axes, dtype: str = "float32") -> jax.Array:
        made = jnp.zeros((self.layers, self.batch, *shape), jnp.dtype(dtype))
        return self.constrain(made, None, "batch", *axes)
