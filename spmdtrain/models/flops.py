"""Counts the FLOPs of a model in its own program.

It counts matmuls, convolutions, and attention by our kernels. A multiplication and an addition
count as two. Everything else in a model is negligible.
"""

import math
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from pallas_kernels.counting import counted, flops_of_mark
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.models.context import ForwardContext


class UncountableError(Exception):
    """The program has a loop of unknown length, or a kernel that does not state its FLOPs."""


def counted_flops_per_token(config: RunConfig, model: AbstractModel) -> float | None:
    """Returns model FLOPs of forward and backward per token of a training sequence, if known.

    The backward of a matmul is two matmuls of its size. Recomputation does not count, and neither
    do copies: the program is that of one device. Attention by `pallas_kernels.attention` counts the
    pairs that are seen, half of all if it is causal; custom attention counts as written. Equal to
    `size.train_flops_per_token` for the shipped model.
    """
    length = config.train.sequence_length
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    values = {path: jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in model.named_variables()}

    def forward(values, tokens_bt):
        module = model.bind(values)
        ctx = ForwardContext(jnp.zeros_like(tokens_bt))
        x_bte, _ = module.blocks(module.embed(tokens_bt, ctx), ctx)
        hidden_bte, table_ve = module.head(x_bte, ctx)
        return jnp.einsum("bte,ve->btv", hidden_bte, table_ve)

    with counted():
        # A separate function: otherwise jax would reuse an earlier trace.
        program = jax.make_jaxpr(lambda *arguments: forward(*arguments))(values, tokens)
    try:
        return 3 * flops_of(program.jaxpr) / length
    except UncountableError:
        return None


def flops_of(program: Any) -> float:
    """Returns the FLOPs of a jaxpr. Raises UncountableError."""
    return sum(map(_flops_of_operation, program.eqns), 0.0)


def _flops_of_operation(operation: Any) -> float:
    name = operation.primitive.name
    options = operation.params
    shapes: list[tuple[int, ...]] = [getattr(each.aval, "shape", ()) for each in operation.invars]
    if name == "dot_general":
        (contracted, _), _ = options["dimension_numbers"]
        inner = math.prod(shapes[0][dim] for dim in contracted)
        return 2.0 * inner * math.prod(operation.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        out_features = shapes[1][options["dimension_numbers"].rhs_spec[0]]
        return (
            2.0 * math.prod(shapes[1]) / out_features * math.prod(operation.outvars[0].aval.shape)
        )
    if name.startswith("ragged_dot"):
        return 2.0 * math.prod(shapes[0]) * operation.outvars[0].aval.shape[-1]
    if name == "name":
        return flops_of_mark(options["name"])
    if name == "pallas_call":
        cost = options.get("cost_estimate")
        if cost is None:
            raise UncountableError
        return float(cost.flops)
    inside = [flops_of(each) for each in _programs_in(options)]
    if name == "scan":
        return options["length"] * sum(inside)
    if name == "cond":
        return max(inside)
    if name == "while" and any(inside):
        raise UncountableError
    return sum(inside, 0.0)


def _programs_in(options: dict[str, Any]) -> list[Any]:
    """Returns the jaxprs among the options of an operation."""
    found = []
    for option in options.values():
        for each in option if isinstance(option, tuple | list) else (option,):
            if hasattr(each, "jaxpr"):
                each = each.jaxpr
            if hasattr(each, "eqns"):
                found.append(each)
    return found
