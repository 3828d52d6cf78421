"""Every implementation of the norms against their definition in float64: values, gradients."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels import norm
from pallas_kernels.chosen import APART, form_name, using
from pallas_kernels.norm import cases, reference, triton
from pallas_kernels.norm.api import WITH_X

NAMES = ("x", "scale", "bias", "residual", "dy", "dtotal")
# Relative L2 of y and dx; rounding to bfloat16 alone is 1.7e-3.
FLOOR = {"bfloat16": 2.5e-3, "float32": 1e-6}
OF_WEIGHTS = {"bfloat16": 2.5e-3, "float32": 1e-4}


def with_gradients(run):
    def both(x, scale, bias, residual, dy, dtotal):
        there = [each for each in (x, scale, bias, residual) if each is not None]

        def given(*there):
            left = iter(there)
            return run(
                *(None if each is None else next(left) for each in (x, scale, bias, residual))
            )

        out, pull = jax.vjp(given, *there)
        return out, pull(
            (dy.astype(out[0].dtype), None if dtotal is None else dtotal.astype(out[1].dtype))
        )

    return both


def definition(case):
    def run(*arrays):
        epsilon = 1e-5 if case.op == "layernorm" else 1e-6
        y, total = reference.normalise(*arrays, epsilon=epsilon, centred=case.op == "layernorm")
        return y, total if case.residual else None

    return with_gradients(run)


def kernel(case, implementation):
    def run(x, scale, bias, residual):
        out = getattr(norm, case.op)(
            x, scale, bias, residual=residual, implementation=implementation
        )
        return out if case.residual else (out, None)

    return with_gradients(run)


@cache
def answers(case):
    """(outputs, gradients) by the definition: in float64, and in the dtypes of the case."""
    arrays = [case.draw()[name] for name in NAMES]
    want = oracle.in_float64(definition(case), *arrays)
    # What is normalised is the rounded sum: that is what the definition says.
    if case.residual == "bfloat16":
        x, residual = (np.asarray(arrays[i], np.float64) for i in (0, 3))
        rounded = np.asarray((x + residual).astype(np.float32).astype(jnp.bfloat16), np.float64)
        want = oracle.in_float64(definition(case), *arrays[:3], rounded - x, *arrays[4:])
    return want, jax.device_get(jax.jit(definition(case))(*arrays))


def compare(case, implementation):
    want, plain = answers(case)
    got = jax.jit(kernel(case, implementation))(*(case.draw()[name] for name in NAMES))
    there = [name for name in NAMES[:4] if case.draw()[name] is not None]
    for name, *three in zip(("y", "sum"), got[0], plain[0], want[0], strict=True):
        if three[0] is not None:
            oracle.check(name, *three, str(three[0].dtype), FLOOR)
    for name, *three in zip(there, got[1], plain[1], want[1], strict=True):
        limits = OF_WEIGHTS if name in ("scale", "bias") else FLOOR
        oracle.check(f"d{name}", *three, str(three[0].dtype), limits)


@pytest.mark.seconds
@pytest.mark.parametrize("case", cases.CI, ids=lambda case: case.name)
def test_xla(case):
    compare(case, "xla")


@pytest.mark.parametrize("case", cases.CI, ids=lambda case: case.name)
@pytest.mark.seconds
def test_interpreted_triton(case, tiles):
    tiles.setattr(triton, "CORES", 1)  # two programs, several turns each
    compare(case, "triton:interpret")


def test_other_blocks_and_more_programs_give_the_same(tiles):
    tiles.setattr(triton, "CORES", 1)
    for variant in triton.VARIANTS:
        compare(cases.CI[3], f"triton/{variant}:interpret")


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.SLOW, ids=lambda case: case.name)
def test_xla_on_the_grid(case):
    compare(case, "xla")


def beside(function, **options):
    """y, and the gradients of x and the scale where x is read beside the norm."""

    def run(x, scale, dy, dx):
        def both(x, scale):
            out = function(x, scale, **options)
            return out if isinstance(out, tuple) else (out, x)

        (y, _), pull = jax.vjp(both, x, scale)
        return y, *pull((dy, dx))

    return run


@pytest.mark.parametrize("op", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("implementation", ["xla", "triton:interpret"])
def test_the_gradient_of_what_else_reads_x_is_added(implementation, op):
    case = cases.Case(rows=37, width=48, op=op, dtype="bfloat16")
    x, dy = (jnp.asarray(case.draw()[name]) for name in ("x", "dy"))
    arrays = x, jnp.linspace(0.5, 2, 48), dy.astype(x.dtype), dy[::-1].astype(x.dtype)
    options = {"returns_x": True, "implementation": implementation}
    got = jax.jit(beside(getattr(norm, op), **options))(*arrays)

    def definition(x, scale):
        epsilon = 1e-5 if op == "layernorm" else 1e-6
        centred = op == "layernorm"
        return reference.normalise(x, scale, None, None, epsilon=epsilon, centred=centred)[0]

    exact = oracle.in_float64(beside(definition), *arrays)
    plain = jax.device_get(jax.jit(beside(definition))(*arrays))
    for name, ours, rounded, true in zip(("y", "dx", "dscale"), got, plain, exact, strict=True):
        limits = OF_WEIGHTS if name == "dscale" else FLOOR
        oracle.check(name, ours, rounded, true, str(ours.dtype), limits)
    # One rounding, not two: no further from the truth than the sum of rounded gradients.
    apart = jax.device_get(
        jax.jit(beside(getattr(norm, op), implementation=implementation))(*arrays)
    )
    distances = [np.abs(np.asarray(dx, np.float64) - exact[1]).mean() for dx in (got[1], apart[1])]
    assert distances[0] < distances[1]


def test_what_else_reads_x_may_be_chosen_to_be_added_apart():
    x = jnp.ones((4, 8))
    call = partial(norm.rmsnorm, scale=jnp.ones(8), returns_x=True)
    with using({}) as decisions:
        _, same = call(x)
    assert same is not x
    [norm_call] = decisions.calls.values()
    with using({form_name(norm_call, WITH_X): APART}):
        assert call(x)[1] is x


def test_equal_numbers_far_from_zero_have_a_norm():
    x = jnp.asarray(1e8 * (1 + np.random.default_rng(0).random((20, 1))), jnp.float32) + jnp.zeros(
        (20, 100)
    )
    assert np.isfinite(jax.jit(lambda x: norm.layernorm(x, jnp.ones(100)))(x)).all()


def test_a_norm_takes_any_leading_dims_and_refuses_what_does_not_fit():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_allclose(
        norm.rmsnorm(x, jnp.ones(4))[1, 2], norm.rmsnorm(x[1, 2], jnp.ones(4)), rtol=1e-6
    )
    with pytest.raises(ValueError, match="scale must be"):
        norm.layernorm(x, jnp.ones(3))
    with pytest.raises(ValueError, match="shape of x"):
        norm.layernorm(x, jnp.ones(4), residual=x[0])
    with pytest.raises(ValueError, match="returns_x=False"):
        norm.rmsnorm(x, jnp.ones(4), residual=x, returns_x=True)
    with pytest.raises(ValueError, match="x is int32, not floating"):
        norm.rmsnorm(jnp.arange(8).reshape(2, 4), jnp.ones(4))
