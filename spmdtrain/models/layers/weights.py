"""Makes the weights of layers, and defines what their backward pass recomputes."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.projection import MatmulWeight

# The standard deviation of every weight matrix, as in GPT-2; residual projections divide it by
# sqrt(2 layers).
INIT_STD = 0.02

# Recomputes a function in the backward pass, from its input: one more pass over memory, instead of
# keeping several arrays as wide as f. prevent_cse is off: in a scan over layers, XLA has no forward
# to merge it with.
recomputed = partial(jax.checkpoint, prevent_cse=False)


def hidden_std(config: TransformerConfig) -> float:
    """Returns the standard deviation of a matrix from one width of the model to another.

    With `model.mup_base` it falls as the square root of the width (arXiv:2203.03466).
    """
    return INIT_STD * config.width_factor**-0.5


def weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float = INIT_STD
) -> nnx.Param:
    """Draws weights from the normal distribution; `axes` are the logical axes of the dims."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape), out_sharding=axes)


def matmul_weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float = INIT_STD
) -> MatmulWeight:
    """Draws weights like `weight`, only for `ctx.column_parallel` or `ctx.row_parallel`."""
    return MatmulWeight(std * jax.random.normal(rngs.params(), shape), out_sharding=axes)


def bias(size: int, axis: str) -> nnx.Param:
    """Returns a vector of zeros with this logical axis."""
    return nnx.Param(jnp.zeros(size), out_sharding=(axis,))
