"""Activations in 16 bits are multiplied by factors that are not, and computed in float32."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import T, family_config
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from spmdtrain.models.abstract import build_model
from spmdtrain.models.context import ForwardContext, sample_noise
from spmdtrain.models.scaled import scaled

# Functions that are a step of a formula, never all of it.
CURVES = {
    *("exp", "exp2", "expm1", "erf", "erfc", "log", "log1p", "logistic", "rsqrt", "sqrt", "tanh"),
}
NORMAL = np.random.default_rng(0).standard_normal(50_000)


def slope(y: jax.Array, x: jax.Array) -> float:
    """The factor between two arrays, by least squares."""
    wide_y, wide_x = (np.asarray(each, np.float64) for each in (y, x))
    return float((wide_y * wide_x).sum() / (wide_x * wide_x).sum())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("factor", [0.22, 0.9, 0.99, 1.4 / 40**0.5])
def test_a_product_is_right_on_average(factor, dtype):
    x = jnp.asarray(NORMAL, dtype)
    y = scaled(x, factor)
    assert y.dtype == dtype
    # jax's own product is 2e-3 off in bfloat16.
    assert slope(y, x) == pytest.approx(factor, rel=3e-4)


@pytest.mark.parametrize("rate", [0.1, 0.01, 0.05])
def test_dropout_in_bfloat16_keeps_the_mean(rate):
    x = jnp.asarray(NORMAL.reshape(50, 1000), "bfloat16")
    noise_b = sample_noise(0, jnp.int32(0), jnp.arange(50, dtype=jnp.uint32))
    dropped = ForwardContext(jnp.zeros((50, 1000), jnp.int32), noise_b=noise_b).dropout(x, 0, rate)
    kept = np.asarray(dropped) != 0
    assert slope(dropped[kept], x[kept]) == pytest.approx(1 / (1 - rate), rel=3e-4)


def equations(program: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of a program and of all programs inside."""
    for equation in program.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from equations(getattr(inner, "jaxpr", inner))


def is_narrow(x) -> bool:
    return x.aval.dtype == jnp.bfloat16


def rounds(equation: JaxprEqn) -> bool:
    """True if 16 bits round a factor, or each of the values that a formula goes on with."""
    if equation.primitive.name in CURVES:
        return is_narrow(equation.outvars[0])
    if equation.primitive.name not in ("mul", "div"):
        return False
    numbers = (x for x in equation.invars if isinstance(x, Literal))
    return any(is_narrow(x) and np.log2(abs(float(x.val))) % 1 for x in numbers)


@pytest.mark.parametrize(
    "family",
    [
        *("gpt2", "qwen3_5", "gemma2", "gemma4 with tokens", "granite", "gpt_oss", "qwen2_moe"),
        *("arcee", "apertus", "falcon_h1", "gated channels", "cooled without rope"),
    ],
)
def test_a_model_rounds_no_factor_and_no_step_of_a_formula(family):
    config = family_config(family)
    model = build_model(config)
    params = {
        path: jax.ShapeDtypeStruct(one.shape, model.dtype(path, "bfloat16"))
        for path, one in model.parameters.items()
    }

    def run(params, tokens_bt, noise_b):
        positions_bt = jnp.broadcast_to(jnp.arange(T), tokens_bt.shape)
        ctx = ForwardContext(positions_bt, noise_b=noise_b, ids_bt=tokens_bt)
        module = model.bind(params)
        return module.blocks(module.embed(tokens_bt, replace(ctx, dropout_rate=0.1)), ctx)[0]

    def gradients(*arguments):
        y, pull = jax.vjp(lambda params: run(params, *arguments[1:]), arguments[0])
        return pull(y)

    tokens_bt = jax.ShapeDtypeStruct((2, T), jnp.int32)
    keys = jax.random.split(jax.random.key(0), 2)
    program = jax.make_jaxpr(gradients)(params, tokens_bt, keys)
    rounding = [str(each) for each in equations(program.jaxpr) if rounds(each)]
    assert rounding == []
