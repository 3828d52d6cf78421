"""Gradients with a pipeline: the model's `embed`, `blocks` and `head` as the program that stages run.

One region, manual over `pipeline` and all axes of the batch: weights are gathered over the latter once before the
ticks, in compute precision, and gradients scattered once after. `context` and `tensor` stay automatic.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import axes_of
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import Blueprint, cast
from spmdtrain.models.context import Flow
from spmdtrain.models.stack import rematerialised, run_block
from spmdtrain.parallel.axes import BATCH_AXES, Rules, manual_axes
from spmdtrain.parallel.pipeline import choose
from spmdtrain.parallel.pipeline.draw import headline
from spmdtrain.parallel.pipeline.executor import Program, gradients, losses
from spmdtrain.parallel.pipeline.layout import Layout
from spmdtrain.parallel.pipeline.schedule import Table
from spmdtrain.parallel.reduce import reduced, summed
from spmdtrain.train.loss import Batch, head_loss, make_flow, manually, only, without
from spmdtrain.train.state import crossings, gradient_specs, parameter_specs


def table_of(config: RunConfig, stages: int, microbatches: int) -> Table:
    """The schedule that the run asks for."""
    asked = config.pipeline
    table = choose.table_of(asked.schedule, stages, asked.chunks, microbatches)
    if table.split and config.train.remat != "none":
        raise ConfigError(
            f"train.remat={config.train.remat!r}: {asked.schedule!r} takes a layer's backward apart",
            fix="--set train.remat=none",
        )
    return table


def describe(table: Table, layout: Layout) -> str:
    """The schedule in one line, and what padding costs."""
    if not layout.padding:
        return headline(table)
    more = layout.places / layout.layers - 1
    return f"{headline(table)}; {layout.layers} layers in {layout.places} places, {more:.0%} more layer work"


def make_gradients(config: RunConfig, blueprint: Blueprint, mesh: Mesh, rules: Rules) -> Callable[..., Any]:
    """As `accumulated.make_gradients`; the batch's microbatches are those of the schedule."""
    manual = manual_axes(rules.sizes)
    specs, ways = gradient_specs(config, blueprint, rules), crossings(config, blueprint, rules)
    resting = {path: without(manual, spec) for path, spec in specs.items()}
    keep, split = config.train.remat != "full", _table_split(config, blueprint, rules)

    def local(params, step, batch):
        table = table_of(config, rules.sizes["pipeline"], batch["tokens"].shape[0])
        program = _program(config, blueprint, rules, split, batch, step)
        zeros = {
            path: jax.lax.with_sharding_constraint(jnp.zeros(x.shape, config.precision.accumulate), resting[path])
            for path, x in params.items()
        }
        totals, weights = _parts(blueprint, zeros), _parts(blueprint, params)
        loss, side, *grads = gradients(program, table, blueprint.layout, *weights, totals, keep)
        sums = _sums(loss, side, batch, rules)
        grads, count = reduced(grads[0] | grads[1], ways, resting), jnp.maximum(sums["tokens"], 1)
        return {path: (g / count).astype(g.dtype) for path, g in grads.items()}, sums

    out_specs = ({path: only(manual, spec) for path, spec in specs.items()}, P())
    return _gathered(local, config, blueprint, mesh, rules, out_specs)


def make_losses(config: RunConfig, blueprint: Blueprint, mesh: Mesh, rules: Rules) -> Callable[..., Any]:
    """As `accumulated.make_losses`."""
    split = _table_split(config, blueprint, rules)

    def local(params, step, batch):
        table = table_of(config, rules.sizes["pipeline"], batch["tokens"].shape[0])
        program = _program(config, blueprint, rules, split, batch, step)
        return _sums(*losses(program, table, blueprint.layout, *_parts(blueprint, params)), batch, rules)

    run = _gathered(local, config, blueprint, mesh, rules, P())
    return lambda params, batch: run(params, None, batch)


def _gathered(local, config: RunConfig, blueprint: Blueprint, mesh: Mesh, rules: Rules, out_specs) -> Callable:
    """`local(params, step, batch)` in the manual region, with weights in compute precision and whole over the axes
    of the batch."""
    manual = manual_axes(rules.sizes)
    whole = {path: without(BATCH_AXES, spec) for path, spec in parameter_specs(blueprint, rules).items()}
    in_specs = ({path: only(manual, spec) for path, spec in whole.items()}, P(), P(None, BATCH_AXES))
    region = manually(local, mesh, manual, in_specs, out_specs)

    def run(params, step, batch):
        params = cast(params, config.precision.compute)
        constrain = jax.lax.with_sharding_constraint
        params = {path: constrain(x, NamedSharding(mesh, whole[path])) for path, x in params.items()}
        return region(params, step, batch)

    return run


def _table_split(config: RunConfig, blueprint: Blueprint, rules: Rules) -> tuple[str, ...]:
    """("pipeline",) if stages have the rows of the head's table between them, () if each has all.

    Refuses a model that does with its part of a table what is right with a whole one only.
    """
    tokens = jax.ShapeDtypeStruct((1, config.train.sequence_length), jnp.int32)

    def head(model, tokens_bt):
        flow = Flow(tokens_bt, lookup=lambda table, ids: jnp.zeros((*ids.shape, *table.shape[1:]), table.dtype))
        return model.head(model.embed(tokens_bt, flow), flow)

    parts = {
        path: blueprint.parameters[path].shape[dim]
        for path, spec in parameter_specs(blueprint, rules).items()
        for dim, axes in enumerate(spec)
        if not blueprint.in_stack(path) and "pipeline" in axes_of(P(axes))
    }
    in_hidden = parts.keys() & blueprint.read_by(lambda *given: head(*given)[0], tokens)
    in_table = parts.keys() & blueprint.read_by(lambda *given: head(*given)[1], tokens)
    for path in sorted(in_hidden | {path for path in in_table if parts[path] != blueprint.rows}):
        raise ConfigError(
            f"{path}: each of {rules.sizes['pipeline']} stages has a part of {parts[path]} rows, taken for the whole",
            fix="flow.lookup(table, tokens_bt) in embed, in head the table uncut; or dims not named 'vocab'",
        )
    return ("pipeline",) if in_table else ()


def _program(
    config: RunConfig, blueprint: Blueprint, rules: Rules, split: tuple[str, ...], batch: Batch, step: jax.Array | None
) -> Program:
    """What stages run on this batch; `split` is from `_table_split`; no step: no dropout."""
    flow_of = make_flow(config, rules)

    def context_of(microbatch):
        part = {name: jax.lax.dynamic_index_in_dim(x, microbatch, 0, keepdims=False) for name, x in batch.items()}
        return part, flow_of(part, step)

    def embed(shared, context):
        part, flow = context
        return blueprint.bind(shared).embed(part["tokens"], flow)

    def layer(weights, x, rest):
        number, (_, flow) = rest
        return run_block(blueprint.bind(weights).blocks.layer, x, flow, number)

    def head(shared, x, context):
        part, flow = context
        return head_loss(blueprint.bind(shared), x, flow, part, rules, split)

    remat = "dots" if config.train.remat == "dots" else "none"  # full: the executor runs whole chunks again
    return Program(embed, rematerialised(layer, remat), head, context_of)


def _parts(blueprint: Blueprint, values: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(outside the layers, of the layers)."""
    stack = {path: x for path, x in values.items() if blueprint.in_stack(path)}
    return {path: x for path, x in values.items() if path not in stack}, stack


def _sums(loss: jax.Array, side: jax.Array | None, batch: Batch, rules: Rules) -> dict[str, jax.Array]:
    """Over all batch shards; every stage has the same."""
    sums = {"loss": loss, "tokens": batch["mask"].astype(jnp.float32).sum()}
    sums = sums if side is None else sums | {"side_loss": side}
    return summed(sums, [axis for axis in BATCH_AXES if rules.sizes[axis] > 1])
