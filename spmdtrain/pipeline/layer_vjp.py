"""Splits the gradient of one layer into what forward saves and a part for each gradient.

The residuals of `jax.vjp` are of two kinds. Those that depend on the layer's input are *saved* from
forward to backward. The others (weights, and whatever follows from weights, positions, segments and
noise alone) are recomputed when backward needs them.

The split backward of zero-bubble schedules (Qi et al., arXiv 2401.10241) first runs what the
gradient of the input needs. The results that the weight gradient reads are *deferred*: they wait,
with what was saved, for the tick of the weight gradient.

This is the only file that cuts jaxprs up. `_evaluate` runs those equations of a jaxpr that lead
from known variables to wanted ones.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]  public all the same

Tree = Any
Layer = Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Tree]]
Arrays = list[jax.Array]
Values = dict[jex.Var, Any]  # bindings of the variables of a jaxpr


class LayerGradient:
    """The gradient of `layer(weights, x, rest) -> (y, side losses)` by its weights and by x.

    Side losses are a tree of scalars, which may be empty. The layer is traced once; only the shapes
    of the given arguments count.

    `saved` has the shapes of what waits from forward to backward. With `split`, `deferred` has
    those of what waits from backward to the weight gradient.

    Two jaxprs are cut up: `_forward`, (weights, x, rest) -> (y, side losses, residuals), and with
    `split` `_backward`, (residuals, dy, dsides) -> (dx, dweights). Attributes that end in `_in`
    hold input variables.
    """

    def __init__(
        self, layer: Layer, weights: Tree, x: jax.Array, rest: Tree, *, split: bool = False
    ):
        structures = []

        def with_residuals(weights, x, rest):
            (y, sides), pull = jax.vjp(lambda weights, x: layer(weights, x, rest), weights, x)
            sides, sides_structure = jax.tree.flatten(sides)
            # The function that jax.vjp returns is a tree whose leaves are the residuals.
            residuals, pull_structure = jax.tree.flatten(pull)
            structures.append((sides_structure, pull_structure))
            return y, *sides, *residuals

        self._forward = jax.make_jaxpr(with_residuals)(weights, x, rest)
        self._sides_structure, self._pull_structure = structures[-1]
        self._weights_structure = jax.tree.structure(weights)

        jaxpr = self._forward.jaxpr
        count = self._weights_structure.num_leaves
        self._weights_in = jaxpr.invars[:count]
        self._x_in = jaxpr.invars[count]
        self._rest_in = jaxpr.invars[count + 1 :]
        sides = self._sides_structure.num_leaves
        self._y = jaxpr.outvars[0]
        self._sides = jaxpr.outvars[1 : 1 + sides]
        self._residuals = jaxpr.outvars[1 + sides :]

        # One residual may be several leaves of the pull function: save it once.
        depends_on_x = _followers(jaxpr, self._x_in)
        self._saved = _distinct(var for var in _variables(self._residuals) if var in depends_on_x)
        self.saved = tuple(_shape(var) for var in self._saved)
        if split:
            self._split_backward()
            self.deferred = tuple(_shape(var) for var in self._deferred)

    def forward(self, weights: Tree, x: jax.Array, rest: Tree) -> tuple[jax.Array, Tree, Arrays]:
        """Returns (y, side losses, what to save for `backward`)."""
        known = self._bind_inputs(weights, rest)
        known[self._x_in] = x
        wanted = [self._y, *self._sides, *self._saved]
        y, *others = _evaluate(self._forward.jaxpr, known, wanted)
        count = len(self._sides)
        sides = jax.tree.unflatten(self._sides_structure, others[:count])
        return y, sides, others[count:]

    def backward(
        self, weights: Tree, rest: Tree, saved: Arrays, dy: jax.Array, dsides: Tree
    ) -> tuple[Tree, jax.Array]:
        """Returns (gradient by the weights, gradient by x)."""
        residuals = self._recompute_residuals(weights, rest, saved)
        pull = jax.tree.unflatten(self._pull_structure, residuals)
        return pull((dy, dsides))

    def input_gradient(
        self, weights: Tree, rest: Tree, saved: Arrays, dy: jax.Array, dsides: Tree
    ) -> tuple[jax.Array, Arrays]:
        """Returns (gradient by x, what to defer for `weight_gradient`). Needs `split`."""
        known = self._bind_residuals(weights, rest, saved)
        cotangents = (dy, *jax.tree.leaves(dsides))
        known |= dict(zip(self._cotangents_in, cotangents, strict=True))
        dx, *deferred = _evaluate(self._backward.jaxpr, known, [self._dx, *self._deferred])
        return dx, deferred

    def weight_gradient(self, weights: Tree, rest: Tree, saved: Arrays, deferred: Arrays) -> Tree:
        """Returns the gradient by the weights, from what `input_gradient` deferred."""
        known = self._bind_residuals(weights, rest, saved)
        known |= dict(zip(self._deferred, deferred, strict=True))
        leaves = _evaluate(self._backward.jaxpr, known, self._dweights)
        return jax.tree.unflatten(self._weights_structure, leaves)

    def _split_backward(self) -> None:
        """Traces the backward as one program, and finds where its two parts meet."""

        def run_backward(residuals, dy, dsides):
            pull = jax.tree.unflatten(self._pull_structure, residuals)
            dweights, dx = pull((dy, jax.tree.unflatten(self._sides_structure, dsides)))
            return dx, *jax.tree.leaves(dweights)

        residuals = [_shape(var) for var in self._residuals]
        sides = [_shape(var) for var in self._sides]
        traced = jax.make_jaxpr(run_backward)(residuals, _shape(self._y), sides)
        inputs = [_shape(var) for var in traced.jaxpr.invars]
        self._backward = jax.make_jaxpr(_inline_calls(traced))(*inputs)

        jaxpr = self._backward.jaxpr
        count = len(self._residuals)
        self._residuals_in = jaxpr.invars[:count]
        self._cotangents_in = jaxpr.invars[count:]
        self._dx, *self._dweights = jaxpr.outvars

        # The early part leads to dx. The late part is what is left to do for the weights, and
        # whatever it reads of the early part (or of the cotangents) must wait for it. An array of
        # which it reads several shapes waits once: reshaping it again costs nothing.
        known = {*jaxpr.constvars, *self._residuals_in}
        early = _equations_to(jaxpr, known, [self._dx])
        computed = [eqn for eqn in early if eqn.primitive.name != "reshape"]
        made_early = {var for eqn in computed for var in eqn.outvars} | {*self._cotangents_in}
        late = _equations_to(jaxpr, known | made_early, self._dweights)
        read = [*self._dweights, *(var for eqn in late for var in eqn.invars)]
        self._deferred = _distinct(var for var in _variables(read) if var in made_early)

    def _bind_inputs(self, weights: Tree, rest: Tree) -> Values:
        """Binds the inputs of `_forward`, all but x."""
        known = dict(zip(self._weights_in, jax.tree.leaves(weights), strict=True))
        known |= dict(zip(self._rest_in, jax.tree.leaves(rest), strict=True))
        return known | _bind_constants(self._forward)

    def _recompute_residuals(self, weights: Tree, rest: Tree, saved: Arrays) -> Arrays:
        """Returns all residuals: those that were saved, and the others recomputed."""
        known = self._bind_inputs(weights, rest)
        known |= dict(zip(self._saved, saved, strict=True))
        return _evaluate(self._forward.jaxpr, known, self._residuals)

    def _bind_residuals(self, weights: Tree, rest: Tree, saved: Arrays) -> Values:
        """Binds the inputs of `_backward`, all but the cotangents."""
        residuals = self._recompute_residuals(weights, rest, saved)
        known = _bind_constants(self._backward)
        return known | dict(zip(self._residuals_in, residuals, strict=True))


def _evaluate(jaxpr: jex.Jaxpr, known: Mapping[jex.Var, Any], wanted: Sequence) -> Arrays:
    """Returns the values of `wanted`, running only the equations that lead there from `known`.

    This part runs as a separate jaxpr, whose inputs are the known variables that it reads.
    """
    eqns = _equations_to(jaxpr, known.keys(), wanted)
    read = [*wanted, *(var for eqn in eqns for var in eqn.invars)]
    inputs = [var for var in _distinct(_variables(read)) if var in known]
    part = jex.Jaxpr((), inputs, list(wanted), eqns, debug_info=jaxpr.debug_info)
    run = jex.jaxpr_as_fun(ClosedJaxpr(part, ()))
    return run(*(known[var] for var in inputs))


def _equations_to(
    jaxpr: jex.Jaxpr, known: Collection[jex.Var], wanted: Sequence
) -> list[jex.JaxprEqn]:
    """Returns the equations that must run for `wanted` if `known` is given, in their order."""
    # Backwards from what is wanted: an equation that makes something missing is needed, and so is
    # whatever it reads.
    missing = {var for var in _variables(wanted) if var not in known}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if missing.intersection(eqn.outvars):
            eqns.append(eqn)
            missing |= {var for var in _variables(eqn.invars) if var not in known}
    return eqns[::-1]


def _followers(jaxpr: jex.Jaxpr, start: jex.Var) -> set[jex.Var]:
    """Returns `start` and all variables that depend on it."""
    followers = {start}
    for eqn in jaxpr.eqns:
        if any(var in followers for var in _variables(eqn.invars)):
            followers.update(eqn.outvars)
    return followers


def _inline_calls(closed: ClosedJaxpr) -> Callable[..., Arrays]:
    """Returns the same function with calls of jitted functions inlined.

    A call is one equation, and one that yields both gradients could not be cut in two.
    """

    def run(*arguments):
        jaxpr = closed.jaxpr
        known = _bind_constants(closed)
        known |= dict(zip(jaxpr.invars, arguments, strict=True))
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("jit", "pjit"):
                inner = _inline_calls(eqn.params["jaxpr"])
                made = inner(*(_value(known, var) for var in eqn.invars))
            else:
                made = _evaluate(jaxpr.replace(eqns=[eqn]), known, eqn.outvars)
            known |= dict(zip(eqn.outvars, made, strict=True))
        return [_value(known, var) for var in jaxpr.outvars]

    return run


def _bind_constants(closed: ClosedJaxpr) -> Values:
    return dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))


def _value(known: Mapping[jex.Var, Any], var) -> Any:
    """Returns the value to which an input of an equation is bound, or that of a literal."""
    return known[var] if isinstance(var, jex.Var) else var.val


def _variables(inputs) -> list[jex.Var]:
    """Returns the inputs without literals, which are never missing and depend on nothing."""
    return [var for var in inputs if isinstance(var, jex.Var)]


def _distinct(variables) -> list[jex.Var]:
    """Returns each variable once, in the order of first appearance."""
    return list(dict.fromkeys(variables))


def _shape(var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
