"""Sums with error feedback: what is sent and what is kept add up to what was given, every device
has the same bits, and the bytes do not grow with the devices.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmdtrain.compiled import hlo
from spmdtrain.parallel.feedback.feedback_sums import Feedback, feedback_sums
from spmdtrain.parallel.feedback.largest import Largest
from spmdtrain.parallel.feedback.low_rank import LowRank, orthonormal, pays

WAYS = 4
LOW_RANK = LowRank(rank=2, apart=1, row=1)  # of [layers, columns, rows, columns]
LARGEST = Largest(0.1)
CODECS = {"lowrank": LOW_RANK, "topk": LARGEST}
SHAPE = (2, 3, 8, 4)
PATH = "weight"
WHOLE = P()


def mesh_of(data, tensor=1):
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=auto)


def exchange(codec, data=WAYS, tensor=1, spec=WHOLE):
    """Jits `(gradients [data, *shape], errors, factors)` -> (sums of each device, the same two)."""

    def local(x, errors, factors):
        kept = Feedback({PATH: errors}, {PATH: factors} if factors is not None else {})
        codecs, specs = {PATH: codec}, {PATH: spec}
        sums, left = feedback_sums({PATH: x[0]}, kept, codecs, specs, ("data",))
        return sums[PATH][None], left.errors[PATH], left.factors.get(PATH)

    region = jax.shard_map(
        local,
        mesh=mesh_of(data, tensor),
        in_specs=(P("data"), P("data"), P()),
        out_specs=(P("data"), P("data"), P()),
        axis_names={"data"},
        check_vma=False,
    )
    return jax.jit(region)


def first_of(codec, shape=SHAPE):
    return codec.first_factor(shape, PATH) if isinstance(codec, LowRank) else None


def drawn(*shape):
    return np.random.default_rng(3).normal(size=shape).astype("f4")


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_what_is_sent_and_what_is_kept_add_up_to_the_gradients(codec):
    gradients = drawn(5, WAYS, *SHAPE)
    run, errors, factors = exchange(codec), np.zeros((WAYS, *SHAPE), "f4"), first_of(codec)
    total = np.zeros(SHAPE)
    for each in gradients:
        sums, errors, factors = run(each, errors, factors)
        assert all(np.array_equal(sums[0], other) for other in sums), "devices differ"
        total += np.asarray(sums[0], "f8")
    want = gradients.astype("f8").sum((0, 1))
    assert np.abs(total - want).max() > 0.1, "nothing was kept"
    np.testing.assert_allclose(total + np.asarray(errors, "f8").sum(0), want, atol=2e-5)


def test_a_low_rank_sum_depends_on_the_sum_alone_and_on_no_layout():
    """Two data shards have together what four have; `tensor` splits rows, or columns."""
    split = drawn(3, WAYS, *SHAPE)
    whole = split.reshape(3, 2, WAYS // 2, *SHAPE).sum(2)
    rows, columns = P(None, None, "tensor"), P(None, None, None, "tensor")
    ways = [(split, 4, 1, WHOLE), (whole, 2, 1, WHOLE), (whole, 2, 2, rows), (split, 4, 2, columns)]
    found = []
    for gradients, data, tensor, spec in ways:
        run = exchange(LOW_RANK, data, tensor, spec)
        errors, factors, sums = np.zeros((data, *SHAPE), "f4"), first_of(LOW_RANK), None
        for each in gradients:
            sums, errors, factors = run(each, errors, factors)
        found.append((sums[0], np.asarray(errors).sum(0), factors))
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            np.testing.assert_allclose(got, want, atol=3e-5)


def test_the_low_rank_sum_of_matrices_of_lower_rank_is_exact_and_outlives_zeros():
    column, row = drawn(WAYS, 2, 8), drawn(2, 12)
    gradients = np.einsum("nlr,lc->nlcr", column, row).reshape(WAYS, *SHAPE[:2], 4, 8)
    gradients = np.swapaxes(gradients, -1, -2)
    run, errors, first = exchange(LOW_RANK), np.zeros((WAYS, *SHAPE), "f4"), first_of(LOW_RANK)
    sums, errors, factors = run(np.zeros_like(gradients), errors, first)
    assert not np.any(sums) and np.array_equal(factors, first)
    sums, errors, factors = run(gradients, errors, factors)
    np.testing.assert_allclose(sums[0], gradients.sum(0), atol=2e-5)
    # One column is enough, so that the other one says nothing and stays.
    assert np.array_equal(factors[..., 1], first[..., 1])
    assert not np.array_equal(factors[..., 0], first[..., 0])


def test_the_columns_of_a_base_are_of_length_one_and_at_right_angles():
    x = drawn(3, 40, 4)
    x[1, :, 2] = x[1, :, 0] - 2 * x[1, :, 1]
    base = np.asarray(orthonormal(jnp.asarray(x)), "f8")
    products = np.einsum("amr,ams->ars", base, base)
    want = np.stack([np.eye(4)] * 3)
    want[1, 2, 2] = 0
    np.testing.assert_allclose(products, want, atol=1e-6)


def test_the_largest_numbers_are_summed_exactly_where_few_are_not_zero():
    x = np.zeros((WAYS, *SHAPE), "f4")
    x.reshape(WAYS, -1)[:, 5::48] = [[1.5], [-2.0], [8.0], [0.25]]
    sums, errors, _ = exchange(LARGEST)(x, np.zeros_like(x), None)
    assert np.array_equal(sums[0], x.sum(0)) and not np.any(errors)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_reaches_every_device(codec, bad):
    x = drawn(WAYS, *SHAPE)
    x[2, 1, 2, 5, 3] = bad
    sums, _, _ = exchange(codec)(x, np.zeros_like(x), first_of(codec))
    assert not np.isfinite(np.asarray(sums)[:, 1, 2, 5, 3]).any()


@pytest.mark.parametrize(
    ("codec", "share"),
    [(LowRank(4, apart=0, row=0), 0.00195), (Largest(0.01), 0.01)],
    ids=CODECS,
)
def test_the_bytes_are_a_small_share_whatever_the_number_of_devices(codec, share):
    shape = (4096, 4096)
    for data in (2, 4, 8):
        x = jax.ShapeDtypeStruct((data, *shape), jnp.float32)
        factors = jax.eval_shape(lambda: first_of(codec, shape))
        text = exchange(codec, data).lower(x, x, factors).compile().as_text()
        sent = sum(each["sent"] for each in hlo.traffic(text, {"data": data, "tensor": 1}))
        in_float32 = 2 * (data - 1) / data * 4 * math.prod(shape)
        assert sent / in_float32 == pytest.approx(share, rel=0.02)


def test_factors_with_more_numbers_than_their_matrix_do_not_pay():
    assert pays((4096, 4096), 0, 4) and pays((32, 4, 8), 0, 4)
    assert not pays((32, 4), 0, 4) and not pays((1, 4096), 0, 4)
