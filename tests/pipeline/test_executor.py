"""The executor on a small model of its own: any legal table, side losses, padding and all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from random_schedules import some_waiting_table

from spmdtrain.pipeline.executor import StageProgram, gradients, losses
from spmdtrain.pipeline.phases import rounds
from spmdtrain.pipeline.schedule import Table, build
from spmdtrain.pipeline.stage_layout import lay_out

WIDTH = 4


def embed(shared, context):
    return context @ shared["in"]


def layer(weights, x, rest):
    number, context = rest
    y = x + jnp.tanh(x @ weights["w"] + context.sum() * weights["b"]) * (1 + number)
    return y, 0.01 * jnp.sum(y**2)


def nowhere_at_zero(weights, x, rest):
    """The same layer, NaN and infinite gradients where a cell without work sees zeros."""
    y, side = layer(weights, x / jnp.sqrt(jnp.sum(x**2)), rest)
    return y, side


def head(shared, x, context):
    return jnp.sum((x @ shared["out"] - context) ** 2)


def head_nowhere_at_zero(shared, x, context):
    """The same head, NaN and infinite gradients where no microbatch leaves the last stage."""
    return head(shared, x / jnp.sqrt(jnp.sum(x**2)), context)


def problem(layers: int, microbatches: int):
    keys = iter(jax.random.split(jax.random.key(0), 5))
    normal = lambda *shape: 0.3 * jax.random.normal(next(keys), shape)  # noqa: E731
    stack = {"w": normal(layers, WIDTH, WIDTH), "b": normal(layers, WIDTH)}
    shared = {"in": normal(WIDTH, WIDTH), "out": normal(WIDTH, WIDTH)}
    return shared, stack, normal(microbatches, 2, WIDTH)


def reference(layer, shared, stack, batch, head=head):
    """(loss, side loss), gradients: layers in a Python loop, microbatches in another."""

    def objective(shared, stack):
        loss = side = 0.0
        for context in batch:
            x = embed(shared, context)
            for number in range(len(stack["b"])):
                x, more = layer(
                    jax.tree.map(lambda leaf, n=number: leaf[n], stack), x, (number, context)
                )
                side += more
            loss += head(shared, x, context)
        return loss + side, (loss, side)

    return jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(shared, stack)[::-1]


def piped(table: Table, layout, shared, stack, batch, layer=layer, keep=True, head=head):
    """The same by the executor, on as many devices as the table has stages."""
    mesh = Mesh(np.array(jax.devices()[: table.stages]), ("pipeline",))

    def by_name(weights, x, rest):
        y, side = layer(weights, x, rest)
        return y, {"side": side}

    def head_by_name(shared, x, context):
        return {"loss": head(shared, x, context)}

    program = StageProgram(embed, by_name, head_by_name, lambda microbatch: batch[microbatch])
    staged = jax.tree.map(layout.staged, stack)
    split = P(None, "pipeline")

    def local(shared, staged):
        zeros = jax.tree.map(jnp.zeros_like, (shared, staged))
        loss, side, dshared, dstack = gradients(program, table, layout, shared, staged, zeros, keep)
        forward = losses(program, table, layout, shared, staged)
        return loss | side, forward[0] | forward[1], jax.lax.psum(dshared, "pipeline"), dstack

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), split), out_specs=(P(), P(), P(), split), check_vma=False
    )
    sums, forward, dshared, dstack = jax.jit(run)(shared, staged)
    assert forward.keys() == sums.keys() == {"loss", "side"}
    for name, total in sums.items():
        np.testing.assert_allclose(forward[name], total, rtol=1e-6)
    return (sums["loss"], sums["side"]), (dshared, jax.tree.map(layout.unstaged, dstack))


def assert_close(got, want):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(np.asarray(ours) - np.asarray(theirs))) <= 1e-5 * np.max(
            np.abs(theirs)
        )


@pytest.mark.core
@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_any_legal_table_gives_the_gradients_of_a_plain_loop(seed):
    """Random tables in which activations, cotangents and weight gradients wait, and layers that do
    not divide.
    """
    table = some_waiting_table(seed)
    layout = lay_out(table.stages * table.chunks * 2 - seed % 2, table.stages, table.chunks)
    shared, stack, batch = problem(layout.layers, table.microbatches)
    got = piped(table, layout, shared, stack, batch, keep=table.split or seed % 3 > 0)
    assert_close(got, reference(layer, shared, stack, batch))


# So ragged that one phase has all ticks, with and without head or weights.
IDLE_IN_PHASES = some_waiting_table(0)


@pytest.mark.parametrize(
    "table",
    [
        build("interleaved", 2, 4, 2),
        build("zero_bubble", 2, 4, 1),
        build("gpipe", 2, 4, 1),
        IDLE_IN_PHASES,
    ],
    ids=["interleaved", "zero_bubble", "gpipe", "ragged"],
)
@pytest.mark.seconds
def test_nan_of_cells_without_work_reaches_nothing(table):
    layout = lay_out(table.stages * table.chunks, table.stages, table.chunks)
    shared, stack, batch = problem(layout.layers, table.microbatches)
    got = piped(table, layout, shared, stack, batch, nowhere_at_zero, head=head_nowhere_at_zero)
    assert_close(got, reference(nowhere_at_zero, shared, stack, batch, head_nowhere_at_zero))


def test_the_ragged_table_has_idle_cells_of_every_kind():
    (each,) = rounds(IDLE_IN_PHASES)
    (phase,) = each.phases
    assert phase.head and phase.weight
    work = ("forward_microbatch", "backward_microbatch", "weight_microbatch", "head_microbatch")
    for name in work:
        assert (getattr(IDLE_IN_PHASES, name) < 0).any(), name
