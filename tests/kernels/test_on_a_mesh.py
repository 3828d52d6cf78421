"""Kernels on 8 devices: equal to one device, and nothing is gathered around them, in a pipeline's manual region too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention import attention
from pallas_kernels.norm import rmsnorm
from pallas_kernels.partition import locally

BATCH, HEADS = "data", "tensor"


def layer(implementation):
    """attention of normed q; every array [batch, time, heads, head_dim], the batch and the heads split."""

    def local(q, k, v, scale):
        q = rmsnorm(q, scale, implementation=implementation)
        return attention(q, k, v, causal=True, implementation=implementation)

    split = P(BATCH, None, HEADS)

    def run(q, k, v, scale):
        return locally(local, (split, split, split, P()), split)(q, k, v, scale)

    return run


@pytest.fixture
def arrays():
    random = np.random.default_rng(0)
    shapes = (4, 32, 4, 16), (4, 32, 2, 16), (4, 32, 2, 16), (16,)
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


def made_mesh(shape, names):
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
    return mesh, {"q": NamedSharding(mesh, P(BATCH, None, HEADS)), "scale": NamedSharding(mesh, P())}


def compiled(run, arrays, mesh, shardings):
    """(the step: loss and all gradients, its arguments)"""

    def loss(*arrays):
        return jnp.square(run(*arrays)).sum()

    placed = [jax.device_put(x, shardings["q" if x.ndim > 1 else "scale"]) for x in arrays]
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))).lower(*placed).compile(), placed


def moved(step) -> list[str]:
    """The collectives of the step that are not sums."""
    text = step.as_text()
    kinds = "all-gather", "all-to-all", "collective-permute", "reduce-scatter"
    return [kind for kind in kinds if f" {kind}(" in text or f" {kind}-start(" in text]


def check(run, arrays, mesh, shardings):
    step, placed = compiled(run, arrays, mesh, shardings)
    got = step(*placed)
    want = jax.value_and_grad(lambda *arrays: jnp.square(layer("xla")(*arrays)).sum(), (0, 1, 2, 3))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)
    assert moved(step) == []


@pytest.mark.parametrize("implementation", ["xla", "triton:interpret"])
def test_automatic_mesh(implementation, arrays):
    check(layer(implementation), arrays, *made_mesh((4, 2), (BATCH, HEADS)))


@pytest.mark.parametrize("implementation", ["xla", "triton:interpret"])
def test_inside_a_region_that_is_manual_over_the_pipeline(implementation, arrays):
    """Two stages, each half of a microbatched loop with remat; only `data` and `tensor` are left automatic."""
    mesh, shardings = made_mesh((2, 2, 2), ("pipeline", BATCH, HEADS))
    step = jax.checkpoint(layer(implementation))

    def stage(q, k, v, scale):
        def once(q, _):
            return q, step(q, k, v, scale)

        _, y = jax.lax.scan(once, q, None, length=2)
        return jax.lax.psum(y.sum(0), "pipeline") / 4

    region = jax.shard_map(
        stage, in_specs=(P(),) * 4, out_specs=P(), axis_names={"pipeline"}, check_vma=False, mesh=mesh
    )
    check(region, arrays, mesh, shardings)


def test_a_bare_kernel_is_gathered(arrays):
    """So that the tests above can fail."""

    def bare(q, k, v, _):
        return attention(q, k, v, causal=True, implementation="triton:interpret")

    step, _ = compiled(bare, arrays, *made_mesh((4, 2), (BATCH, HEADS)))
    assert "all-gather" in moved(step)
