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


SideLosses = dict[str, jax.Array]  # by name, float32 scalars

POLICIES = {
    "weights": _but_gathered_weights,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, attention_saveable
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Stack(nnx.Module):
    """`count` blocks made by `make_block(rngs)`, each called as `block(x, ctx)`.

    A block gives x, or (x, its side losses): a dict of scalars by name, or one scalar, whose name
    is then `side_loss`. A side loss is weighted already, and summed over the tokens of x as their
    losses are: training minimises the sum of all losses over the number of tokens.
    """

    def __init__(self, make_block: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs):
        self.count = count
        stacked = nnx.vmap(make_block, transform_metadata={nnx.PARTITION_NAME: "layer"})
        self.layer = stacked(rngs.split(count))

    def __call__(self, x: jax.Array, ctx: ForwardContext) -> tuple[jax.Array, SideLosses]:
        """x behind the last block, and the side losses summed over the blocks."""
        graphdef, parameters = nnx.split(self.layer)

        def body(x, layer):
            number, parameters = layer
            return run_block(nnx.merge(graphdef, ctx.gather(parameters)), x, ctx, number)

        layers = (jnp.arange(self.count), parameters)
        x, side_losses = jax.lax.scan(rematerialised(body, ctx.remat), x, layers)
        return x, jax.tree.map(jnp.sum, side_losses)


def run_block(block: nnx.Module, x: jax.Array, ctx: ForwardContext, number: jax.Array) -> tuple[jax.Array, SideLosses]:
    """Layer `number` of a stack, which `block` holds the weights of: (x, its side losses)."""
    out = block(x, ctx.at_layer(number))
    y, given = out if isinstance(out, tuple) else (out, {})
    side_losses = _by_name(given, type(block).__name__)
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ConfigError(
            f"a {type(block).__name__} turns {x.dtype}{list(x.shape)} into {y.dtype}{list(y.shape)}",
            fix="a block that leaves shape and dtype as they are: the next one takes what it gives",
        )
    return y, side_losses


def _by_name(given: jax.Array | SideLosses, block: str) -> SideLosses:
    """The side losses of a block, in float32. ConfigError where one is not a scalar."""
    losses = given if isinstance(given, dict) else {"side_loss": given}
    for name, loss in losses.items():
        if jnp.shape(loss):
            raise ConfigError(
                f"{name} of a {block} has the shape {list(jnp.shape(loss))}",
                fix="a scalar: the sum over all tokens",
            )
    return {name: jnp.asarray(loss, jnp.float32) for name, loss in losses.items()}


def rematerialised(layer: Callable, remat: str) -> Callable:
    """`layer` whose backward computes again what `remat` says: nothing (none), gathered weights (weights), all but
    matmuls and attention (dots), all (full)."""
    if remat == "none":
        return layer
    return jax.checkpoint(layer, policy=POLICIES[remat], prevent_cse=False)
