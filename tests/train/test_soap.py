"""SOAP: Adam in bases that follow the eigenvectors of Shampoo's factors, refreshed in few steps."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, mesh_of, prepared, tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.config import CheckpointError
from spmdtrain.config.schema import AdamW, Soap
from spmdtrain.models.abstract import Parameter
from spmdtrain.planner.cost import memory
from spmdtrain.planner.cost.workload import workload_of
from spmdtrain.planner.own_model import with_traced_optimizer_state
from spmdtrain.running import loop
from spmdtrain.train import state as train_state
from spmdtrain.train.updates import optimizers, transformations
from spmdtrain.train.updates.shipped_optimizers import make_optimizer, shipped_update_rules
from spmdtrain.train.updates.transformations.orthogonal import orthogonal_part
from spmdtrain.train.updates.transformations.small_moments import Few
from spmdtrain.train.updates.transformations.soap import LEAST, BasisSettings, SoapState, soap

SHAPES = {
    "blocks.layer.up": Parameter((2, 4, 5), ("layer", "embed", "ffn")),
    "blocks.layer.out": Parameter((2, 2, 3, 4), ("layer", "kv_heads", None, "embed")),
    "blocks.layer.experts": Parameter((1, 2, 4, 3), ("layer", "experts", "embed", "ffn")),
    "blocks.layer.scale": Parameter((2, 4), ("layer", "norm")),
    "tokens.table": Parameter((7, 4), ("vocab", "embed")),
}


def draw(seed: int, shapes=SHAPES) -> dict[str, jax.Array]:
    numbers = np.random.default_rng(seed)
    return {path: jnp.float32(numbers.normal(size=each.shape)) for path, each in shapes.items()}


def updates_of(config, steps: int, shapes=SHAPES) -> list[dict[str, jax.Array]]:
    """The updates of each step, with the gradients `draw(1)`, `draw(2)` and so on."""
    rules = shipped_update_rules(config, shapes)
    values = draw(0, shapes)
    state = optimizers.init(rules, shapes, values)
    take = jax.jit(lambda given, state: optimizers.updates(rules, shapes, given, state, values))
    found = []
    for step in range(steps):
        update, state = take(draw(step + 1, shapes), state)
        found.append(update)
    return found


def of_the_paper(config: Soap, gradients: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The updates of one matrix by Algorithm 3 of the paper, in float64.

    The momentum stays in the space of the weights, as there. What is ours: Adam's corrections of
    the first steps, and LEAST.
    """
    sizes = gradients[0].shape
    factors = [np.zeros((n, n)) for n in sizes]
    bases = [np.eye(n) for n in sizes]
    momentum, squares = np.zeros(sizes), np.zeros(sizes)
    for step, g in enumerate(gradients):
        p, q = bases
        momentum = config.beta1 * momentum + (1 - config.beta1) * g
        squares = config.beta2 * squares + (1 - config.beta2) * (p.T @ g @ q) ** 2
        m_hat = p.T @ momentum @ q / (1 - config.beta1 ** (step + 1))
        v_hat = squares / (1 - config.beta2 ** (step + 1))
        yield p @ (m_hat / (v_hat**0.5 + config.epsilon)) @ q.T
        for side, product in enumerate((g @ g.T, g.T @ g)):
            kept = config.basis_beta
            factors[side] = kept * factors[side] + (1 - kept) * product
            if step % config.basis_every == 0 and sizes[side] <= config.basis_largest:
                least = LEAST * np.diag(factors[side]).mean() * np.eye(sizes[side])
                bases[side] = np.linalg.qr((factors[side] + least) @ bases[side])[0]


def as_matrix(path: str, layer: np.ndarray) -> np.ndarray:
    """Of a layer's tensor: the residual stream by all else."""
    return layer.reshape(6, 4).T if path.endswith("out") else layer


@pytest.mark.seconds
@pytest.mark.parametrize("largest", [5, 100])
def test_updates_are_those_of_the_paper_layer_by_layer(largest):
    """With a side of 6 that has no basis, and with one; the bases change after steps 1, 4 and 7."""
    config = Soap(basis_every=3, basis_largest=largest, weight_decay=0.3)
    got = updates_of(config, 9)
    for path in ("blocks.layer.up", "blocks.layer.out", "blocks.layer.experts"):
        each_layer = np.ndindex(SHAPES[path].shape[: SHAPES[path].apart])
        for layer in each_layer:
            drawn = [np.float64(draw(step)[path][layer]) for step in range(10)]
            weights, *gradients = [as_matrix(path, x) for x in drawn]
            for step, want in enumerate(of_the_paper(config, gradients)):
                found = as_matrix(path, np.asarray(got[step][path][layer]))
                np.testing.assert_allclose(
                    found, want + 0.3 * weights, atol=1e-4, err_msg=f"{path} {step}"
                )


def test_without_bases_it_is_adamw_to_the_bit_and_so_are_tables_norms_and_first_steps():
    """The bases of the first step are identities."""
    adamw = updates_of(AdamW(beta1=0.95, weight_decay=0.3), 5)
    without = updates_of(Soap(basis_largest=1, weight_decay=0.3), 5)
    full = updates_of(Soap(weight_decay=0.3), 5)
    assert_same_bits(without, adamw)
    assert_same_bits(full[0], adamw[0])
    for path in ("blocks.layer.scale", "tokens.table"):
        assert_same_bits(full[4][path], adamw[4][path])
    off = full[4]["blocks.layer.up"] - adamw[4]["blocks.layer.up"]
    assert np.abs(off).max() > 0.1, "the test could not tell the two apart"


def orthogonal(seed: int, size: int) -> jax.Array:
    return jnp.float32(np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0])


@pytest.mark.parametrize("rank", [5, 2])
def test_turned_gradients_have_turned_updates(rank):
    """SOAP knows no axes but those that its bases begin with: with gradients U G V^T and bases that
    begin at U and V, updates are U (those of G) V^T, through three refreshes. Adam's are not.
    """
    left, right = orthogonal(1, 5), orthogonal(2, 7)
    rule = soap(optax.scale_by_adam(0.9, 0.95), BasisSettings(every=3, beta=0.9, largest=10))
    state = rule.init(jnp.zeros((5, 7)))
    turned = state._replace(
        rows=state.rows._replace(vectors=left.ravel()),
        columns=state.columns._replace(vectors=right.ravel()),
    )
    update = jax.jit(rule.update)
    numbers = np.random.default_rng(3)
    for _ in range(8):
        g = jnp.float32(numbers.normal(size=(5, rank)) @ numbers.normal(size=(rank, 7)))
        plain, state = update(g, state)
        found, turned = update(left @ g @ right.T, turned)
        np.testing.assert_allclose(found, left @ plain @ right.T, atol=2e-3)
    assert np.abs(state.rows.vectors - jnp.eye(5).ravel()).max() > 0.1


def test_bases_become_eigenvectors_and_stay_orthogonal():
    """Of a factor with eigenvalues 1, 1/4, 1/16 and so on, which then is diagonal in its basis."""
    left, right = orthogonal(1, 5), orthogonal(2, 7)
    g = left @ (jnp.eye(5, 7) * 0.5 ** jnp.arange(5)[:, None]) @ right.T
    rule = soap(optax.scale_by_adam(0.9, 0.95), BasisSettings(every=1, beta=0.9, largest=10))
    state = rule.init(g)
    update = jax.jit(rule.update)
    for _ in range(20):
        _, state = update(g, state)
    for side, n in ((state.rows, 5), (state.columns, 7)):
        factor, basis = side.factor.reshape(n, n), side.vectors.reshape(n, n)
        np.testing.assert_allclose(basis.T @ basis, np.eye(n), atol=1e-5)
        inside = basis.T @ factor @ basis / factor.trace()
        assert np.abs(inside - jnp.diag(jnp.diagonal(inside))).max() < 1e-4


def test_gradients_of_zero_leave_the_bases_where_they_are():
    """A frozen layer has them, and an expert without tokens."""
    rule = soap(optax.scale_by_adam(), BasisSettings(every=1, beta=0.9, largest=10))
    state = rule.init(jnp.zeros((3, 4)))
    for _ in range(3):
        update, state = rule.update(jnp.zeros((3, 4)), state)
    assert not np.any(update)
    np.testing.assert_allclose(state.rows.vectors, jnp.eye(3).ravel(), atol=1e-6)


def test_the_qr_of_layers_and_experts_runs_in_the_steps_that_refresh_alone(monkeypatch):
    """Under vmap a `lax.cond` would be a choice between results, and a QR part of each step."""
    seen = []

    def counted(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: seen.append(1))
        return orthogonal_part(x)

    monkeypatch.setattr(transformations.soap, "orthogonal_part", counted)
    rules = shipped_update_rules(Soap(basis_every=3), SHAPES)
    state = optimizers.init(rules, SHAPES, draw(0))
    take = jax.jit(lambda given, state: optimizers.updates(rules, SHAPES, given, state, given)[1])
    ran = []
    for step in range(7):
        seen.clear()
        state = take(draw(step), state)
        jax.effects_barrier()
        ran.append(bool(seen))
    assert ran == [True, False, False, True, False, False, True]


def test_no_call_of_lapack_has_a_stack():
    """Several of them, of several weights, would wait for each other's threads for ever."""
    rules = shipped_update_rules(Soap(), SHAPES)
    state = optimizers.init(rules, SHAPES, draw(0))
    step = jax.jit(lambda given, state: optimizers.updates(rules, SHAPES, given, state, given))
    calls = re.findall(
        r"@lapack_sgeqrf_ffi.*? : \(tensor<([^>]*)>", step.lower(draw(1), state).as_text()
    )
    assert sorted(set(calls)) == ["3x3xf32", "4x4xf32", "5x5xf32", "6x6xf32"]


@pytest.mark.seconds
def test_a_callers_function_may_choose_it():
    """As any transformation that sees a tensor of a layer, by the same trial."""
    layout = prepared().model.stage_layout
    out = {"blocks.layer.out": SHAPES["blocks.layer.out"]}
    chosen = optimizers.choose_update_rules(make_optimizer(Soap()), out, layout)
    assert chosen["blocks.layer.out"].together is None


@pytest.mark.seconds
def test_moments_of_8_bits_are_near_those_of_float32():
    shapes = {"w": Parameter((2, 16, 32), ("layer", "embed", "ffn"))}
    rules = shipped_update_rules(Soap(moment_dtype="8bit"), shapes)
    state = jax.eval_shape(lambda: optimizers.init(rules, shapes, draw(0, shapes)))
    (found,) = [x for x in jax.tree.leaves(state, is_leaf=is_soap) if is_soap(x)]
    assert isinstance(found.adam.mu, Few) and found.rows.vectors.dtype == jnp.float32
    few, wide = (updates_of(Soap(moment_dtype=kind), 4, shapes) for kind in ("8bit", "params"))
    off = np.linalg.norm(few[3]["w"] - wide[3]["w"]) / np.linalg.norm(wide[3]["w"])
    assert 0 < off < 0.1


def is_soap(x: Any) -> bool:
    return isinstance(x, SoapState)


# On meshes


@pytest.mark.seconds
def test_split_gradients_and_states_have_the_updates_of_whole_ones(monkeypatch):
    """Layers over two axes, experts over one, and dims of a matrix over two; without a model."""
    monkeypatch.setattr(train_state, "LONG", 16)  # factors of 4 rows are split as well
    axes = ("pipeline", "fsdp", "tensor")
    mesh = jax.make_mesh((2, 2, 2), axes, (jax.sharding.AxisType.Auto,) * 3)
    shapes = {
        "up": Parameter((2, 4, 8), ("layer", "embed", "ffn")),
        "out": Parameter((2, 2, 4, 4), ("layer", "kv_heads", None, "embed")),
        "experts": Parameter((1, 2, 4, 6), ("layer", "experts", "embed", "ffn")),
    }
    specs = {
        "up": P("pipeline", "fsdp", "tensor"),
        "out": P(None, "tensor", None, "fsdp"),
        "experts": P(None, "pipeline", ("fsdp", "tensor")),
    }
    rules = shipped_update_rules(Soap(basis_every=2), shapes)

    def split(path: str, x: jax.Array) -> jax.Array:
        shape, apart = shapes[path].shape, shapes[path].apart
        spec = train_state.spec_beside(x.shape, shape, apart, specs[path], mesh.shape)
        return jax.device_put(x, NamedSharding(mesh, spec))

    @jax.jit
    def take(given: Any, state: Any) -> Any:
        return optimizers.updates(rules, shapes, given, state, given)

    whole = optimizers.init(rules, shapes, draw(0, shapes))
    parts = {path: jax.tree.map(partial(split, path), tree) for path, tree in whole.items()}
    rows = parts["up"][0].rows.vectors
    assert rows.sharding.shard_shape(rows.shape) == (1, 4)
    for step in range(4):
        given = draw(step + 1, shapes)
        want, whole = take(given, whole)
        got, parts = take({path: split(path, x) for path, x in given.items()}, parts)
        for path in shapes:
            np.testing.assert_allclose(got[path], want[path], atol=1e-4, err_msg=path)


@pytest.mark.long
@pytest.mark.usefixtures("shared_programs")
def test_a_resumed_run_has_the_bits_of_the_run_and_keeps_its_bases(tmp_path, monkeypatch):
    """Stopped between two refreshes, on a mesh that splits the factors."""
    monkeypatch.setattr(train_state, "LONG", 256)
    settings = (
        *("optimizer.name=soap", "optimizer.basis_every=3", "train.steps=5", "checkpoint.every=1"),
        *("checkpoint.keep=9", "model.embed=16", "model.heads=2", "model.layers=1"),
        *("mesh.fsdp=2", "train.global_batch=4", "train.sequence_length=8"),
    )
    setup = prepared(*settings)
    devices = jax.devices()[: mesh_of(settings)]

    def last(run, step=None):
        loop.run(tiny(*settings), run, devices=devices, step=step)
        return Checkpoints(run, setup, keep=None).restore(5, setup.state)[0]

    whole = last(tmp_path)
    states = [x for x in jax.tree.leaves(whole.opt_state, is_leaf=is_soap) if is_soap(x)]
    assert {x.rows.vectors.addressable_shards[0].data.size for x in states} == {16 * 16 / 2}
    assert_same_bits(last(tmp_path, step=2), whole)
    with pytest.raises(CheckpointError, match="asked optimizer.basis_largest=16"):
        loop.run(tiny(*settings, "optimizer.basis_largest=16"), tmp_path, devices=devices)


# What it costs


@pytest.mark.parametrize(
    "mesh", [(), ("mesh.data=2", "mesh.fsdp=4", "mesh.tensor=2", "train.zero=1")]
)
def test_the_planner_counts_factors_and_bases_which_a_mesh_splits(mesh):
    """Beside the two moments: of a square matrix four times its size, and more of others."""
    config = tiny("optimizer.name=soap", "model.embed=512", "model.ffn=2048", *mesh)
    alone = tiny("optimizer.name=soap", "model.embed=512", "model.ffn=2048")
    sizes = dict(config.mesh.sizes)
    exact = memory.exact_state(config, sizes)
    moments = with_traced_optimizer_state(alone, workload_of(alone, dict(alone.mesh.sizes))).moments
    workload = dataclasses.replace(workload_of(config, sizes), moments=moments)
    assert memory.closed_form_state(workload) == pytest.approx(exact, rel=0.03)
    assert exact[1] > 6 * exact[0]
