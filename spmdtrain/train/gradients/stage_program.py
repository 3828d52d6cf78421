"""Makes the model's `embed`, `blocks` and `head` the program that the stages of a pipeline run."""

from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.config.errors import ConfigError
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.stack import rematerialised, run_block
from spmdtrain.parallel.axes import axes_of_dim
from spmdtrain.parallel.regions import MANUAL_AXES, make_sliced_sum
from spmdtrain.pipeline.executor import StageProgram
from spmdtrain.train.batch import Batch
from spmdtrain.train.gradients.forward import make_context, make_head_losses, make_side_losses
from spmdtrain.train.gradients.sums import only_minimised, with_side_names
from spmdtrain.train.part import Parts
from spmdtrain.train.setup import Setup


def find_table_axes(setup: Setup) -> tuple[str, ...]:
    """Returns ("pipeline",) if each stage holds some rows of the head's table, () if it holds all
    of them.

    Refuses a model that uses its stage's part of a table as if it were the whole.
    """
    model = setup.model
    tokens = jax.ShapeDtypeStruct((1, setup.config.train.sequence_length), jnp.int32)

    def no_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
        """Stands in for the lookup that works on a part of a table; it reads nothing."""
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
    in_hidden = rows.keys() & model.read_by(lambda *weights: head(*weights)[0], tokens)
    in_table = rows.keys() & model.read_by(lambda *weights: head(*weights)[1], tokens)
    cut_otherwise = {path for path in in_table if rows[path] != model.rows}
    for path in sorted(in_hidden | cut_otherwise):
        stages = setup.rules.sizes["pipeline"]
        raise ConfigError(
            f"{path}: each of {stages} stages has a part of {rows[path]} rows, used as if it "
            "were the whole",
            fix="ctx.lookup(table, tokens_bt) in embed, in head the table uncut; "
            "or dims not named 'vocab'",
        )
    return ("pipeline",) if in_table else ()


def make_stage_program(
    setup: Setup,
    parts: Parts,
    table_axes: tuple[str, ...],
    batch: Batch,
    step: jax.Array | None,
    cotangent: jax.Array | None,
    read: dict[str, Any],
    *,
    fixed: dict[str, jax.Array] | None = None,
) -> StageProgram:
    """Returns the program that stages run on this batch.

    `table_axes` come from `find_table_axes`. Without a step it is an evaluation. `cotangent`: that
    of the objective; None: 1. `read`: what parts have brought. `fixed`: arrays outside the layers
    that have no gradient, in training.
    """
    model = setup.model
    training = fixed is not None
    outside = fixed or {}
    forward_context = make_context(setup, parts)
    head_losses = make_head_losses(setup, parts, training=training, table_axes=table_axes)
    side_losses = make_side_losses(setup, parts, table_axes=table_axes) if training else None

    def context_of(microbatch: jax.Array):
        take = jax.lax.dynamic_index_in_dim
        part = {name: take(x, microbatch, 0, keepdims=False) for name, x in batch.items()}
        return part, forward_context(part, step, read)

    def embed(shared, context):
        part, ctx = context
        return model.bind(outside | shared).embed(part["tokens"], ctx)

    def layer(weights, x, rest):
        number, (_, ctx) = rest
        y, losses = run_block(model.bind(weights).blocks.layer, x, ctx, number)
        # The executor minimises the sum of whatever it is given.
        return y, only_minimised(losses, parts)

    def head(shared, x, context):
        part, ctx = context
        module = model.bind(outside | shared)
        losses = only_minimised(head_losses(module, x, ctx, part), parts)
        if side_losses is None:
            return losses
        # All stages run these blocks on the same x: they tick together, and would wait for the last
        # one as long.
        of_parts = only_minimised(side_losses(module, x, ctx, part), parts)
        return losses | with_side_names(of_parts)

    # With "full", the executor itself recomputes whole chunks.
    remat = "dots" if setup.config.train.remat == "dots" else "none"
    return StageProgram(
        embed=embed,
        layer=rematerialised(layer, remat),
        head=head,
        context_of=context_of,
        sum_over_stages=make_sliced_sum(setup.rules, "pipeline", MANUAL_AXES),
        cotangent=cotangent,
        frozen=setup.frozen if training else 0,
    )
