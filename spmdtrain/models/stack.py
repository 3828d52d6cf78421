"""Layers of one shape, stacked along a leading dim and run by one scan: compile time does not grow with depth."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.models.flow import Flow

POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Stack(nnx.Module):
    """`count` blocks made by `make_block(rngs)`, each called as `block(x, flow) -> x`."""

    def __init__(self, make_block: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs):
        self.count = count
        stacked = nnx.vmap(make_block, transform_metadata={nnx.PARTITION_NAME: "layer"})
        self.layer = stacked(rngs.split(count))

    def __call__(self, x: jax.Array, flow: Flow) -> jax.Array:
        graphdef, parameters = nnx.split(self.layer)

        def body(x, layer):
            index, parameters = layer
            block = nnx.merge(graphdef, flow.gather(parameters))
            return block(x, flow.at_layer(index)), None

        if flow.remat != "none":
            body = jax.checkpoint(body, policy=POLICIES[flow.remat], prevent_cse=False)
        x, _ = jax.lax.scan(body, x, (jnp.arange(self.count), parameters))
        return x
