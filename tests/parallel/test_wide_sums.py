"""Long sums of 16-bit floats are taken in float32, wherever a program takes them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from spmdtrain.parallel.wide_sums import narrow_sums, rewritten, with_wide_sums

TOKENS, WIDTH = 3000, 4
IDS = jnp.zeros(TOKENS, jnp.int32).at[::7].set(2)


def lookup(weight_ve):
    return weight_ve[:][IDS]


def lookup_or_zero(weight_ve):
    return jnp.take(weight_ve, jnp.where(IDS == 2, 99, IDS), axis=0, mode="fill", fill_value=0)


def bias(weight_ve):
    return jnp.zeros((TOKENS, WIDTH), weight_ve.dtype) + weight_ve[0]


def scale(weight_ve):
    return jnp.ones((TOKENS, WIDTH), weight_ve.dtype) * weight_ve[1]


def running_sum(weight_ve):
    return jnp.cumsum(jnp.broadcast_to(weight_ve[0], (TOKENS, WIDTH)), 0) / TOKENS


def recomputed(weight_ve):
    return jax.checkpoint(lambda w: jnp.tanh(bias(w)))(weight_ve)


def nested(weight_ve):
    return jax.jit(lambda w: jnp.tanh(bias(w)))(weight_ve)


def of_a_loop(weight_ve):
    """A recurrence: each turn reads the same weight, whose cotangents are a carry."""

    def turn(state, x):
        return state * 0.5 + x * weight_ve[0], state

    inputs = jnp.ones((TOKENS, WIDTH), weight_ve.dtype)
    return jax.lax.scan(turn, jnp.zeros(WIDTH, weight_ve.dtype), inputs)[1]


def in_a_branch(weight_ve):
    return jax.lax.cond(IDS[0] == 0, bias, scale, weight_ve)


def on_devices(weight_ve):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])

    def local(weight, ids):
        return weight[ids]

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": False}
    return jax.shard_map(local, mesh=mesh, **specs)(weight_ve, IDS)


def of_flax(weight_ve):
    """The bias of `nnx.Linear`, which flax adds in the dtype in which it computes."""
    with nnx.use_eager_sharding(False):
        layer = nnx.Linear(1, WIDTH, dtype=weight_ve.dtype, rngs=nnx.Rngs(0))
    layer.bias = nnx.Param(weight_ve[0])
    return layer(jnp.zeros((TOKENS, 1), weight_ve.dtype))


KINDS = (
    lookup,
    lookup_or_zero,
    bias,
    scale,
    running_sum,
    recomputed,
    nested,
    of_a_loop,
    in_a_branch,
    on_devices,
    of_flax,
)


def gradient_of(kind):
    def loss(weight_ve):
        return kind(weight_ve).astype(jnp.float32).sum() / 100

    return jax.grad(loss)


def weight(dtype):
    return jnp.asarray(np.random.default_rng(0).normal(0, 0.1, (5, WIDTH)), dtype)


def off(kind, compute: str) -> float:
    """The distance of the gradient in `compute` from that in float32, relative to its size."""
    narrow = jax.jit(with_wide_sums(gradient_of(kind), compute, "cuda"))(weight(compute))
    wide = jax.jit(gradient_of(kind))(weight("float32"))
    return float(jnp.linalg.norm(narrow.astype(jnp.float32) - wide) / jnp.linalg.norm(wide))


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_over_many_tokens_is_that_of_float32(kind, compute):
    assert off(kind, compute) < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_no_narrow_sum_is_left_and_without_rewriting_there_is_one(kind):
    program = jax.make_jaxpr(gradient_of(kind))(weight("bfloat16"))
    assert list(narrow_sums(program))
    assert list(narrow_sums(rewritten(program))) == []


def test_the_table_of_a_lookup_is_wrong_without_it():
    """That the figure above can fail: half of the gradient is lost in bfloat16."""
    narrow = jax.jit(gradient_of(lookup))(weight("bfloat16")).astype(jnp.float32)
    wide = jax.jit(gradient_of(lookup))(weight("float32"))
    assert jnp.linalg.norm(narrow - wide) / jnp.linalg.norm(wide) > 0.5


def test_a_program_in_float32_is_left_alone():
    function = gradient_of(lookup)
    assert with_wide_sums(function, "float32", "cpu") is function


def test_a_residual_stream_keeps_its_dtype():
    """A carry to which a loop adds what it computes from it is no sum of cotangents."""

    def forward(weight_ve):
        def layer(x, w):
            return x + jnp.tanh(x * w), None

        return jax.lax.scan(layer, jnp.ones(WIDTH, weight_ve.dtype), weight_ve)[0]

    program = jax.make_jaxpr(forward)(weight("bfloat16"))
    assert str(rewritten(program)) == str(program)


@pytest.mark.parametrize(("platform", "outputs"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_matmuls_sum_in_float32_where_the_platform_does_not(platform, outputs):
    """Also those of a loop, and of its gradient."""

    def function(x, weights):
        def loss(weights):
            y, _ = jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)
            return y.astype(jnp.float32).sum()

        return jax.grad(loss)(weights)

    arguments = (jnp.ones((4, 8), jnp.bfloat16), jnp.ones((3, 8, 8), jnp.bfloat16))
    program = jax.make_jaxpr(with_wide_sums(function, "bfloat16", platform))(*arguments)
    dtypes = re.findall(r"preferred_element_type=(\w+)", str(program))
    assert len(dtypes) == 3
    assert set(dtypes) == {outputs}
    assert program.out_avals[0].dtype == jnp.bfloat16
