"""Defines the cache of a layer whose mixer keeps a state of a fixed size, for sampling."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from spmdtrain.config.schema import TransformerConfig

STATE_AXES = ("batch", "kv_heads", None, None, None)  # logical axes
TAIL_AXES = ("batch", None, "kv_heads", "head_dim")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentCache:
    """The state and inputs that a linear-time mixer keeps, whatever the number of earlier tokens.

    They are of one layer, or have a leading layer dim. Letters as in mixers/.
    """

    state_bhrkv: jax.Array  # float32: the state of each head
    tail_bwhn: jax.Array  # the last inputs of the convolution, one fewer than it has taps


def empty_delta_cache(
    config: TransformerConfig,
    layers: int,
    shape: tuple[int, int],
    dtype: str,
    constrain: Callable[..., jax.Array],
) -> RecurrentCache:
    """Returns the empty cache of so many layers with [model.delta], stacked.

    `shape`: sequences b and tokens, which do not change its size. `constrain(x, *logical axes)`
    shards it.
    """
    delta = config.delta
    assert delta is not None, "a model with [model.delta]"
    of_state = (delta.key_heads, delta.group, delta.key_dim, delta.value_dim)
    of_tail = (delta.taps - 1, delta.key_heads, delta.mixed_width)
    state = jnp.zeros((layers, shape[0], *of_state), jnp.float32)
    tail = jnp.zeros((layers, shape[0], *of_tail), jnp.dtype(dtype))
    return RecurrentCache(constrain(state, None, *STATE_AXES), constrain(tail, None, *TAIL_AXES))
