"""[distill]: loss and gradients are those of the definition, on any mesh, and the teacher stays."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches_of, described_run, mesh_of, tiny

from spmdtrain.train.compared.in_order import placed_arrays, plain_arrays
from spmdtrain.train.fresh import init_state
from spmdtrain.train.setup import Setup, Teacher
from spmdtrain.train.shard import shard
from spmdtrain.train.step import make_gradients

STUDENT = (
    *("model.embed=16", "model.heads=2", "model.vocab=33", "model.layers=2"),
    *("train.sequence_length=8", "train.global_batch=16", "data.packing=documents"),
)
# Another family, wider, with an odd number of rows: `tensor` pads them.
TEACHER = (
    *("model.name=llama", "model.embed=24", "model.heads=4", "model.kv_heads=2"),
    *("model.layers=3", "model.vocab=33", "train.sequence_length=8"),
)
LARGER = {STUDENT: 4, TEACHER: 10}
HOW = ("distill.temperature=2", "distill.share=0.4")
MESHES = {
    "data, fsdp, tensor, zero": (
        *("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
        *("train.zero=1", "train.microbatch=1"),
    ),
    "expert, context": ("mesh.expert=2", "mesh.context=2", "train.microbatch=2"),
    "collective matmuls": (
        *("mesh.context=2", "mesh.tensor=2", "mesh.collective_matmul=true"),
        "rules.activations.stream_time=context,tensor",
    ),
}


class Held:
    """Weights that a test holds, in place of those on disk."""

    def __init__(self, setup: Setup, plain: dict[str, np.ndarray]):
        self._setup, self._plain = setup, plain

    def read(self) -> dict[str, jax.Array]:
        return placed_arrays(self._setup, self._plain)

    def fingerprint(self) -> str:
        return "held"


@cache
def weights_of(*settings: str) -> dict[str, np.ndarray]:
    """The plain weights of a fresh model with larger matrices, so that a teacher is sure."""
    setup = shard(tiny(*settings), devices=jax.devices()[:1])
    plain = plain_arrays(setup, init_state(setup).params)
    return {path: LARGER[settings] * x if x.ndim > 1 else x for path, x in plain.items()}


def taught(*settings: str, teacher: tuple[str, ...] = TEACHER) -> Setup:
    """The setup of a run with the teacher of these settings, whose weights are at hand."""
    config = tiny(*STUDENT, f"distill.teacher={described_run(*teacher)}", *settings)
    setup = shard(config, devices=jax.devices()[: mesh_of(settings)])
    assert setup.teacher is not None
    its = setup.teacher.setup
    return replace(setup, teacher=Teacher(its, Held(its, weights_of(*teacher))))


def first_batch(setup: Setup) -> dict[str, jax.Array]:
    with batches_of(setup) as ahead:
        return next(ahead)


@cache
def gradients(*settings: str, teacher: tuple[str, ...] = TEACHER):
    """(sums over the first batch, gradients in the order of the layers)."""
    setup = taught(*settings, teacher=teacher)
    state = init_state(setup)
    find = jax.jit(make_gradients(setup))
    params = placed_arrays(setup, weights_of(*STUDENT))
    found, sums = find(params, state.step, first_batch(setup), None, state.items["teacher"])
    return jax.device_get(sums), plain_arrays(setup, found)


def logits_of(settings: tuple[str, ...], batch: dict[str, np.ndarray]):
    """(function of the weights at rest that gives the logits of a batch, fresh weights)."""
    setup = shard(tiny(*settings), devices=jax.devices()[:1])
    from spmdtrain.models.context import ForwardContext
    from spmdtrain.models.logits import logit_shape, logits_of

    def find(params):
        module = setup.model.bind(params)
        given = {name: jnp.asarray(batch[name][0]) for name in ("positions", "segment_ids")}
        ctx = ForwardContext(given["positions"], segment_ids_bt=given["segment_ids"])
        x_bte, _ = module.blocks(module.embed(jnp.asarray(batch["tokens"][0]), ctx), ctx)
        return logits_of(*module.head(x_bte, ctx), **logit_shape(setup.config.model))

    return find, placed_arrays(setup, weights_of(*settings))


def test_loss_and_gradients_are_those_of_the_definition():
    """The definition: optax's losses of all logits, of a batch with masked tokens."""
    setup = taught(*HOW)
    batch = jax.device_get(first_batch(setup))
    assert batch["mask"].min() == 0 < batch["mask"].max()
    student, params = logits_of(STUDENT, batch)
    teacher, its_params = logits_of(TEACHER, batch)
    p = jax.nn.softmax(teacher(its_params) / 2)

    def losses(params):
        logits, mask = student(params), batch["mask"][0]
        hard = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["targets"][0])
        soft = optax.losses.kl_divergence(jax.nn.log_softmax(logits / 2), p)
        hard, soft = (jnp.sum(mask * x) for x in (hard, 4 * soft))
        return (0.6 * hard + 0.4 * soft) / mask.sum(), (hard, soft)

    want, (hard, soft) = jax.jit(jax.grad(losses, has_aux=True))(params)
    sums, got = gradients(*HOW)
    np.testing.assert_allclose([sums["loss"], sums["distill_loss"]], [hard, soft], rtol=1e-5)
    assert soft > 0.1 * hard, "the teacher is of another opinion"
    for path, gradient in plain_arrays(
        shard(tiny(*STUDENT), devices=jax.devices()[:1]), want
    ).items():
        np.testing.assert_allclose(
            got[path], gradient, atol=2e-5 * np.abs(gradient).max(), err_msg=path
        )


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_any_mesh_computes_what_one_device_does(mesh):
    want_sums, want = gradients(*HOW)
    got_sums, got = gradients(*HOW, *mesh)
    for name in ("loss", "distill_loss"):
        np.testing.assert_allclose(got_sums[name], want_sums[name], rtol=1e-5)
    for path in want:
        most = np.abs(want[path]).max()
        np.testing.assert_allclose(got[path], want[path], atol=2e-5 * most, err_msg=path)


def test_a_teacher_that_is_the_student_teaches_nothing():
    """To rounding: on any compiler the two need not be computed alike."""
    alone = ("distill.temperature=2", "distill.share=1")
    sums, nothing = gradients(*alone, teacher=STUDENT)
    _, something = gradients(*HOW)
    assert sums["distill_loss"] <= 1e-5 * sums["loss"]
    for path, gradient in nothing.items():
        assert np.abs(gradient).max() <= 1e-5 * np.abs(something[path]).max(), path
