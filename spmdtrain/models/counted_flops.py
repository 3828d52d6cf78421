"""Counts the FLOPs of a model in its traced program, and those of the gradients that it needs.

It counts matmuls, convolutions, and attention by our kernels. A multiplication and an addition
count as two. Everything else in a model is negligible, and so is a matmul of weights alone, which
a microbatch does once and not each token (the norms of DoRA).
"""

import math
from collections.abc import Sequence
from enum import Flag, auto
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


class Origin(Flag):
    """The inputs from which a value of a program is computed."""

    NEITHER = 0
    TOKENS = auto()
    TRAINED = auto()  # parameters that are trained: the value has a gradient


Counted = tuple[float, list[Origin]]  # (FLOPs, the origins of the outputs)


def counted_flops_per_token(config: RunConfig, model: AbstractModel) -> float | None:
    """Returns model FLOPs of forward and backward per token of a training sequence, if known.

    The backward of a matmul is one matmul of its size for each factor that has a gradient: two, or
    only that of the activations where the weight is frozen. Recomputation does not count, and
    neither do copies: the program is that of one device. Attention by `pallas_kernels.attention`
    counts the pairs that are seen, half of all if it is causal; custom attention counts as written.
    Equal to `size.train_flops_per_token` for the shipped model if all of it is trained.
    """
    trained = {path for path, parameter in model.parameters.items() if parameter.is_trained}
    return _flops_per_token(config, model, trained)


def forward_flops_per_token(config: RunConfig, model: AbstractModel) -> float | None:
    """Returns the part of `counted_flops_per_token` that belongs to the forward pass, if known."""
    return _flops_per_token(config, model, set())


def _flops_per_token(config: RunConfig, model: AbstractModel, trained: set[str]) -> float | None:
    length = config.train.sequence_length
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    values = {path: jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in model.named_variables()}

    def forward(values, tokens_bt):
        module: Any = model.bind(values)
        ctx = ForwardContext(
            jnp.zeros_like(tokens_bt), frozen_layers=config.frozen_in_stack, ids_bt=tokens_bt
        )
        x_bte, _ = module.blocks(module.embed(tokens_bt, ctx), ctx)
        hidden_bte, table_ve = module.head(x_bte, ctx)
        read = [hidden_bte]
        if depth := config.model.further_depth:
            read += module.predict_further(x_bte, [tokens_bt] * depth, [ctx] * depth)[0]
        return [jnp.einsum("bte,ve->btv", hidden, table_ve) for hidden in read]

    with counted():
        # A separate function: otherwise jax would reuse an earlier trace.
        program = jax.make_jaxpr(lambda *arguments: forward(*arguments))(values, tokens)
    of_values = {path: Origin.TRAINED if path in trained else Origin.NEITHER for path in values}
    origins = jax.tree.leaves((of_values, Origin.TOKENS))
    try:
        return _count(program.jaxpr, origins, bool(trained))[0] / length
    except UncountableError:
        return None


def flops_of(program: Any) -> float:
    """Returns the FLOPs of a jaxpr. Raises UncountableError."""
    return _count(program, [Origin.TOKENS] * len(program.invars), False)[0]


def _count(program: Any, origins: Sequence[Origin], trains: bool) -> Counted:
    """Returns the FLOPs of a jaxpr with inputs of these origins.

    `trains`: a mark has a gradient (it hides what it is computed from).
    """
    known: dict[Any, Origin] = dict(zip(program.invars, origins, strict=True))
    total = 0.0

    def origin(value: Any) -> Origin:
        literal = isinstance(value, jax.extend.core.Literal)
        return Origin.NEITHER if literal else known.get(value, Origin.NEITHER)

    for operation in program.eqns:
        flops, outs = _count_operation(operation, [origin(x) for x in operation.invars], trains)
        total += flops
        for value, out in zip(operation.outvars, outs, strict=True):
            floating = jnp.issubdtype(getattr(value.aval, "dtype", jnp.int32), jnp.floating)
            known[value] = out if floating else out & Origin.TOKENS
    return total, [origin(value) for value in program.outvars]


def _count_operation(operation: Any, origins: list[Origin], trains: bool) -> Counted:
    union = _union(origins)
    outs = [union] * len(operation.outvars)
    own = _own_flops(operation)
    if own is not None:
        if operation.primitive.name == "name" and own:
            everything = Origin.TOKENS | (Origin.TRAINED if trains else Origin.NEITHER)
            return own * (3 if trains else 1), [everything]
        if operation.primitive.name == "pallas_call":
            return own * (3 if Origin.TRAINED in union else 1), outs
        gradients = sum(Origin.TRAINED in factor for factor in origins[:2])
        return own * (1 + gradients) * (Origin.TOKENS in union), outs
    name = operation.primitive.name
    options = operation.params
    if name == "stop_gradient":
        return 0.0, [union & Origin.TOKENS]
    if name == "scan":
        return _count_scan(operation, origins, trains)
    if name == "cond":
        branches = [_count(branch, origins[1:], trains) for branch in _programs_in(options)]
        results = zip(*(outs for _, outs in branches), strict=True)
        outs = [_union(alternatives) | origins[0] for alternatives in results]
        return max(flops for flops, _ in branches), outs
    inside = _programs_in(options)
    if name != "while" and len(inside) == 1 and len(inside[0].invars) == len(origins):
        return _count(inside[0], origins, trains)
    flops = [_count(inner, [union] * len(inner.invars), trains)[0] for inner in inside]
    if name == "while" and any(flops):
        raise UncountableError
    return sum(flops, 0.0), outs


def _count_scan(operation: Any, origins: list[Origin], trains: bool) -> Counted:
    """Counts a loop of known length: carried values have the origins that they end with.

    Inputs are constants, carried values, then sliced arrays; outputs are carried values, then
    stacked arrays. Sliced and stacked arrays have one more dim outside the body, by which they are
    counted: each version of jax has another name for their numbers.
    """
    options = operation.params
    (body,) = _programs_in(options)
    carried = _count_as_in(operation.outvars, body.outvars)
    constant = _count_as_in(operation.invars, body.invars) - carried
    carry = slice(constant, constant + carried)
    origins = list(origins)
    while True:
        # If nothing trained enters a loop, no mark inside is computed from anything trained.
        has_trained = any(Origin.TRAINED in origin for origin in origins)
        flops, outs = _count(body, origins, trains and has_trained)
        grown = [old | new for old, new in zip(origins[carry], outs, strict=False)]
        if grown == origins[carry]:
            return options["length"] * flops, outs
        origins[carry] = grown


def _count_as_in(outside: Sequence[Any], body: Sequence[Any]) -> int:
    """Returns how many values have the same number of dims in a loop's body as outside."""
    pairs = zip(outside, body, strict=True)
    return sum(value.aval.ndim == inner.aval.ndim for value, inner in pairs)


def _union(origins: Sequence[Origin]) -> Origin:
    union = Origin.NEITHER
    for origin in origins:
        union |= origin
    return union


def _own_flops(operation: Any) -> float | None:
    """Returns the FLOPs of an operation that computes by itself; None for any other one."""
    name = operation.primitive.name
    options = operation.params
    shapes: list[tuple[int, ...]] = [getattr(x.aval, "shape", ()) for x in operation.invars]
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
        return flops_of_mark(options["name"]) or None
    if name == "pallas_call":
        cost = options.get("cost_estimate")
        if cost is None:
            raise UncountableError
        return float(cost.flops)
    return None


def _programs_in(options: dict[str, Any]) -> list[Any]:
    """Returns the jaxprs among the options of an operation."""
    programs = []
    for option in options.values():
        for value in option if isinstance(option, tuple | list) else (option,):
            program = getattr(value, "jaxpr", value)
            if hasattr(program, "eqns"):
                programs.append(program)
    return programs
