"""What a layer may ask for besides its input: positions, segments, noise, and where its activations belong.

One `Flow` accompanies a microbatch through the model. It is an argument, not ambient state: a layer that is given none
cannot silently run unsharded. It is a pytree of its arrays. Letters: b batch, t time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions_bt", "segments_bt", "noise_b"],
    meta_fields=["place", "local", "lookup", "gather", "remat", "dropout"],
)
@dataclass(frozen=True)
class Flow:
    positions_bt: jax.Array  # of each token inside its document; int32
    segments_bt: jax.Array | None = None  # tokens attend within equal ids only; None: one document
    place: Callable[..., jax.Array] = lambda x, *_: x  # place(x, *logical axes): constrain an activation
    local: Callable[..., jax.Array] = lambda function, arrays, *_: function(*arrays)  # see parallel.axes.localisation
    lookup: Callable[[jax.Array, jax.Array], jax.Array] = lambda table, ids: table[ids]  # rows of a split vocabulary
    gather: Callable[[nnx.State], nnx.State] = lambda state: state  # a layer's weights, whole over fsdp
    remat: Literal["none", "dots", "full"] = "none"
    dropout: float = 0.0
    noise_b: jax.Array | None = None  # one key per sample; None: no dropout (evaluation)

    def at_layer(self, layer: jax.Array) -> "Flow":
        """The same flow, with noise of its own for layer number `layer`."""
        if self.noise_b is None:
            return self
        return replace(self, noise_b=jax.vmap(jax.random.fold_in, (0, None))(self.noise_b, layer))

    def drop(self, x: jax.Array, site: int) -> jax.Array:
        """Dropout of x [b, ...]; `site` tells places within a layer apart. Noise depends only on (seed, step, global
        sample index, layer, site): no mesh and no accumulation changes it."""
        if self.noise_b is None or not self.dropout:
            return x
        keys = jax.vmap(jax.random.fold_in, (0, None))(self.noise_b, site)
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.dropout, x.shape[1:]))(keys)
        return jnp.where(keep, x / (1 - self.dropout), 0).astype(x.dtype)


def random_key(seed: int, purpose: Literal["init", "noise"]) -> jax.Array:
    """The key of one purpose: initial values and noise of a run share a seed, but never a key."""
    return jax.random.fold_in(jax.random.key(seed), {"init": 0, "noise": 1}[purpose])


def sample_noise(seed: int, step: jax.Array, sample_b: jax.Array) -> jax.Array:
    """One random key per sample, from (seed, step, global sample index). sample_b: uint32 [b]."""
    key = jax.random.fold_in(random_key(seed, "noise"), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, sample_b)
