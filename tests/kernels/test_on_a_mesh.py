"""Kernels on 8 devices equal one device, and nothing is gathered around them.

In a pipeline's manual region, too.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention import attention
from pallas_kernels.loss import linear_cross_entropy
from pallas_kernels.norm import layernorm, rmsnorm
from pallas_kernels.partition import automatic_axes, locally

pytestmark = pytest.mark.long

BATCH, HEADS = "data", "tensor"


def layer(implementation):
    """Attention of normed q; arrays are [batch, time, heads, head_dim], batch and heads split."""

    def local(q, k, v, scale):
        q = rmsnorm(q, scale, implementation=implementation)
        return attention(q, k, v, causal=True, implementation=implementation)

    split = P(BATCH, None, HEADS)

    def run(q, k, v, scale):
        return locally(local, (split, split, split, P()), split)(q, k, v, scale)

    return run


def head(implementation):
    """The loss of layernorm(x + residual), [batch, time, embed]; batch and vocabulary are split."""

    def local(automatic, x, residual, weight, scale, bias):
        y, total = layernorm(x, scale, bias, residual=residual, implementation=implementation)
        targets = jnp.arange(x.shape[1])[None] % 12 + 0 * x[..., 0].astype(int)
        split = tuple(automatic & {HEADS})
        loss = linear_cross_entropy(
            y + total, weight, targets, axis_name=split, z_loss=1e-3, chunk_logits=64
        )
        loss = jax.lax.psum(loss, BATCH) if BATCH in automatic else loss
        return jnp.full(x.shape[:2], loss / 1000)

    def run(x, residual, weight, scale, bias):
        specs = P(BATCH), P(BATCH), P(HEADS), P(), P()
        return locally(partial(local, automatic_axes()), specs, P(BATCH))(
            x, residual, weight, scale, bias
        )

    return run


LAYER = (
    layer,
    [(4, 32, 4, 16), (4, 32, 2, 16), (4, 32, 2, 16), (16,)],
    [P(BATCH, None, HEADS)] * 3 + [P()],
)
HEAD = head, [(4, 32, 24)] * 2 + [(16, 24), (24,), (24,)], [P(BATCH)] * 2 + [P(HEADS), P(), P()]
CASES = [
    pytest.param(*part, implementation, id=f"{part[0].__name__}-{implementation}")
    for part in (LAYER, HEAD)
    for implementation in ("xla", "triton:interpret")
]


def drawn(shapes):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


def made_mesh(shape, names):
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def stepping(run, count):
    """Loss and all gradients."""
    return jax.value_and_grad(lambda *arrays: jnp.square(run(*arrays)).sum(), tuple(range(count)))


def compiled(run, arrays, mesh, specs):
    """(the step, its arguments)"""
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        return jax.jit(stepping(run, len(arrays))).lower(*placed).compile(), placed


def moved(step) -> list[str]:
    """The collectives of the step that are not sums."""
    text = step.as_text()
    kinds = "all-gather", "all-to-all", "collective-permute", "reduce-scatter"
    return [kind for kind in kinds if f" {kind}(" in text or f" {kind}-start(" in text]


def check(part, shapes, specs, mesh, run):
    """`run` gives what `part` on one device gives."""
    arrays = drawn(shapes)
    step, placed = compiled(run, arrays, mesh, specs)
    got, want = step(*placed), stepping(part("xla"), len(arrays))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)
    assert moved(step) == []


@pytest.mark.parametrize(("part", "shapes", "specs", "implementation"), CASES)
def test_automatic_mesh(part, shapes, specs, implementation):
    check(part, shapes, specs, made_mesh((4, 2), (BATCH, HEADS)), part(implementation))


@pytest.mark.parametrize(("part", "shapes", "specs", "implementation"), CASES)
def test_inside_a_region_that_is_manual_over_the_pipeline(part, shapes, specs, implementation):
    """Two stages, each half of a microbatched loop with remat; the other axes stay automatic."""
    mesh = made_mesh((2, 2, 2), ("pipeline", BATCH, HEADS))
    step = jax.checkpoint(part(implementation))

    def stage(first, *others):
        def once(first, _):
            return first, step(first, *others)

        _, y = jax.lax.scan(once, first, None, length=2)
        return jax.lax.psum(y.sum(0), "pipeline") / 4

    region = jax.shard_map(
        stage,
        in_specs=(P(),) * len(shapes),
        out_specs=P(),
        axis_names={"pipeline"},
        check_vma=False,
        mesh=mesh,
    )
    check(part, shapes, specs, mesh, region)


def test_a_bare_kernel_is_gathered():
    """So that the tests above can fail."""
    _, shapes, specs = LAYER

    def bare(q, k, v, _):
        return attention(q, k, v, causal=True, implementation="triton:interpret")

    step, _ = compiled(bare, drawn(shapes), made_mesh((4, 2), (BATCH, HEADS)), specs)
    assert "all-gather" in moved(step)


def test_a_region_that_follows_what_differs_is_refused():
    x = jax.ShapeDtypeStruct((8, 32, 2, 16), jnp.float32)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    region = jax.shard_map(attention, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(
        ValueError, match=r"attention: needs jax.shard_map\(..., check_vma=False\) around it"
    ):
        jax.jit(region).lower(x, x, x)
