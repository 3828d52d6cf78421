"""Layers of one shape, stacked along a leading dim and run by one scan: compile time does not grow with depth."""

from collections.abc import Callable

import jax
import jax.extend.core
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.attention import saveable as attention_saveable
from spmdtrain.config.errors import ConfigError
from spmdtrain.models.context import ForwardContext
from spmdtrain.parallel.gather import LAYER_AXES


def _but_gathered_weights(primitive: jax.extend.core.Primitive, *_, **parameters) -> bool:
    """Keep everything but gathered weights: kept, those of all layers would be whole at once."""
    if primitive.name != "all_gather":
        return True
    return not set(parameters["axis_name"]) <= set(LAYER_AXES)


POLICIES = {
    "weights": _but_gathered_weights,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, attention_saveable
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Stack(nnx.Module):
    """`count` blocks made by `make_block(rngs)`, each called as `block(x, ctx)`; it gives x, or (x, side loss).

    A side loss is a float32 scalar, weighted, summed over the tokens of x as their losses are: training minimises the
    sum of both over the number of tokens.
    """

    def __init__(self, make_block: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs):
        self.count = count
        stacked = nnx.vmap(make_block, transform_metadata={nnx.PARTITION_NAME: "layer"})
        self.layer = stacked(rngs.split(count))

    def __call__(self, x: jax.Array, ctx: ForwardContext) -> tuple[jax.Array, jax.Array | None]:
        """x behind the last block, and the sum of the side losses if the blocks have any."""
        graphdef, parameters = nnx.split(self.layer)

        def body(x, layer):
            number, parameters = layer
            return run_block(nnx.merge(graphdef, ctx.gather(parameters)), x, ctx, number)

        x, sides = jax.lax.scan(rematerialised(body, ctx.remat), x, (jnp.arange(self.count), parameters))
        return x, None if sides is None else sides.sum()


def run_block(
    block: nnx.Module, x: jax.Array, ctx: ForwardContext, number: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Layer `number` of a stack, which `block` holds the weights of: (x, side loss if it has one)."""
    out = block(x, ctx.at_layer(number))
    y, side_loss = out if isinstance(out, tuple) else (out, None)
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ConfigError(
            f"a {type(block).__name__} turns {x.dtype}{list(x.shape)} into {y.dtype}{list(y.shape)}",
            fix="a block that leaves shape and dtype as they are: the next one takes what it gives",
        )
    return y, side_loss


def rematerialised(layer: Callable, remat: str) -> Callable:
    """`layer` whose backward computes again what `remat` says: nothing (none), gathered weights (weights), all but
    matmuls and attention (dots), all (full)."""
    if remat == "none":
        return layer
    return jax.checkpoint(layer, policy=POLICIES[remat], prevent_cse=False)
