"""Gradients with a pipeline: the model's `embed`, `blocks` and `head` as the program that stages
run.

One region, manual over `pipeline` and all axes of the batch. Weights are gathered over the axes of
the batch once before the ticks, in compute precision, and gradients scattered once after them.
`context` and `tensor` stay automatic.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.config.errors import ConfigError
from spmdtrain.models.abstract import AbstractModel, cast
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.stack import rematerialised, run_block
from spmdtrain.parallel.axes import BATCH_AXES, owning_axes
from spmdtrain.parallel.regions import MANUAL_AXES, make_sliced_sum, manual_region
from spmdtrain.parallel.specs import axes_of_dim, drop_axes, keep_axes
from spmdtrain.pipeline.draw import headline
from spmdtrain.pipeline.executor import StageProgram, gradients, losses
from spmdtrain.pipeline.layout import StageLayout
from spmdtrain.pipeline.schedule import Table
from spmdtrain.train.batch import Batch
from spmdtrain.train.gradients.forward import make_context, make_head_losses
from spmdtrain.train.gradients.reduction import add_copies, mean_gradients, zero_gradients
from spmdtrain.train.gradients.sums import count_tokens, join_losses, sum_over_shards, total_of
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses


def describe(table: Table, layout: StageLayout) -> str:
    """The schedule in one line, what padding costs, and how a large bubble shrinks."""
    parts = [headline(table)]
    if layout.padding:
        more = layout.places / layout.layers - 1
        padded = f"{layout.layers} layers in {layout.places} places"
        parts.append(f"{padded}, {more:.0%} more layer work")
    if table.microbatches < table.stages:
        parts.append("a smaller train.microbatch makes more of them, and the bubble smaller")
    return "; ".join(parts)


def make_gradients(setup: Setup) -> Callable[..., Any]:
    """Does what `grad_accumulation.make_gradients` does, with the schedule's microbatches."""
    keep = setup.config.train.remat != "full"
    table_axes = _table_axes(setup)

    def local(params, step, batch: Batch, cotangent):
        trained, fixed = setup.model.split_trained(add_copies(setup, params))
        shared_fixed, stack_fixed = _split(setup.model, fixed)
        program = _program(
            setup, table_axes, batch, step, cotangent, fixed=shared_fixed, training=True
        )
        totals = _split(setup.model, zero_gradients(setup, trained))
        weights = _split(setup.model, trained)
        of_head, of_layers, shared, stack = gradients(
            program, setup.table, setup.model.layout, *weights, totals, keep, stack_fixed
        )
        sums = _sums(setup, of_head, of_layers, batch, training=True)
        tokens = total_of(sums["tokens"])
        return mean_gradients(setup, {**shared, **stack}, tokens, cotangent), sums

    resting = {path: keep_axes(MANUAL_AXES, spec) for path, spec in setup.specs.items()}
    trained, _ = setup.model.split_trained(resting)
    return _gathered(setup, local, (trained, P()))


def make_losses(setup: Setup) -> Callable[..., Any]:
    """Does what `grad_accumulation.make_losses` does."""
    table_axes = _table_axes(setup)

    def local(params, step, batch: Batch, cotangent):
        program = _program(setup, table_axes, batch, step, cotangent, fixed={}, training=False)
        weights = _split(setup.model, add_copies(setup, params))
        of_head, of_layers = losses(program, setup.table, setup.model.layout, *weights)
        return _sums(setup, of_head, of_layers, batch, training=False)

    run = _gathered(setup, local, P())
    return lambda params, batch: run(params, None, batch)


def _gathered(setup: Setup, local: Callable, out_specs) -> Callable:
    """`local(params, step, batch, cotangent)` in the manual region, with weights in compute
    precision and whole over the axes of the batch."""
    whole = {}
    for path, spec in setup.specs.items():
        owning = owning_axes(setup.model.parameters[path].axes)
        whole[path] = drop_axes([axis for axis in BATCH_AXES if axis not in owning], spec)
    params_specs = {path: keep_axes(MANUAL_AXES, spec) for path, spec in whole.items()}
    in_specs = (params_specs, P(), P(None, BATCH_AXES), P())
    region = manual_region(local, setup.mesh, MANUAL_AXES, in_specs, out_specs)

    def gather(path: str, x: jax.Array) -> jax.Array:
        # Constrained before the gather too: else XLA may gather first and cast after, which sends
        # float32.
        resting = jax.lax.with_sharding_constraint(x, NamedSharding(setup.mesh, setup.specs[path]))
        gathered = jax.lax.with_sharding_constraint(resting, NamedSharding(setup.mesh, whole[path]))
        return setup.padding.rest_to_use(path, gathered)

    def run(params, step, batch: Batch, cotangent: jax.Array | None = None):
        params = cast(params, setup.config.precision.compute)
        gathered = {path: gather(path, x) for path, x in params.items()}
        return region(gathered, step, batch, cotangent)

    return run


def _table_axes(setup: Setup) -> tuple[str, ...]:
    """("pipeline",) if each stage holds some rows of the head's table, () if each holds them all.

    Refuses a model that uses its stage's part of a table as if it were the whole.
    """
    model = setup.model
    tokens = jax.ShapeDtypeStruct((1, setup.config.train.sequence_length), jnp.int32)

    def no_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
        """Stands for the lookup that is right on a part of a table: it reads nothing."""
        return jnp.zeros((*ids.shape, *table.shape[1:]), table.dtype)

    def head(module, tokens_bt):
        ctx = ForwardContext(tokens_bt, lookup=no_rows)
        return module.head(module.embed(tokens_bt, ctx), ctx)

    rows = {
        path: model.parameters[path].shape[dim]  # without padding
        for path, spec in setup.specs.items()
        for dim, part in enumerate(spec)
        if not model.in_stack(path) and "pipeline" in axes_of_dim(part)
    }
    in_hidden = rows.keys() & model.read_by(lambda *given: head(*given)[0], tokens)
    in_table = rows.keys() & model.read_by(lambda *given: head(*given)[1], tokens)
    cut_otherwise = {path for path in in_table if rows[path] != model.rows}
    for path in sorted(in_hidden | cut_otherwise):
        stages = setup.rules.sizes["pipeline"]
        raise ConfigError(
            f"{path}: each of {stages} stages has a part of {rows[path]} rows, taken for the whole",
            fix="ctx.lookup(table, tokens_bt) in embed, in head the table uncut; "
            "or dims not named 'vocab'",
        )
    return ("pipeline",) if in_table else ()


def _program(
    setup: Setup,
    table_axes: tuple[str, ...],
    batch: Batch,
    step: jax.Array | None,
    cotangent: jax.Array | None,
    *,
    fixed: dict[str, jax.Array],
    training: bool,
) -> StageProgram:
    """The program that stages run on this batch.

    `table_axes` are what `_table_axes` gives. Without a step there is no dropout. `cotangent`: of
    the objective; None: 1. `fixed`: arrays outside the layers that have no gradient.
    """
    model = setup.model
    forward_context = make_context(setup)
    head_losses = make_head_losses(setup, training=training, table_axes=table_axes)

    def context_of(microbatch: jax.Array):
        take = jax.lax.dynamic_index_in_dim
        part = {name: take(x, microbatch, 0, keepdims=False) for name, x in batch.items()}
        return part, forward_context(part, step)

    def embed(shared, context):
        part, ctx = context
        return model.bind(fixed | shared).embed(part["tokens"], ctx)

    def layer(weights, x, rest):
        number, (_, ctx) = rest
        return run_block(model.bind(weights).blocks.layer, x, ctx, number)

    def head(shared, x, context):
        part, ctx = context
        return head_losses(model.bind(fixed | shared), x, ctx, part)

    # Under "full" the executor runs whole chunks again by itself.
    remat = "dots" if setup.config.train.remat == "dots" else "none"
    return StageProgram(
        embed=embed,
        layer=rematerialised(layer, remat),
        head=head,
        context_of=context_of,
        sum_over_stages=make_sliced_sum(setup.rules, "pipeline", MANUAL_AXES),
        cotangent=cotangent,
    )


def _split(
    model: AbstractModel, values: dict[str, jax.Array]
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(values outside the layers, values of the layers)."""
    stack = {path: x for path, x in values.items() if model.in_stack(path)}
    shared = {path: x for path, x in values.items() if path not in stack}
    return shared, stack


def _sums(
    setup: Setup, of_head: Losses, of_layers: Losses, batch: Batch, *, training: bool
) -> dict[str, jax.Array]:
    """Losses and tokens over all shards of the batch; every stage has the same."""
    tokens = count_tokens(setup, batch, training=training)
    sums = join_losses(of_head, of_layers) | tokens
    return sum_over_shards(sums, setup.rules)
