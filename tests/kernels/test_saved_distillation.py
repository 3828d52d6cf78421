"""Linear + saved logits: with all of them a teacher beside the student, with some a coarser one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from test_linear_distillation import SHAPE, drawn

from pallas_kernels.loss.distilled import linear_distillation
from pallas_kernels.loss.likeliest import linear_likeliest
from pallas_kernels.loss.saved import linear_saved_distillation
from pallas_kernels.loss.student import Head


class Case(NamedTuple):
    top: int = 4
    temperature: float = 1.0
    share: float = 0.5
    scale: float = 1.0
    softcap: float | None = None
    chunk_logits: int = 2**26
    vocab: int = SHAPE["v"]
    devices: int = 1


CASES = {
    "warm": Case(temperature=2.0, share=0.3),
    "all of the teacher, chunks that do not divide": Case(1, 3.0, 1.0, chunk_logits=100),
    "shaped, padded": Case(5, 1.0, 0.7, scale=0.5, softcap=1.5, vocab=10),
    "split, padded, in chunks": Case(3, 2.0, 0.4, chunk_logits=90, vocab=9, devices=2),
}


def on_devices(case: Case, function: Any, arrays: tuple, split: set[int], outputs: int) -> Any:
    """Calls `function(axis_name, *arrays)`, with the arrays of these numbers split by rows."""
    if case.devices == 1:
        return function((), *arrays)
    mesh = jax.make_mesh((case.devices,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = tuple(P("tensor") if at in split else P() for at in range(len(arrays)))
    region = jax.shard_map(
        lambda *given: function(("tensor",), *given),
        mesh=mesh,
        in_specs=specs,
        out_specs=(P(),) * outputs,
        check_vma=False,
    )
    return region(*arrays)


def likeliest(case: Case, teacher, table):
    def local(axis_name, teacher, table):
        return linear_likeliest(
            Head(teacher, table),
            top=case.top,
            temperature=case.temperature,
            vocab=case.vocab,
            axis_name=axis_name,
            chunk_logits=case.chunk_logits,
        )

    return on_devices(case, local, (teacher, table), {1}, 2)


def ours(case: Case, x, weight, ids, logs, targets, mask):
    def local(axis_name, x, weight, ids, logs, targets, mask):
        return linear_saved_distillation(
            Head(x, weight, case.scale, case.softcap),
            ids,
            logs,
            targets,
            mask_bt=mask,
            temperature=case.temperature,
            share=case.share,
            axis_name=axis_name,
            vocab=case.vocab,
            chunk_logits=case.chunk_logits,
        )

    return on_devices(case, local, (x, weight, ids, logs, targets, mask), {1}, 2)


def logits_of(case: Case, x, weight):
    """The student's logits of the rows that count."""
    z = case.scale * jnp.einsum("bte,ve->btv", x, weight)
    z = z if case.softcap is None else case.softcap * jnp.tanh(z / case.softcap)
    return z[..., : case.vocab]


def definition(case: Case, x, weight, ids, logs, targets, mask):
    """The sums of cross-entropy and of T^2 KL over top + 1 outcomes, as optax defines both."""
    logits = logits_of(case, x, weight)
    hard = optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets)
    q = jax.nn.softmax(logits / case.temperature)
    named = jnp.take_along_axis(q, ids, -1)
    outcomes = jnp.concatenate([named, 1 - named.sum(-1, keepdims=True)], -1)
    kl = optax.losses.kl_divergence(jnp.log(outcomes), jnp.exp(logs))
    return jnp.sum(mask * hard), jnp.sum(mask * case.temperature**2 * kl)


def with_gradients(function, x, weight):
    """(losses, gradients by x and weight) of `function`, which returns (scalar, losses)."""
    found = jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))(x, weight)
    (_, losses), gradients = found
    return np.array(losses), gradients


def assert_close(found, wanted, factor: float) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        atol = 3e-5 * factor * np.max(np.abs(theirs))
        np.testing.assert_allclose(mine, factor * theirs, atol=atol)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_saved_and_losses_and_gradients_are_those_of_the_definition(case):
    x, weight, teacher, table, targets, mask = drawn(case)
    ids, logs = jax.jit(lambda *given: likeliest(case, *given))(teacher, table)
    said = jax.nn.log_softmax(teacher @ table.T[:, : case.vocab] / case.temperature)
    order = np.argsort(-said, -1)[..., : case.top]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(logs[..., :-1], np.take_along_axis(said, order, -1), atol=2e-6)
    np.testing.assert_allclose(np.exp(logs).sum(-1), 1, rtol=2e-6)

    x_with_nan = jnp.where(mask[..., None] != 0, x, jnp.nan)  # which counts nothing

    def minimised(x, weight):
        hard, soft = definition(case, x, weight, ids, logs, targets, mask)
        return (1 - case.share) * hard + case.share * soft, (hard, soft)

    def computed(x, weight):
        loss, distilled = ours(case, x, weight, ids, logs + 0.5, targets, mask)
        return 3 * loss, (loss, distilled)

    want, wanted = with_gradients(minimised, x, weight)
    got, found = with_gradients(computed, x_with_nan, weight)
    np.testing.assert_allclose(got, want, rtol=5e-6)
    assert_close(found, wanted, 3)


def test_with_the_whole_vocabulary_saved_it_is_the_teacher_beside_the_student():
    case = Case(top=10, temperature=2.0, share=0.4, softcap=1.5, vocab=10)
    x, weight, teacher, table, targets, mask = drawn(case)
    ids, logs = likeliest(case, teacher, table)
    assert np.isneginf(logs[..., -1]).all(), "nothing is left for the rest"

    def beside(x, weight):
        options = {"temperature": case.temperature, "share": case.share, "vocab": case.vocab}
        student = Head(x, weight, softcap=case.softcap)
        found = linear_distillation(student, Head(teacher, table), targets, mask_bt=mask, **options)
        return found[0], found

    def saved(x, weight):
        found = ours(case, x, weight, ids, logs, targets, mask)
        return found[0], found

    want, wanted = with_gradients(beside, x, weight)
    got, found = with_gradients(saved, x, weight)
    np.testing.assert_allclose(got, want, rtol=2e-6)
    assert_close(found, wanted, 1)


@pytest.mark.parametrize("top", [1, 4, SHAPE["v"]])
def test_a_student_that_is_the_teacher_has_no_loss_and_no_gradient(top):
    case = Case(top=top, temperature=2.0, share=1.0, chunk_logits=100)
    x, weight, *_, targets, mask = drawn(case)
    ids, logs = likeliest(case, x, weight)

    def distilled(x, weight):
        loss, soft = ours(case, x, weight, ids, logs, targets, mask)
        return loss, (loss, soft)

    (loss, soft), gradients = with_gradients(distilled, x, weight)
    assert abs(soft) <= 1e-6 * loss
    # Of another teacher they are above 1.
    assert max(np.abs(gradient).max() for gradient in gradients) <= 1e-5


@jax.jit
def divergences(student, teacher):
    """(over the whole vocabulary, over the k likeliest tokens and the rest for each k) of a token.

    The table is the identity, so that hidden states are logits.
    """
    logs = jax.nn.log_softmax(teacher)
    ids = jnp.argsort(-logs)
    whole = jnp.sum(jnp.exp(logs) * (logs - jax.nn.log_softmax(student)))
    found = []
    for k in range(1, logs.size + 1):
        rest = jnp.where(k < logs.size, jnp.log(jnp.sum(jnp.exp(logs[ids[k:]]))), -jnp.inf)
        said = jnp.concatenate([logs[ids[:k]], rest[None]])
        _, kl = linear_saved_distillation(
            Head(student[None, None], jnp.eye(logs.size)),
            ids[None, None, :k],
            said[None, None],
            jnp.zeros((1, 1), jnp.int32),
            mask_bt=jnp.ones((1, 1)),
            temperature=1.0,
            share=1.0,
        )
        found.append(kl)
    return whole, jnp.stack(found)


LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=5, max_size=5)


@given(LOGITS, LOGITS)
@settings(max_examples=200, deadline=None)
def test_more_saved_tokens_tell_more_and_never_more_than_all(student, teacher):
    """Joining outcomes loses information: the divergence rises with k up to that of all tokens."""
    whole, of_top = divergences(jnp.float32(student), jnp.float32(teacher))
    steps = np.array([0.0, *of_top, whole])
    assert (np.diff(steps) >= -2e-5 * (1 + abs(float(whole)))).all()
    np.testing.assert_allclose(of_top[-1], whole, rtol=1e-5, atol=1e-5)
