"""Activations in 16 bits, against those of the same numbers in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpu import needs_compiler, printed

from spmdtrain.models.layers import mlp_activations
from spmdtrain.models.layers.mlp_activations import ACTIVATIONS, xielu

FUNCTIONS = ACTIVATIONS | {"xielu": lambda h_btf: xielu(h_btf, jnp.full(1, 0.3), jnp.full(1, -0.2))}
GATED = ("swiglu", "geglu", "swiglu_clamped")
# Prints of each gradient how many kernels compute it, and the bytes that they move.
GRADIENTS = """
import jax, jax.numpy as jnp
from spmdtrain.processes.xla_flags import set_xla_flags
set_xla_flags(deviceless=True)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from spmdtrain.compiled.kernel_launches import kernels
from spmdtrain.models.layers.mlp_activations import ACTIVATIONS
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.planner.deviceless import described_devices

mesh = Mesh(described_devices(hardware("h200"), 1), "x")
whole = NamedSharding(mesh, PartitionSpec())
h, dy = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
         for shape in ((8, 128, 2, 512), (8, 128, 512)))
for name in ("swiglu", "geglu", "swiglu_clamped"):
    def gradient(h, dy):
        return jax.vjp(ACTIVATIONS[name], h)[1](dy)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(gradient).lower(h, dy).compile().as_text()
    launched = kernels(text)
    print(name, len(launched), round(sum(each.moved for each in launched)))
"""


def values_and_gradient(activation, h, dy):
    """The values and the gradient, in one program."""

    def both(h, dy):
        y, pull = jax.vjp(activation, h)
        return y, *pull(dy)

    return jax.jit(both)(h, dy)


def drawn(name: str, dtype: str) -> tuple[jax.Array, jax.Array]:
    """An input of the activation, whose tails are not 0, and a gradient."""
    shape = (64, 2, 256) if name in GATED else (64, 256)
    random = np.random.default_rng(0)
    h, dy = 2.5 * random.standard_normal(shape), random.standard_normal((64, 256))
    return jnp.asarray(h, dtype), jnp.asarray(dy, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_16_bits_round_the_result_and_nothing_before(name, dtype):
    h, dy = drawn(name, dtype)
    narrow = values_and_gradient(FUNCTIONS[name], h, dy)
    wide = values_and_gradient(FUNCTIONS[name], h.astype(jnp.float32), dy.astype(jnp.float32))
    numbers = jnp.finfo(dtype)
    for found, exact in zip(narrow, wide, strict=True):
        assert found.dtype == dtype
        of_one_rounding = float(numbers.eps) / 2 * np.abs(exact) * 1.01
        of_float32 = 4e-6  # in the tails of GELU, where terms cancel
        np.testing.assert_array_less(np.abs(found - exact), of_one_rounding + of_float32)


@pytest.mark.parametrize("name", GATED)
def test_the_gradient_in_one_pass_is_that_of_the_halves(name, monkeypatch):
    h, dy = drawn(name, "float32")
    of_halves = values_and_gradient(ACTIVATIONS[name], h, dy)
    monkeypatch.setattr(mlp_activations, "device_kind", lambda: "NVIDIA H200")
    in_one_pass = values_and_gradient(ACTIVATIONS[name], h, dy)
    for found, wanted in zip(in_one_pass, of_halves, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.long
@needs_compiler
def test_a_gpu_computes_the_gradient_in_one_kernel():
    """Which reads the projection and the gradient, and writes nothing else than its own."""
    array = 8 * 128 * 512 * 2  # bytes
    for line in printed(GRADIENTS).splitlines():
        name, launches, moved = line.split()
        assert int(launches) == 1, name
        assert 5 * array <= int(moved) < 5 * array + 100, name
