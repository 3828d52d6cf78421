"""Takes every long sum of a program in float32, whatever the dtype of its terms.

A sum kept in 16 bits stops growing: 256 + 1 is 256 in bfloat16, so the gradient of a token that
occurs 2,000 times is that of 256 occurrences. Nobody writes such a sum. It is the transpose of a
lookup (a scatter-add), of a broadcast bias (a reduction) or of a weight that a loop reads at each
turn (a carry), and jax gives a transpose the dtype of its cotangent. `jnp.sum` is always wide.

So the program of a step is rewritten after jax has differentiated it, before XLA sees it. That
reaches the layers of this library, those of flax, and any code of a user's model.
Matmuls stay as they are on GPUs, where they accumulate in float32. On CPUs XLA does not promise
that: of jaxlib 0.12 it leaves some products of a loop in bfloat16, whose sums then lose 3 to 5 % of
a weight's gradient. Collectives stay as they are: they add few terms, and wider ones would be twice
the traffic; `reduce.py` decides about those.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

NARROW = (jnp.dtype("bfloat16"), jnp.dtype("float16"))
SCATTER = "scatter-add"
# They sum along dims of their only operand.
REDUCTIONS = ("reduce_sum", "cumsum", "reduce_window_sum")
SUMS = (SCATTER, *REDUCTIONS)
MATMUL = "dot_general"
FLOAT32 = jnp.dtype("float32")
Names = dict[Any, Any]  # the variables of a traced function -> those that take their places
# Their programs are written for one device's registers, where each dtype is deliberate.
KERNELS = ("pallas_call", "core_map", "run_state")


def with_wide_sums(function: Callable, compute: str, platform: str) -> Callable:
    """Returns `function` with its long sums of 16-bit floats taken in float32.

    `compute`: the dtype in which it computes. In float32 there is nothing to widen, and it is
    returned as it is. `platform`: of the devices, as jax names it; on "cpu" matmuls are widened
    too.

    Arguments and results are pytrees of arrays, and keep their dtypes: a sum is rounded to its own
    dtype once, when it is complete. It traces `function`, so it belongs inside a jit.
    """
    if jnp.dtype(compute) not in NARROW:
        return function

    def widened(*arguments):
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        wide = rewritten(traced, (*SUMS, MATMUL) if platform == "cpu" else SUMS)
        results = jaxpr_as_fun(wide)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return widened


def narrow_sums(program: ClosedJaxpr | Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the operations that sum many 16-bit floats in 16 bits, inner programs included."""
    for equation in _opened(program).eqns:
        if _is_narrow_sum(equation) or _narrow_carries(equation):
            yield equation
        for inner in _programs_of(equation):
            yield from narrow_sums(inner)


def rewritten(program: ClosedJaxpr, sums: tuple[str, ...] = SUMS) -> ClosedJaxpr:
    """Returns a program of the same inputs and outputs whose long sums are in float32.

    `sums`: the names of the primitives that sum.
    """
    return ClosedJaxpr(_rewritten(program.jaxpr, sums), program.consts)


def _rewritten(jaxpr: Jaxpr, sums: tuple[str, ...]) -> Jaxpr:
    equations: list[JaxprEqn] = []
    for operation in jaxpr.eqns:
        equation = _with_inner_rewritten(operation, sums)
        if _is_narrow_sum(equation, sums):
            equations += _spliced(equation, partial(_wide_sum, equation))
        elif carries := _narrow_carries(equation):
            equations += _with_wide_carries(equation, carries)
        else:
            equations.append(equation)
    return jaxpr.replace(eqns=equations)


# --- one sum --------------------------------------------------------------------------------------


def _is_narrow_sum(equation: JaxprEqn, sums: tuple[str, ...] = SUMS) -> bool:
    if equation.primitive.name not in sums:
        return False
    return _shape_of(equation.outvars[0]).dtype in NARROW


def _wide_sum(equation: JaxprEqn, *operands: jax.Array) -> jax.Array:
    """Computes the sum of `equation` in float32, and rounds it once."""
    params = equation.params
    first = operands[0]
    if equation.primitive.name in REDUCTIONS:
        total = equation.primitive.bind(first.astype(jnp.float32), **params)
        return total.astype(first.dtype)
    if equation.primitive.name == MATMUL:
        # From wide operands: XLA cannot run every product of 16-bit floats with a float32 result.
        wide = (x.astype(FLOAT32) for x in operands)
        product = equation.primitive.bind(*wide, **params | {"preferred_element_type": FLOAT32})
        return product.astype(_shape_of(equation.outvars[0]).dtype)
    _, indices, updates = operands
    total = jax.lax.scatter_add(
        first.astype(jnp.float32),
        indices,
        updates.astype(jnp.float32),
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
    return total.astype(first.dtype)


def _spliced(equation: JaxprEqn, function: Callable) -> list[JaxprEqn]:
    """Returns the operations of `function` on the operands of `equation`, in its place."""
    traced = jax.make_jaxpr(function)(*map(_shape_of, equation.invars)).jaxpr
    names: Names = dict(zip(traced.invars, equation.invars, strict=True))
    names |= dict(zip(traced.outvars, equation.outvars, strict=True))
    return [_renamed(inner, names, equation) for inner in traced.eqns]


def _shape_of(x: Var | Literal) -> jax.ShapeDtypeStruct:
    aval: Any = x.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _renamed(inner: JaxprEqn, names: Names, origin: JaxprEqn) -> JaxprEqn:
    """Returns an operation with other variables, at the place in the source of `origin`."""
    return inner.replace(
        invars=[x if isinstance(x, Literal) else names.get(x, x) for x in inner.invars],
        outvars=[names.get(x, x) for x in inner.outvars],
        source_info=origin.source_info,
        ctx=origin.ctx,
    )


# --- the carry of a loop --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loop:
    """The body of a scan, whose inputs are constants, carries and slices, in this order.

    jax keeps their numbers in other places from version to version. Shapes tell them: only a slice
    has a dim less in the body than outside.
    """

    body: Jaxpr
    carries: int
    consts: int

    @classmethod
    def of(cls, equation: JaxprEqn) -> "_Loop":
        body = _opened(equation.params["jaxpr"])
        results = zip(body.outvars, equation.outvars, strict=True)
        carries = sum(_ndim(inner) == _ndim(outer) for inner, outer in results)
        inputs = zip(body.invars, equation.invars, strict=True)
        whole = sum(_ndim(inner) == _ndim(outer) for inner, outer in inputs)
        return cls(body, carries, whole - carries)


def _ndim(x: Var | Literal) -> int:
    return len(getattr(x.aval, "shape", ()))


def _narrow_carries(equation: JaxprEqn) -> list[int]:
    """Returns which carries of a loop only add up 16-bit cotangents: turn by turn, one term.

    Such a carry is the gradient of what every turn reads. `add_any` is the addition of a transpose:
    a carry to which a layer adds, like a residual stream, has another one and stays as it is.
    """
    if equation.primitive.name != "scan":
        return []
    loop = _Loop.of(equation)
    return [
        number
        for number in range(loop.carries)
        if _addition_to(loop.body, loop.consts + number, number) is not None
    ]


def _addition_to(body: Jaxpr, at: int, result: int) -> int | None:
    """Returns the place of the operation that adds a term to the carry that is the input `at` of a
    loop's body and its output `result`; None if the body does anything else with it.
    """
    carry, total = body.invars[at], body.outvars[result]
    if isinstance(total, Literal) or _shape_of(total).dtype not in NARROW:
        return None
    readers = [place for place, inner in enumerate(body.eqns) if carry in _variables(inner)]
    if len(readers) != 1 or carry in body.outvars or body.outvars.count(total) != 1:
        return None
    addition = body.eqns[readers[0]]
    if addition.primitive.name != "add_any" or addition.outvars[0] is not total:
        return None
    is_doubled = addition.invars[0] is addition.invars[1]
    is_read = any(total in _variables(inner) for inner in body.eqns)
    return None if is_doubled or is_read else readers[0]


def _variables(equation: JaxprEqn) -> list[Var]:
    return [x for x in equation.invars if not isinstance(x, Literal)]


def _with_wide_carries(loop: JaxprEqn, carries: Sequence[int]) -> list[JaxprEqn]:
    """Returns the loop with these carries in float32, between conversions from and to 16 bits."""
    program = loop.params["jaxpr"]
    body, consts = _opened(program), _Loop.of(loop).consts
    body_in = list(body.invars)
    body_out: list[Any] = list(body.outvars)
    equations = [[inner] for inner in body.eqns]
    loop_in: list[Any] = list(loop.invars)
    loop_out = list(loop.outvars)
    before, after = [], []
    for number in carries:
        at = consts + number
        place = _addition_to(body, at, number)
        assert place is not None, "it is one of the narrow carries"
        addition = body.eqns[place]
        (term,) = [x for x in addition.invars if x is not body.invars[at]]
        wide_term, body_in[at], body_out[number] = (_wide(body.invars[at]) for _ in range(3))
        sum_of_both = addition.replace(invars=[body_in[at], wide_term], outvars=[body_out[number]])
        equations[place] = [_converted(term, wide_term, addition), sum_of_both]

        loop_in[at], loop_out[number] = _wide(body.invars[at]), _wide(body.invars[at])
        before.append(_converted(loop.invars[at], loop_in[at], loop))
        after.append(_converted(loop_out[number], loop.outvars[number], loop))
    flat = [inner for several in equations for inner in several]
    widened = body.replace(invars=body_in, outvars=body_out, eqns=flat)
    closed = ClosedJaxpr(widened, program.consts) if isinstance(program, ClosedJaxpr) else widened
    params = {**loop.params, "jaxpr": closed}
    return [*before, loop.replace(invars=loop_in, outvars=loop_out, params=params), *after]


def _wide(variable: Var) -> Var:
    narrow: Any = variable.aval
    return Var(narrow.update(dtype=jnp.dtype("float32"), weak_type=False))


def _converted(source: Var | Literal, target: Var, origin: JaxprEqn) -> JaxprEqn:
    """Returns the operation that converts `source` to the dtype of `target`."""
    dtype = _shape_of(target).dtype
    traced = jax.make_jaxpr(lambda x: x.astype(dtype))(_shape_of(source)).jaxpr
    (conversion,) = traced.eqns
    return _renamed(conversion, {traced.invars[0]: source, traced.outvars[0]: target}, origin)


# --- inner programs -------------------------------------------------------------------------------


def _programs_of(equation: JaxprEqn) -> Iterator[ClosedJaxpr | Jaxpr]:
    """Yields the programs that an operation runs, such as the body of a loop."""
    if equation.primitive.name in (SCATTER, *KERNELS):
        return
    for value in equation.params.values():
        for program in value if isinstance(value, tuple | list) else (value,):
            if isinstance(program, ClosedJaxpr | Jaxpr):
                yield program


def _opened(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def _with_inner_rewritten(equation: JaxprEqn, sums: tuple[str, ...]) -> JaxprEqn:
    """Returns the operation with the programs that it runs rewritten."""
    if next(_programs_of(equation), None) is None:
        return equation

    def changed(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return rewritten(value, sums)
        if isinstance(value, Jaxpr):
            return _rewritten(value, sums)
        if isinstance(value, tuple | list):
            return type(value)(changed(entry) for entry in value)
        return value

    return equation.replace(params={name: changed(x) for name, x in equation.params.items()})
