"""Computes gradients with a pipeline: the stages run the program of `stage_program.py` by the
schedule.

One region is manual over `pipeline` and all axes of the batch. Weights are gathered over the axes
of the batch once before the ticks, in compute precision, and gradients are scattered once after
them. `context` and `tensor` stay automatic.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.models.abstract import AbstractModel
from spmdtrain.models.stack import sum_losses
from spmdtrain.parallel.axes import BATCH_AXES, drop_axes, keep_axes, owning_axes
from spmdtrain.parallel.regions import MANUAL_AXES, manual_region
from spmdtrain.pipeline.executor import gradients, losses
from spmdtrain.pipeline.schedule import Table
from spmdtrain.train.batch import Batch
from spmdtrain.train.gradients.brought import Brought
from spmdtrain.train.gradients.inputs import FindGradients, FoundGradients, StepInputs
from spmdtrain.train.gradients.reduction import (
    add_copies,
    mean_gradients,
    summing_wide,
    zero_gradients,
)
from spmdtrain.train.gradients.stage_program import find_table_axes, make_stage_program
from spmdtrain.train.gradients.sums import (
    count_tokens,
    join_losses,
    number_of,
    split_side_losses,
    sum_over_shards,
    take_measured,
    total_of,
)
from spmdtrain.train.part import Parts
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses


def make_gradients(setup: Setup, parts: Parts) -> FindGradients:
    """Returns what `grad_accumulation.make_gradients` does, with the schedule's microbatches."""
    table = _table(setup)
    keep = setup.config.train.remat != "full"
    table_axes = find_table_axes(setup)
    brought = Brought(setup, parts)

    def local(params, step, batch: Batch, cotangent, arrays):
        trained, fixed = setup.model.split_trained(add_copies(setup, params))
        shared_fixed, stack_fixed = _split(setup.model, fixed)
        read = brought.in_use(arrays)
        program = make_stage_program(
            setup, parts, table_axes, batch, step, cotangent, read, fixed=shared_fixed
        )
        totals = _split(setup.model, zero_gradients(setup, trained))
        weights = _split(setup.model, trained)
        of_head, of_layers, shared, stack = gradients(
            program, table, setup.model.stage_layout, *weights, totals, keep, stack_fixed
        )
        sums = _sums(setup, of_head, of_layers, batch, training=True)
        sums, measured = take_measured(sums)
        number, over_data = total_of(number_of(sums)), brought.over_data(arrays, step)
        of_all = {**shared, **stack}
        means, made = mean_gradients(setup, of_all, number, cotangent, over_data)
        return means, sums, made, measured

    resting = {path: keep_axes(MANUAL_AXES, spec) for path, spec in setup.specs.items()}
    trained, _ = setup.model.split_trained(resting)

    def out_specs(specs: dict[str, Any]):
        return trained, P(), brought.made_specs(specs), P()

    wide = summing_wide(setup, local)
    run = _whole_over_batch(setup, wide, out_specs)

    def find(params: dict[str, jax.Array], inputs: StepInputs) -> FoundGradients:
        step, batch, cotangent, _ = inputs
        arrays = brought.arrays(params, inputs)
        specs = brought.specs(arrays)
        of_all, sums, made, measured = run(params, step, batch, cotangent, arrays, specs)
        return FoundGradients(of_all, sums, {**made, **measured})

    return find


def make_losses(setup: Setup, parts: Parts) -> Callable[..., Any]:
    """Returns what `grad_accumulation.make_losses` does."""
    table = _table(setup)
    table_axes = find_table_axes(setup)

    def local(params, step, batch: Batch, cotangent, arrays):
        program = make_stage_program(setup, parts, table_axes, batch, step, cotangent, arrays)
        weights = _split(setup.model, add_copies(setup, params))
        of_head, of_layers = losses(program, table, setup.model.stage_layout, *weights)
        return _sums(setup, of_head, of_layers, batch, training=False)

    run = _whole_over_batch(setup, summing_wide(setup, local), lambda _: P())
    return lambda params, batch: run(params, None, batch)


def _table(setup: Setup) -> Table:
    assert setup.pipeline is not None, "the mesh has stages"
    return setup.pipeline


def _whole_over_batch(
    setup: Setup, local: Callable, out_specs: Callable[[dict[str, Any]], Any]
) -> Callable:
    """Returns `run(params, step, batch, cotangent, arrays, specs)`: `local` in the manual region.

    `arrays` are what parts bring, of these `specs`, given which `out_specs` are those of results.

    Weights are in compute precision and whole over the axes of the batch. Constraints gather them
    once for all ticks, before the region begins: if layers gathered their own (`gather_layer_of`),
    they would do so at each tick.
    """
    whole = {}
    for path, spec in setup.specs.items():
        owning = owning_axes(setup.model.parameters[path].axes)
        whole[path] = drop_axes([axis for axis in BATCH_AXES if axis not in owning], spec)
    params_specs = {path: keep_axes(MANUAL_AXES, spec) for path, spec in whole.items()}

    def gather(path: str, x: jax.Array) -> jax.Array:
        # Also constrained before the gather: otherwise XLA may gather first and cast afterwards,
        # which sends float32.
        resting = jax.lax.with_sharding_constraint(x, NamedSharding(setup.mesh, setup.specs[path]))
        gathered = jax.lax.with_sharding_constraint(resting, NamedSharding(setup.mesh, whole[path]))
        return setup.padding.rest_to_use(path, gathered)

    def run(params, step, batch: Batch, cotangent=None, arrays=None, specs=None):
        params = setup.model.cast(params, setup.config.precision.compute)
        gathered = {path: gather(path, x) for path, x in params.items()}
        in_specs = (params_specs, P(), P(None, BATCH_AXES), P(), specs or {})
        region = manual_region(local, setup.mesh, MANUAL_AXES, in_specs, out_specs(specs or {}))
        return region(gathered, step, batch, cotangent, arrays or {})

    return run


def _split(
    model: AbstractModel, values: dict[str, jax.Array]
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns (values outside the layers, values of the layers)."""
    stack = {path: x for path, x in values.items() if model.in_stack(path)}
    shared = {path: x for path, x in values.items() if path not in stack}
    return shared, stack


def _sums(
    setup: Setup, of_head: Losses, of_layers: Losses, batch: Batch, *, training: bool
) -> dict[str, jax.Array]:
    """Returns losses and tokens over all shards of the batch; every stage has the same."""
    tokens = count_tokens(setup, batch, training=training)
    of_head, further = split_side_losses(of_head)
    sums = join_losses(setup, of_head, sum_losses(of_layers, further)) | tokens
    return sum_over_shards(sums, setup.rules)
