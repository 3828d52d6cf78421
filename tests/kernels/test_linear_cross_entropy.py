"""Linear + cross-entropy against its definition in float64, also with a split vocabulary."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.loss import (
    cases,
    linear_cross_entropy,
    reference,
    softmax,
)
from pallas_kernels.loss.chunks import chunk_count
from pallas_kernels.loss.own import linear_token_loss

pytestmark = pytest.mark.long


def options(case):
    names = ("label_smoothing", "z_loss", "scale", "softcap")
    return {name: getattr(case, name) for name in names}


def definition(case, targets):
    def run(x, weight, mask):
        flat = x.reshape(-1, x.shape[-1])
        return reference.summed_loss(
            flat, weight, targets.reshape(-1), mask.reshape(-1), **options(case)
        )

    return jax.value_and_grad(run, (0, 1, 2))


@pytest.mark.parametrize("implementation", [None, "triton:interpret"])
@pytest.mark.parametrize("case", cases.CI, ids=lambda case: case.name)
def test_value_and_gradients(case, implementation):
    compare(case, implementation)


def compare(case, implementation):
    """Holds a call and its gradients against their definition in float64."""
    x, weight, targets, mask = case.draw()
    want = oracle.in_float64(definition(case, targets), x, weight, mask)
    plain = jax.jit(definition(case, targets))(x, weight, mask)

    def loss(x, weight, mask):
        more = {"is_local": True, "implementation": implementation, **options(case)}
        return linear_cross_entropy(
            x, weight, targets, mask=mask, chunk_logits=case.chunk_logits, **more
        )

    got = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, weight, mask)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(jax.jit(loss)(x, weight, mask), got[0], rtol=1e-6)
    for name, *three in zip(("dx", "dweight"), got[1], plain[1], want[1], strict=False):
        oracle.check(name, *three, case.dtype, oracle.GRADIENT)
    np.testing.assert_allclose(got[1][2], want[1][2], rtol=1e-5)


@pytest.mark.parametrize("case", cases.CI, ids=lambda case: case.name)
def test_a_row_of_many_blocks(case, monkeypatch):
    """Of 16 logits each: a group of four, single ones, and one that is cut."""
    monkeypatch.setattr(softmax, "TILES", {2: (16, 4), 4: (16, 4)})
    compare(replace(case, vocab=101), "triton:interpret")


@pytest.mark.parametrize("implementation", ["xla", "triton:interpret"])
def test_logits_in_bfloat16_are_held_against_float32(implementation):
    """2 %, and the sums over tokens are as exact as those of float32 logits: all are alike."""
    case = cases.Case(b=1, t=600, dtype="bfloat16", masked=True, z_loss=1e-3)
    x, weight, targets, mask = case.draw()
    x, targets = (
        jnp.broadcast_to(x[:, :1], x.shape),
        jnp.broadcast_to(targets[:, :1], targets.shape),
    )
    wide = jax.jit(definition(case, targets))(x.astype("float32"), weight.astype("float32"), mask)

    def loss(x, weight, mask):
        more = {"is_local": True, "implementation": implementation, **options(case)}
        return linear_cross_entropy(
            x, weight, targets, mask=mask, logits_dtype="bfloat16", chunk_logits=1, **more
        )

    narrow = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, weight, mask)
    for ours, exact in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        off = np.linalg.norm(np.asarray(ours, np.float32) - exact) / np.linalg.norm(exact)
        assert off < 0.02


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_the_sums_of_parts_are_those_of_their_sequences_alone_and_move_no_gradient(z_loss):
    x, weight, targets, mask = cases.Case(chunk_logits=600, masked=True).draw()
    x, targets, mask = (
        x.reshape(-1, *x.shape[-2:]),
        *(each.reshape(-1, each.shape[-1]) for each in (targets, mask)),
    )
    part_bn = np.eye(3, dtype=np.float32)[np.arange(len(x)) % 2]  # the last part has nothing
    x = x.at[1, np.argmax(mask[1] == 0)].set(np.nan)

    def loss(x, mask, **more):
        more |= {"z_loss": z_loss, "chunk_logits": 600, "with_z_loss": True}
        return linear_cross_entropy(x, weight, targets, mask=mask, **more)

    def own(x, **more):
        def cross_entropy(logits, targets):
            log_probability = jax.nn.log_softmax(logits)
            return {"loss": -jnp.take_along_axis(log_probability, targets[..., None], -1)[..., 0]}

        return linear_token_loss(
            x, weight, targets, cross_entropy, mask_bt=mask, chunk_logits=600, **more
        )["loss"]

    *_, parts = loss(x, mask, parts=part_bn)
    for part, its_own in enumerate(part_bn.T):
        total, z_total = loss(x, mask * its_own[:, None])
        np.testing.assert_allclose(parts[part], total - z_total, rtol=2e-6)
    assert parts[2] == 0
    np.testing.assert_allclose(own(x, part_bn=part_bn)[1:], parts, rtol=1e-5)
    with_parts = jax.grad(lambda x: sum(map(jnp.sum, loss(x, mask, parts=part_bn))))(x)
    np.testing.assert_array_equal(with_parts, jax.grad(lambda x: sum(loss(x, mask)))(x))
    own_with_parts = jax.grad(lambda x: own(x, part_bn=part_bn).sum())(x)
    np.testing.assert_array_equal(own_with_parts, jax.grad(own)(x))


def test_the_part_that_is_z_loss_is_told_and_has_its_gradient_in_the_sum():
    case = cases.Case(z_loss=1e-2, chunk_logits=600, masked=True)
    x, weight, targets, mask = case.draw()

    def loss(x, **more):
        return linear_cross_entropy(x, weight, targets, mask=mask, chunk_logits=600, **more)

    total, z_total = loss(x, z_loss=case.z_loss, with_z_loss=True)
    np.testing.assert_allclose(total - z_total, loss(x), rtol=1e-6)
    np.testing.assert_allclose(total, loss(x, z_loss=case.z_loss), rtol=1e-6)
    of_both = jax.grad(lambda x: sum(loss(x, z_loss=case.z_loss, with_z_loss=True)))(x)
    np.testing.assert_array_equal(of_both, jax.grad(loss)(x, z_loss=case.z_loss))


def z_and_cross_entropy(z_loss):
    """The loss of `reference`, token by token, written as a person would."""

    def losses(logits, targets):
        lse = jax.nn.logsumexp(logits, -1)
        at_target = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return {"loss": lse - at_target, "z": z_loss * lse**2}

    return losses


@pytest.mark.parametrize("limit", [600, 2**26])
def test_a_loss_of_ones_own_has_the_value_and_gradients_of_its_definition(limit):
    case = cases.Case(masked=True, z_loss=1e-2, t=23, scale=0.5, softcap=1.5)
    x, weight, targets, mask = case.draw()
    want = oracle.in_float64(definition(case, targets), x, weight, mask)
    plain = jax.jit(definition(case, targets))(x, weight, mask)
    x = jnp.where(mask[..., None] == 0, jnp.nan, x)  # what does not count may be NaN

    def loss(x, weight, mask):
        own = z_and_cross_entropy(case.z_loss)
        shaped = {"scale": case.scale, "softcap": case.softcap}
        sums = linear_token_loss(
            x, weight, targets, own, mask_bt=mask, chunk_logits=limit, **shaped
        )
        return sum(sums.values()), sums

    (total, sums), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        x, weight, mask
    )
    assert sums.keys() == {"loss", "z"} and sums["z"] > 0
    np.testing.assert_allclose(total, want[0], rtol=1e-5)
    for name, *three in zip(("dx", "dweight"), gradients, plain[1], want[1], strict=False):
        oracle.check(name, *three, case.dtype, oracle.GRADIENT)


def test_a_loss_of_ones_own_over_a_split_vocabulary():
    """Rows on four devices, of which the last three do not count."""
    case = cases.Case(masked=True, z_loss=1e-2)
    x, weight, targets, mask = case.draw()
    vocab = case.vocab - 3
    targets = jnp.minimum(targets, vocab - 1)
    own = z_and_cross_entropy(case.z_loss)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def part(x, weight, targets, mask):
        sums = linear_token_loss(
            x,
            weight,
            targets,
            own,
            mask_bt=mask,
            axis_name=("tensor",),
            vocab=vocab,
            chunk_logits=400,
        )
        return jax.lax.psum(sum(sums.values()), "data")

    specs = P("data"), P("tensor"), P("data"), P("data")
    run = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

    def whole(x, weight):
        rows = weight[:vocab]
        sums = linear_token_loss(x, rows, targets, own, mask_bt=mask)
        return sum(sums.values())

    got = jax.jit(jax.value_and_grad(lambda x, w: run(x, w, targets, mask), (0, 1)))(x, weight)
    want = jax.value_and_grad(whole, (0, 1))(x, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_ignored_targets_count_nothing():
    x, weight, targets, mask = cases.Case(masked=True).draw()
    ignored = jnp.where(mask == 0, -100, targets)
    run = jax.value_and_grad(lambda x, w, t, **more: linear_cross_entropy(x, w, t, **more), (0, 1))
    got, want = run(x, weight, ignored, ignore_index=-100), run(x, weight, targets, mask=mask)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_what_counts_nothing_may_be_nan():
    x, weight, targets, mask = cases.Case(masked=True).draw()
    run = jax.value_and_grad(
        lambda x, w: linear_cross_entropy(x, w, targets, mask=mask, chunk_logits=1000), (0, 1)
    )
    got, want = (run(jnp.where(mask[..., None] == 0, fill, x), weight) for fill in (jnp.nan, 0.0))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    ("time", "chunks"), [(8192, 16), (8191, 16), (4099, 8), (2039, 4), (12, 1)]
)
def test_chunks_are_few_whatever_divides_the_time(time, chunks):
    assert chunk_count(1, time, 128256, 2**26) == chunks


def test_a_time_that_no_number_of_chunks_divides():
    x, weight, targets, mask = cases.Case(t=13).draw()

    def loss(limit, x, weight, mask):
        return linear_cross_entropy(x, weight, targets, mask=mask, chunk_logits=limit)

    run = jax.value_and_grad(loss, (1, 2, 3))
    rows = x.shape[0] * weight.shape[0]
    got, want = run(3 * rows, x, weight, mask), run(13 * rows, x, weight, mask)
    assert chunk_count(x.shape[0], 13, weight.shape[0], 3 * rows) == 5
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), got, want
    )


def test_a_gradient_is_rounded_after_it_is_scaled():
    """The sum over 70,000 tokens is above what float16 holds, their mean is not."""
    x, targets = jnp.ones((1, 70000, 8), jnp.float16), jnp.zeros((1, 70000), int)
    mean = jax.jit(jax.grad(lambda weight: linear_cross_entropy(x, weight, targets) / 70000))
    np.testing.assert_allclose(mean(jnp.zeros((16, 8), jnp.float16))[0], -15 / 16, rtol=1e-3)


def test_the_gradient_of_the_table_waits_in_the_precision_of_the_table():
    x = jnp.ones((2, 8, 16), jnp.bfloat16)
    table = jnp.ones((96, 16), jnp.bfloat16)
    targets = jnp.zeros((2, 8), jnp.int32)
    loss = jax.jit(jax.grad(lambda table: linear_cross_entropy(x, table, targets)))
    barriers = re.findall(r"optimization_barrier.*", loss.lower(table).as_text())
    assert any("tensor<96x16xbf16>" in barrier for barrier in barriers)


@pytest.mark.core
def test_logits_are_never_whole():
    case = cases.Case(b=1, t=4096, width=64, vocab=8192, chunk_logits=2**17)
    shapes = jax.eval_shape(case.draw)

    def loss(x, weight, targets, mask):
        return linear_cross_entropy(x, weight, targets, mask=mask, chunk_logits=case.chunk_logits)

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()
    whole = case.t * case.vocab * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 0.15 * whole


def test_a_split_vocabulary_gives_the_same():
    """Split over four devices; their losses count together, and no gradient is gathered."""
    shaped = {"label_smoothing": 0.1, "z_loss": 1e-3, "scale": 0.5, "softcap": 1.5}
    case = cases.Case(chunk_logits=400, masked=True, **shaped)
    x, weight, targets, mask = case.draw()
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def whole(x, weight):
        return linear_cross_entropy(x, weight, targets, mask=mask, **options(case))

    def part(x, weight, targets, mask):
        loss = linear_cross_entropy(
            x,
            weight,
            targets,
            mask=mask,
            axis_name=("tensor",),
            chunk_logits=case.chunk_logits,
            **options(case),
        )
        return jax.lax.psum(loss, "data")

    specs = P("data"), P("tensor"), P("data"), P("data")
    run = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    split = jax.jit(jax.value_and_grad(lambda x, weight: run(x, weight, targets, mask), (0, 1)))
    got, want = split(x, weight), jax.value_and_grad(whole, (0, 1))(x, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)
    assert "all-gather" not in split.lower(x, weight).compile().as_text().replace("all-gathers", "")


@pytest.mark.parametrize("vocab", [90, 70, 96])  # of 96 rows, 24 on a device: 70 leaves one without
def test_rows_beyond_the_vocabulary_have_no_part(vocab):
    case = cases.Case(chunk_logits=400, label_smoothing=0.1, z_loss=1e-3, masked=True)
    x, weight, targets, mask = case.draw()
    weight = weight.at[vocab:].set(100.0)  # would win
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))

    def whole(x, weight):
        return linear_cross_entropy(x, weight[:vocab], targets, mask=mask, **options(case))

    def padded(x, weight, axis_name=()):
        return linear_cross_entropy(
            x,
            weight,
            targets,
            mask=mask,
            axis_name=axis_name,
            vocab=vocab,
            chunk_logits=case.chunk_logits,
            **options(case),
        )

    def part(x, weight):
        return padded(x, weight, ("tensor",))

    specs = P(), P("tensor")
    split = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    want = jax.value_and_grad(whole, (0, 1))(x, weight)
    for run in (padded, split):
        got = jax.jit(jax.value_and_grad(run, (0, 1)))(x, weight)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)
        assert not np.any(got[1][1][vocab:])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": jnp.zeros((5, 3))}, "are not"),
        ({"mask": jnp.ones(4)}, "shape of targets"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
    ],
)
def test_a_mistake_is_one_line(change, said):
    given = {
        "x": jnp.zeros((2, 3, 4)),
        "weight": jnp.zeros((5, 4)),
        "targets": jnp.zeros((2, 3), int),
    } | change
    with pytest.raises(ValueError, match=said):
        linear_cross_entropy(given.pop("x"), given.pop("weight"), given.pop("targets"), **given)
