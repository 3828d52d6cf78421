"""One layer's gradient, taken apart: what its forward must keep, and which part of its backward gives which gradient.

The residuals of `jax.vjp` are of two kinds. What depends on the layer's input is *kept*; weights, and whatever follows
from weights, positions, segments and noise alone, is made again when backward needs it. The split backward of
zero-bubble schedules runs what the input gradient needs first, and *defers* what the weight gradient needs of that.

The only file that takes jaxprs apart: `_evaluate` runs the part of one that leads from known to wanted variables.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

Tree = Any
Layer = Callable[[Tree, jax.Array, Tree], tuple[jax.Array, jax.Array]]
Arrays = list[jax.Array]


class LayerGradient:
    """Of `layer(weights, x, rest) -> (y, side loss)`, by weights and x. Traces it once; arguments give shapes only.

    `kept` and, where `split`, `deferred`: the shapes of what waits from forward to backward, and from there to the
    weight gradient.
    """

    def __init__(self, layer: Layer, weights: Tree, x: jax.Array, rest: Tree, *, split: bool = False):
        pulls = []

        def with_residuals(weights, x, rest):
            out, pull = jax.vjp(lambda weights, x: layer(weights, x, rest), weights, x)
            residuals, structure = jax.tree.flatten(pull)
            pulls.append(structure)
            return *out, *residuals

        self._weights = jax.tree.structure(weights)
        self._made = jax.make_jaxpr(with_residuals)(weights, x, rest)
        self._pull = pulls[-1]
        jaxpr = self._made.jaxpr
        count = self._weights.num_leaves
        self._weights_in, self._x, self._rest_in = jaxpr.invars[:count], jaxpr.invars[count], jaxpr.invars[count + 1 :]
        (self._y, self._side), self._residuals = jaxpr.outvars[:2], jaxpr.outvars[2:]
        following = _following(jaxpr, self._x)
        self._kept = list(
            dict.fromkeys(var for var in self._residuals if isinstance(var, jex.Var) and var in following)
        )
        self.kept = tuple(_shape(var) for var in self._kept)
        if split:
            self._split()
            self.deferred = tuple(_shape(var) for var in self._deferred)

    def forward(self, weights: Tree, x: jax.Array, rest: Tree) -> tuple[jax.Array, jax.Array, Arrays]:
        """(y, side loss, kept)."""
        known = self._known(weights, rest) | {self._x: x}
        y, side, *kept = _evaluate(self._made.jaxpr, known, [self._y, self._side, *self._kept])
        return y, side, kept

    def backward(
        self, weights: Tree, rest: Tree, kept: Arrays, dy: jax.Array, dside: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """(gradient by weights, gradient by x)."""
        return jax.tree.unflatten(self._pull, self._again(weights, rest, kept))((dy, dside))

    def input_gradient(
        self, weights: Tree, rest: Tree, kept: Arrays, dy: jax.Array, dside: jax.Array
    ) -> tuple[jax.Array, Arrays]:
        """(gradient by x, deferred), where `split`."""
        known = self._pulled_in(weights, rest, kept) | dict(zip(self._cotangents, (dy, dside), strict=True))
        dx, *deferred = _evaluate(self._pulled.jaxpr, known, [self._dx, *self._deferred])
        return dx, deferred

    def weight_gradient(self, weights: Tree, rest: Tree, kept: Arrays, deferred: Arrays) -> Tree:
        known = self._pulled_in(weights, rest, kept) | dict(zip(self._deferred, deferred, strict=True))
        return jax.tree.unflatten(self._weights, _evaluate(self._pulled.jaxpr, known, self._dweights))

    def _split(self) -> None:
        """The transposed layer as one program, and where its two parts meet."""

        def pulled(residuals, dy, dside):
            dweights, dx = jax.tree.unflatten(self._pull, residuals)((dy, dside))
            return dx, *jax.tree.leaves(dweights)

        residuals = [_shape(var) for var in self._residuals]
        traced = jax.make_jaxpr(pulled)(residuals, _shape(self._y), _shape(self._side))
        self._pulled = jax.make_jaxpr(_without_calls(traced))(*(_shape(var) for var in traced.jaxpr.invars))
        jaxpr = self._pulled.jaxpr
        self._residuals_in, self._cotangents = jaxpr.invars[:-2], jaxpr.invars[-2:]
        self._dx, *self._dweights = jaxpr.outvars
        given = {*jaxpr.constvars, *self._residuals_in}
        early = _leading(jaxpr, given, [self._dx])
        made_early = {var for eqn in early for var in eqn.outvars} | {*self._cotangents}
        late = _leading(jaxpr, given | made_early, self._dweights)
        read = [*self._dweights, *(var for eqn in late for var in eqn.invars)]
        self._deferred = list(dict.fromkeys(var for var in read if isinstance(var, jex.Var) and var in made_early))

    def _known(self, weights: Tree, rest: Tree) -> dict[jex.Var, Any]:
        given = [*self._weights_in, *self._rest_in], [*jax.tree.leaves(weights), *jax.tree.leaves(rest)]
        return dict(zip(*given, strict=True)) | dict(zip(self._made.jaxpr.constvars, self._made.consts, strict=True))

    def _again(self, weights: Tree, rest: Tree, kept: Arrays) -> Arrays:
        """All residuals."""
        known = self._known(weights, rest) | dict(zip(self._kept, kept, strict=True))
        return _evaluate(self._made.jaxpr, known, self._residuals)

    def _pulled_in(self, weights: Tree, rest: Tree, kept: Arrays) -> dict[jex.Var, Any]:
        consts = dict(zip(self._pulled.jaxpr.constvars, self._pulled.consts, strict=True))
        return consts | dict(zip(self._residuals_in, self._again(weights, rest, kept), strict=True))


def _evaluate(jaxpr: jex.Jaxpr, known: Mapping[jex.Var, Any], wanted: Sequence) -> Arrays:
    """The values of `wanted`, by the equations of `jaxpr` that lead there from `known`, and no others."""
    eqns = _leading(jaxpr, known.keys(), wanted)
    read = [var for var in (*wanted, *(var for eqn in eqns for var in eqn.invars)) if isinstance(var, jex.Var)]
    inputs = [var for var in dict.fromkeys(read) if var in known]
    part = jex.Jaxpr((), inputs, list(wanted), eqns, debug_info=jaxpr.debug_info)
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(part, ()))(*(known[var] for var in inputs))


def _leading(jaxpr: jex.Jaxpr, known: Collection[jex.Var], wanted: Sequence) -> list[jex.JaxprEqn]:
    """The equations that must run for `wanted` where `known` is there already."""
    missing, eqns = {var for var in wanted if isinstance(var, jex.Var) and var not in known}, []
    for eqn in reversed(jaxpr.eqns):
        if missing.intersection(eqn.outvars):
            eqns.append(eqn)
            missing |= {var for var in eqn.invars if isinstance(var, jex.Var) and var not in known}
    return eqns[::-1]


def _following(jaxpr: jex.Jaxpr, start: jex.Var) -> set[jex.Var]:
    """`start` and all variables that depend on it."""
    found = {start}
    for eqn in jaxpr.eqns:
        if any(isinstance(var, jex.Var) and var in found for var in eqn.invars):
            found.update(eqn.outvars)
    return found


def _without_calls(closed: jex.ClosedJaxpr) -> Callable[..., Arrays]:
    """The same function with jitted functions written out: an equation that holds both gradients cannot be cut."""

    def run(*arguments):
        jaxpr = closed.jaxpr
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True))
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("jit", "pjit"):
                inner = [known[var] if isinstance(var, jex.Var) else var.val for var in eqn.invars]
                made = _without_calls(eqn.params["jaxpr"])(*inner)
            else:
                one = jaxpr.replace(eqns=[eqn])
                made = _evaluate(one, known, eqn.outvars)
            known.update(zip(eqn.outvars, made, strict=True))
        return [known[var] if isinstance(var, jex.Var) else var.val for var in jaxpr.outvars]

    return run


def _shape(var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
