"""Under jax's transformations kernels give the plain call's gradients, and always the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, cudnn, saveable
from pallas_kernels.grouped import grouped_matmul
from pallas_kernels.loss import linear_cross_entropy
from pallas_kernels.norm import layernorm, rmsnorm

pytestmark = pytest.mark.long

BOTH = "xla", "triton:interpret"
COUNT = 3  # of what is mapped and scanned over


def attended(implementation, mapped, shared):
    out, lse = attention(
        *mapped, *shared, causal=True, return_lse=True, implementation=implementation
    )
    return jnp.square(out).sum() + lse.sum()


def normed(implementation, mapped, shared):
    """Both norms, one after the other, with a residual between them."""
    x, residual = mapped
    scale, bias = shared
    y, total = layernorm(x, scale, bias, residual=residual, implementation=implementation)
    return (
        jnp.sum(rmsnorm(y, scale, residual=total, implementation=implementation)[0] ** 3)
        + jnp.square(total).sum()
    )


def routed(implementation, mapped, shared):
    """Rows of a time, padded to whole tiles: none of expert 1, and the last tile unused."""
    x, w = *mapped, *shared
    rows = jnp.pad(x, ((0, -len(x) % 16 + 16), (0, 0)))
    used = jnp.arange(len(rows) // 16 - 1) % 2 * 2
    y = grouped_matmul(rows, w, jnp.append(used, -1), implementation=implementation)
    return jnp.square(y).sum()


def headed(_, mapped, shared):
    targets = jnp.arange(mapped[0].shape[1])[None] % 5
    return linear_cross_entropy(
        *mapped, *shared, targets, label_smoothing=0.1, z_loss=1e-3, chunk_logits=10
    )


OPS = {  # the loss, shapes of what is mapped and of what is not, given a time
    "attention": (attended, lambda t: [(1, t, 4, 16)], lambda t: [(1, t, 2, 16)] * 2, BOTH),
    "norms": (normed, lambda t: [(t, 24)] * 2, lambda _: [(24,)] * 2, BOTH),
    "grouped_matmul": (routed, lambda t: [(t, 16)], lambda _: [(3, 16, 16)], BOTH),
    "linear_cross_entropy": (headed, lambda t: [(1, t, 6)], lambda _: [(5, 6)], ("xla",)),
}
CASES = [
    (op, implementation)
    for op, (*_, implementations) in OPS.items()
    for implementation in implementations
]


def drawn(op: str, implementation: str, time: int):
    """(loss(mapped, shared), mapped [COUNT, ...], shared)"""
    loss, mapped, shared, _ = OPS[op]
    random = np.random.default_rng(0)

    def draw(shapes):
        return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]

    return (
        lambda *arrays: loss(implementation, *arrays),
        draw((COUNT, *shape) for shape in mapped(time)),
        draw(shared(time)),
    )


@pytest.mark.parametrize(("op", "implementation"), CASES)
def test_gradients_under_transformations(op, implementation):
    loss, mapped, shared = drawn(op, implementation, 20)

    def total(loss, mapped, shared):
        return sum(loss([x[i] for x in mapped], shared) for i in range(COUNT))

    def scanned(mapped, shared):
        return jax.lax.scan(
            lambda total, each: (total + loss(each, shared), None), jnp.float32(0), mapped
        )[0]

    @jax.jit
    def run(mapped, shared):
        both = 0, 1
        own, common = jax.vmap(jax.grad(loss, both), (0, None))(mapped, shared)
        return {
            "vmap of grad": (own, [x.sum(0) for x in common]),
            "grad of vmap": jax.grad(lambda *two: jax.vmap(loss, (0, None))(*two).sum(), both)(
                mapped, shared
            ),
            "remat": jax.grad(lambda *two: total(jax.checkpoint(loss), *two), both)(mapped, shared),
            "scan": jax.grad(scanned, both)(mapped, shared),
        }

    want = jax.jit(jax.grad(lambda *two: total(loss, *two), (0, 1)))(mapped, shared)
    for name, got in run(mapped, shared).items():
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("op", "implementation"), CASES)
def test_twenty_runs_give_the_same_bits(op, implementation):
    loss, mapped, shared = drawn(op, implementation, 200)  # several tiles
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    first = run([x[0] for x in mapped], shared)
    for _ in range(19):
        jax.tree.map(np.testing.assert_array_equal, run([x[0] for x in mapped], shared), first)


@pytest.mark.parametrize(("op", "implementation"), CASES)
def test_outside_any_jit_it_compiles_once(op, implementation, caplog):
    loss, mapped, shared = drawn(op, implementation, 20)

    def run():
        jax.block_until_ready(jax.value_and_grad(loss, (0, 1))([x[0] for x in mapped], shared))

    run()
    run()  # jax 0.12 forgets what it compiled before its first interpreted kernel
    with jax.log_compiles():
        run()
    assert not caplog.records


@pytest.mark.parametrize(
    ("implementation", "kernel", "backward"), [("xla", "scan", 1), ("cudnn", cudnn.FORWARD, 0)]
)
def test_saveable_keeps_the_forward_from_running_again(
    implementation, kernel, backward, monkeypatch
):
    monkeypatch.setattr(cudnn, "no_gpu", lambda _: "")
    monkeypatch.setattr(cudnn, "_not_installed", lambda: "")
    for check in ("check_cudnn_version", "check_compute_capability"):
        monkeypatch.setattr(f"jax._src.cudnn.fused_attention_stablehlo.{check}", lambda *_: 91900)
    q = jnp.ones((1, 64, 2, 32), jnp.bfloat16)

    def count(policy):
        layer = jax.checkpoint(
            lambda q: attention(q, 2 * q, q, implementation=implementation), policy=policy
        )
        return str(jax.make_jaxpr(jax.grad(lambda q: layer(q).sum().astype(jnp.float32)))(q)).count(
            f"{kernel}["
        )

    assert count(saveable) == 1 + backward
    assert count(None) == 2 + backward
