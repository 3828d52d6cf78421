"""[distill]: loss and gradients are those of the definition, on any mesh, and the teacher stays."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches_of, described_run, mesh_of, tiny

from spmdtrain.data.saved_logits.manifest import read_manifest, rows_of
from spmdtrain.data.saved_logits.reader import IDS, LOGS, SavedLogits
from spmdtrain.running.distillation.write_logits import write_logits
from spmdtrain.running.save_state import save
from spmdtrain.train.compared.in_order import placed_arrays, plain_arrays
from spmdtrain.train.distillation.run_teacher import with_opened
from spmdtrain.train.fresh import init_state
from spmdtrain.train.setup import Setup
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
    its = setup.own["teacher"].setup
    return with_opened(setup, Held(its, weights_of(*teacher)))


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
    found, sums = find(params, state.step, first_batch(setup), None, state.items)
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


# --- saved logits ---------------------------------------------------------------------------------


@cache
def text() -> tuple[str, ...]:
    """Settings of a small corpus of documents with 33 characters, whose windows do not move."""
    folder = Path(tempfile.mkdtemp())
    random = np.random.default_rng(0)
    for number, size in enumerate((150, 40, 90, 200)):
        characters = [*range(33), *random.integers(0, 33, size)]
        folder.joinpath(f"{number}.txt").write_text("".join(chr(65 + each) for each in characters))
    data = ("data.corpus=text", f"data.path={folder}/*.txt", "data.tokenizer=characters")
    return (*data, "data.shuffle=false")


@cache
def run_of_teacher() -> Path:
    setup = shard(tiny(*TEACHER), devices=jax.devices()[:1])
    params = placed_arrays(setup, weights_of(*TEACHER))
    run = Path(tempfile.mkdtemp()) / "teacher"
    save(setup, replace(init_state(setup), params=params), run)
    return run


@cache
def saved(top: int, *mesh: str) -> Path:
    """The folder of what the teacher says, written on a mesh."""
    folder = Path(tempfile.mkdtemp())
    config = tiny(*STUDENT, *text(), *HOW, f"distill.teacher={run_of_teacher()}", *mesh)
    write_logits(config, folder, top=top, devices=jax.devices()[: mesh_of(mesh)])
    return folder


@cache
def gradients_beside(top: int, *settings: str):
    """(sums over the first batch, gradients in the order of the layers) with saved logits."""
    config = tiny(*STUDENT, *text(), *HOW, f"distill.logits={saved(top)}", *settings)
    setup = shard(config, devices=jax.devices()[: mesh_of(settings)])
    params = placed_arrays(setup, weights_of(*STUDENT))
    step = jax.device_put(np.int32(0), setup.state.step.sharding)
    found, sums = jax.jit(make_gradients(setup))(params, step, first_batch(setup))
    return jax.device_get(sums), plain_arrays(setup, found)


def assert_alike(got, want, tolerance: float) -> None:
    """Both losses and all gradients."""
    for name in ("loss", "distill_loss"):
        np.testing.assert_allclose(got[0][name], want[0][name], rtol=tolerance)
    for path, gradient in want[1].items():
        most = np.abs(gradient).max()
        np.testing.assert_allclose(got[1][path], gradient, atol=2 * tolerance * most, err_msg=path)


@pytest.mark.long
def test_with_all_of_the_vocabulary_saved_it_is_the_teacher_on_the_mesh():
    """To the rounding of float16, in which a log-probability of 4 is off by 0.1 %."""
    assert_alike(gradients_beside(33), gradients(*HOW, *text()), 1e-3)


SAVED_MESHES = {
    "pipeline, data, tensor": (
        *("mesh.pipeline=2", "mesh.data=2", "mesh.tensor=2"),
        "train.microbatch=2",
    ),
    "context, fsdp, tensor": ("mesh.context=2", "mesh.fsdp=2", "mesh.tensor=2"),
}


@pytest.mark.long
@pytest.mark.parametrize("mesh", SAVED_MESHES.values(), ids=SAVED_MESHES)
def test_beside_saved_logits_any_mesh_computes_what_one_device_does(mesh):
    want = gradients_beside(4)
    assert want[0]["distill_loss"] > 0.05 * want[0]["loss"], "the teacher is of another opinion"
    assert_alike(gradients_beside(4, *mesh), want, 1e-5)


@pytest.mark.long
def test_any_mesh_saves_what_one_device_does():
    """Over a ring the tokens are in another order, and tensor has the likeliest of its rows."""
    here, there = (
        SavedLogits(manifest, *rows_of(folder, manifest))
        for folder, manifest in map(
            read_manifest,
            map(str, (saved(4), saved(4, "mesh.context=2", "mesh.tensor=2", "mesh.data=2"))),
        )
    )
    want, got = (each.read(0, here.manifest.tokens) for each in (here, there))
    np.testing.assert_allclose(got[LOGS], want[LOGS], rtol=2e-3)
    # Where two tokens are nearly as likely, rounding orders them.
    assert (got[IDS] == want[IDS]).mean() > 0.99
    assert replace(there.manifest, ids="", logs="") == replace(here.manifest, ids="", logs="")


ISLANDS = ("islands.count=2", "islands.index=1", "islands.directory=unread", "islands.every=2")


@pytest.mark.long
@pytest.mark.parametrize("island", [(), ISLANDS], ids=["alone", "an island"])
def test_the_rows_of_a_shard_have_what_was_said_of_their_own_tokens(island):
    """The second batch, in microbatches over two shards: windows of 8 tokens, in order."""
    cut = ("mesh.data=2", "train.microbatch=2", "train.global_batch=8")
    folder = saved(4)
    config = tiny(*STUDENT, *text(), *HOW, f"distill.logits={folder}", *cut, *island)
    setup = shard(config, devices=jax.devices()[:2])
    with batches_of(setup) as ahead:
        next(ahead)
        batch = jax.device_get(next(ahead))
    said = SavedLogits(manifest := read_manifest(str(folder))[1], *rows_of(folder, manifest))
    first, apart = (17, 2) if island else (8, 1)
    assert sorted(batch["sample"].ravel()) == [*range(first, first + 8 * apart, apart)]
    for at in np.ndindex(batch["sample"].shape):
        start = 8 * int(batch["sample"][at])
        for name, x in said.read(start, start + 8).items():
            np.testing.assert_array_equal(batch[name][at], x)
