"""Makes the weights of layers, and defines what their backward pass recomputes."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.chosen import Decisions, in_force
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.projection import Fused, MatmulWeight

# The standard deviation of every weight matrix, as in GPT-2; residual projections divide it by
# sqrt(2 layers).
INIT_STD = 0.02


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
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    std: float = INIT_STD,
    *,
    fused: Fused | None = None,
) -> MatmulWeight:
    """Draws weights like `weight`, only for `ctx.column_parallel` or `ctx.row_parallel`.

    `fused`: the matrices that it holds, if it holds several.
    """
    drawn = std * jax.random.normal(rngs.params(), shape)
    further: dict[str, Any] = {} if fused is None else {"fused": fused}
    return MatmulWeight(drawn, out_sharding=axes, **further)


def recomputed(
    function: Callable, ctx: ForwardContext, static_argnums: tuple[int, ...] = ()
) -> Callable:
    """Returns `function` with a backward pass that recomputes it from its input.

    That is one more pass over memory, instead of keeping several arrays as wide as f.
    """
    return _recomputed(function, ctx.scan_layers, static_argnums, in_force())


@lru_cache(maxsize=64)  # layers share a trace; those of earlier programs are let go
def _recomputed(
    function: Callable, scanned: bool, static_argnums: tuple[int, ...], _: Decisions | None
) -> Any:
    @wraps(function)
    def of_these_decisions(*arguments: Any) -> Any:
        # A function of its own: jax keeps the trace of one, with the kernels chosen in it.
        return function(*arguments)

    # In a loop over layers XLA has no forward pass to merge the recomputation with. Outside of one
    # it would find both equal, and keep what is to be recomputed.
    return jax.checkpoint(
        of_these_decisions, prevent_cse=not scanned, static_argnums=static_argnums
    )


def bias(size: int, axis: str) -> nnx.Param:
    """Returns a vector of zeros with this logical axis."""
    return nnx.Param(jnp.zeros(size), out_sharding=(axis,))
