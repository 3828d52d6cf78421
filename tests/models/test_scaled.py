"""A factor of the settings multiplies activations of 16 bits without being rounded first."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import T, family_config
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from spmdtrain.models.abstract import build_model
from spmdtrain.models.context import ForwardContext, sample_noise
from spmdtrain.models.scaled import scaled

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


def narrow_factors(program: Jaxpr) -> Iterator[float]:
    """Yields the numbers by which a program multiplies or divides arrays of 16 bits."""
    for equation in program.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from narrow_factors(getattr(inner, "jaxpr", inner))
        if equation.primitive.name in ("mul", "div"):
            numbers = (x for x in equation.invars if isinstance(x, Literal))
            yield from (float(x.val) for x in numbers if x.aval.dtype == jnp.bfloat16)


@pytest.mark.parametrize("family", ["granite", "falcon_h1"])
def test_no_factor_of_a_model_is_rounded(family):
    config = family_config(family)
    model = build_model(config)
    params = {
        path: jax.ShapeDtypeStruct(one.shape, model.dtype(path, "bfloat16"))
        for path, one in model.parameters.items()
    }

    def run(params, tokens_bt, noise_b):
        positions_bt = jnp.broadcast_to(jnp.arange(T), tokens_bt.shape)
        ctx = replace(ForwardContext(positions_bt, noise_b=noise_b), dropout_rate=0.1)
        module = model.bind(params)
        return module.blocks(module.embed(tokens_bt, ctx), ctx)[0]

    tokens_bt = jax.ShapeDtypeStruct((2, T), jnp.int32)
    program = jax.make_jaxpr(run)(params, tokens_bt, jax.random.split(jax.random.key(0), 2))
    rounded = [number for number in narrow_factors(program.jaxpr) if np.log2(number) % 1]
    assert not rounded, f"factors in bfloat16: {rounded}"
