"""The inverse of unit lower triangular matrices against numpy's in float64: values, gradients."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels.choose import Refused
from pallas_kernels.chosen import using
from pallas_kernels.counting import counted
from pallas_kernels.inverse import cases, reference, unit_inverse
from pallas_kernels.inverse.cases import Case

BOTH = "xla", "triton:interpret"
# Relative L2, as of well-conditioned matrices: powers of the others' triangles reach 1e25.
LIMIT = {"float32": 1e-6}
LIMIT_OF_ALIKE = {"float32": 3e-5}


def with_gradient(invert, lower, dy):
    y, pull = jax.vjp(invert, lower)
    return y, pull(dy)[0]


@cache
def answers(case):
    """(y, dlower) by the definition in float64, and by XLA."""
    drawn = case.draw()
    want = oracle.in_float64(partial(with_gradient, reference.unit_inverse), *drawn.values())
    return want, found(case, "xla")


@cache
def found(case, implementation):
    invert = partial(unit_inverse, implementation=implementation)
    return jax.jit(partial(with_gradient, invert))(*case.draw().values())


def compare(case, implementation):
    want, plain = answers(case)
    limits = LIMIT_OF_ALIKE if case.alike else LIMIT
    for name, *three in zip(("y", "dlower"), found(case, implementation), plain, want, strict=True):
        oracle.check(name, *three, "float32", limits)


@pytest.mark.seconds
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("case", cases.CI, ids=lambda case: case.name)
def test_inverse(case, implementation):
    compare(case, implementation)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.SLOW, ids=lambda case: case.name)
def test_inverse_on_the_grid(case):
    compare(case, "xla")


@pytest.mark.parametrize("implementation", BOTH)
def test_what_is_not_below_the_diagonal_counts_as_nothing(implementation):
    case = cases.CI[0]
    drawn = case.draw()
    lower, dy = drawn.values()
    garbage = lower + jnp.triu(jnp.full_like(lower, 7.0))
    invert = partial(unit_inverse, implementation=implementation)
    results = jax.jit(partial(with_gradient, invert))(garbage, dy)
    for x, y in zip(results, found(case, implementation), strict=True):
        np.testing.assert_array_equal(x, y)
        assert not np.triu(x, 1).any()


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case(size=8), "matrices of 16 to 64 rows, not 8"),
        (Case(size=128), "matrices of 16 to 64 rows, not 128"),
        (Case(size=64, matrices=2**19), "arrays of fewer than 2\\^31 elements"),
    ],
)
def test_triton_refuses_with_a_reason_and_xla_runs(case, said):
    lower = case.abstract()["lower"]
    with pytest.raises(Refused, match=said):
        jax.eval_shape(partial(unit_inverse, implementation="triton:interpret"), lower)
    with using({}) as decisions:
        jax.eval_shape(lambda lower: unit_inverse(lower), lower)
    assert decisions.taken == {f"unit_inverse float32 {case.matrices}x{case.size}": "xla"}


@pytest.mark.parametrize(
    "lower", [jnp.ones((3, 3)), jnp.ones((2, 4)), jnp.ones(4), jnp.ones((4, 4), jnp.bfloat16), None]
)
def test_what_is_no_such_matrix_is_refused_in_one_line(lower):
    with pytest.raises(ValueError, match=r"^unit_inverse: lower must be float32 \[\.\.\., n, n\]"):
        unit_inverse(lower)


def test_what_is_counted_are_the_matmuls_of_xla():
    with using({"unit_inverse float32 3x32": "triton:interpret"}), counted():
        text = str(jax.make_jaxpr(lambda x: unit_inverse(x))(cases.CI[0].draw()["lower"]))
    assert "pallas_call" not in text and text.count("dot_general") == 10
