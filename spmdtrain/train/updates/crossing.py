"""Finds out from the traced code whether the update of one tensor ever reads another one.

A trial of a few steps is not enough: clipping to the global norm may begin at a later step. So the
traced update is followed from its gradients to its updates, through the state and over steps.
"""

from typing import Any

import jax
import optax
from jax.extend.core import Literal

Origins = frozenset[int]  # the tensors from which a value is computed
LOOPS = ("scan", "while")


def crosses(transformation: optax.GradientTransformation, tensors: Any) -> bool:
    """Returns True if an update of one leaf of `tensors` may be computed from another leaf."""
    state = jax.eval_shape(transformation.init, tensors)
    begin = jax.make_jaxpr(transformation.init)(tensors).jaxpr
    step = jax.make_jaxpr(transformation.update)(tensors, state, tensors).jaxpr
    own = [frozenset([at]) for at in range(len(jax.tree.leaves(tensors)))]
    of_state = _propagate(begin, own)
    while True:
        outputs = _propagate(step, [*own, *of_state, *own])
        updates, after = outputs[: len(own)], outputs[len(own) :]
        grown = [old | new for old, new in zip(of_state, after, strict=True)]
        if grown == of_state:
            return any(not update <= mine for update, mine in zip(updates, own, strict=True))
        of_state = grown


def _propagate(jaxpr: Any, inputs: list[Origins]) -> list[Origins]:
    """Returns the origins of the outputs of a traced function from those of its inputs."""
    known: dict[Any, Origins] = dict(zip(jaxpr.invars, inputs, strict=True))

    def origins(value: Any) -> Origins:
        return frozenset() if isinstance(value, Literal) else known.get(value, frozenset())

    for equation in jaxpr.eqns:
        outputs = _through(equation, [origins(value) for value in equation.invars])
        known.update(zip(equation.outvars, outputs, strict=True))
    return [origins(value) for value in jaxpr.outvars]


def _through(equation: Any, inputs: list[Origins]) -> list[Origins]:
    """Returns the origins of an operation's outputs; loops and unknown ones may use every input."""
    params = equation.params
    if equation.primitive.name == "cond":
        branches = [_propagate(branch.jaxpr, inputs[1:]) for branch in params["branches"]]
        return [inputs[0].union(*outcomes) for outcomes in zip(*branches, strict=True)]
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    is_call = inner is not None and equation.primitive.name not in LOOPS
    if is_call and len(getattr(inner, "invars", ())) == len(inputs):
        return _propagate(inner, inputs)
    return [frozenset().union(*inputs)] * len(equation.outvars)
