"""Linear + distillation against its definition with all logits, also with a split vocabulary."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.loss.distilled import linear_distillation
from pallas_kernels.loss.student import Head

SHAPE = {"b": 2, "t": 6, "v": 12}


class Case(NamedTuple):
    temperature: float = 1.0
    share: float = 0.5
    scale: float = 1.0
    softcap: float | None = None
    chunk_logits: int = 2**26
    vocab: int = SHAPE["v"]
    devices: int = 1


CASES = {
    "warm": Case(temperature=2.0, share=0.3),
    "all of the teacher, chunks that do not divide": Case(3.0, 1.0, chunk_logits=100),
    "shaped, padded": Case(1.0, 0.7, scale=0.5, softcap=1.5, vocab=10),
    "split, padded, in chunks": Case(2.0, 0.4, chunk_logits=90, vocab=5, devices=2),
}


def drawn(case: Any) -> tuple[jax.Array, ...]:
    """Student, its table, teacher, its table, targets and mask."""
    random = np.random.default_rng(0)
    b, t, v = SHAPE.values()
    arrays = [random.normal(size=shape) for shape in ((b, t, 8), (v, 8), (b, t, 5), (v, 5))]
    targets_bt = random.integers(0, case.vocab, (b, t), np.int32)
    mask_bt = np.array(random.random((b, t)) > 0.3, np.float32)
    return *(jnp.float32(x) for x in arrays), jnp.asarray(targets_bt), jnp.asarray(mask_bt)


def definition(case: Case, x, weight, teacher, table, targets, mask) -> tuple[Any, Any]:
    """The sums of cross-entropy and of T^2 KL, as optax defines both."""

    def logits(x, table, scale=1.0, softcap=None):
        z = scale * jnp.einsum("bte,ve->btv", x, table)
        return (z if softcap is None else softcap * jnp.tanh(z / softcap))[..., : case.vocab]

    student = logits(x, weight, case.scale, case.softcap)
    heat = case.temperature
    soft = jax.nn.softmax(logits(teacher, table) / heat)
    hard = optax.losses.softmax_cross_entropy_with_integer_labels(student, targets)
    kl = optax.losses.kl_divergence(jax.nn.log_softmax(student / heat), soft)
    return jnp.sum(mask * hard), jnp.sum(mask * heat**2 * kl)


def ours(case: Case, x, weight, teacher, table, targets, mask, **more) -> tuple[Any, Any]:
    axis = ("tensor",) if case.devices > 1 else ()

    def local(x, weight, teacher, table, targets, mask):
        return linear_distillation(
            Head(x, weight, case.scale, case.softcap),
            Head(teacher, table),
            targets,
            mask_bt=mask,
            temperature=case.temperature,
            share=case.share,
            axis_name=axis,
            vocab=case.vocab,
            chunk_logits=case.chunk_logits,
            **more,
        )

    if not axis:
        return local(x, weight, teacher, table, targets, mask)
    mesh = jax.make_mesh((case.devices,), axis, axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P(), P(*axis), P(), P(*axis), P(), P())
    region = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return region(x, weight, teacher, table, targets, mask)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_both_losses_and_the_gradients_are_those_of_the_definition(case):
    x, weight, *others, mask = drawn(case)
    x_with_nan = jnp.where(mask[..., None] != 0, x, jnp.nan)  # which counts nothing

    def minimised(x, weight):
        hard, soft = definition(case, x, weight, *others, mask)
        return (1 - case.share) * hard + case.share * soft, (hard, soft)

    def computed(x, weight):
        loss, distilled = ours(case, x, weight, *others, mask)
        return 3 * loss, (loss, distilled)

    of = {"argnums": (0, 1), "has_aux": True}
    (_, want), wanted = jax.jit(jax.value_and_grad(minimised, **of))(x, weight)
    (_, got), found = jax.jit(jax.value_and_grad(computed, **of))(x_with_nan, weight)
    np.testing.assert_allclose(got, want, rtol=2e-6)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, 3 * theirs, atol=2e-5 * np.max(np.abs(theirs)))


def test_a_teacher_that_is_the_student_leaves_no_loss_and_no_gradient():
    case = Case(temperature=2.0, share=1.0, chunk_logits=100)
    x, weight, *_, targets, mask = drawn(case)

    def distilled(x, weight):
        loss, soft = ours(case, x, weight, x, weight, targets, mask)
        return loss, soft

    of = jax.value_and_grad(distilled, (0, 1), has_aux=True)
    (_, soft), gradients = jax.jit(of)(x, weight)
    assert soft == 0
    assert not any(np.any(gradient) for gradient in gradients)


def test_the_sums_of_parts_follow_the_whole_sum_and_move_no_gradient():
    case = Case(temperature=2.0)
    x, *others, mask = drawn(case)
    part_bn = jnp.float32([[1, 0], [0, 1]])

    def losses(x, mask, **more):
        found = ours(case, x, *others, mask, **more)
        return jnp.stack(found)

    together = losses(x, mask, part_bn=part_bn)
    alone = [losses(x, mask * part_bn[:, n : n + 1]) for n in range(2)]
    np.testing.assert_allclose(together[:, 1:].T, alone, rtol=1e-6)
    np.testing.assert_allclose(together[:, 0], losses(x, mask), rtol=1e-6)
    plain = jax.grad(lambda x: losses(x, mask)[0])(x)
    in_parts = jax.grad(lambda x: losses(x, mask, part_bn=part_bn)[0, 0])(x)
    np.testing.assert_array_equal(in_parts, plain)
