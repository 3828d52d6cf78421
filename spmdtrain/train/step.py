"""Makes the training step. The order of this file is the order of the step.

Forward, backward and gradient reduction run in one `shard_map`: grad_accumulation.py, or
grad_pipeline.py if the mesh has stages. Each data shard accumulates gradients over its
microbatches, and they are reduced over `data` once. Clipping and the optimizer run outside, on
global arrays: a layer-wise rule on local shards would be silently wrong.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.models.abstract import matmuls
from spmdtrain.train.all_parts import parts_of
from spmdtrain.train.batch import Batch
from spmdtrain.train.external_arrays.check_arrays import (
    Checked,
    check_batch,
    check_params,
    check_state_here,
)
from spmdtrain.train.gradients import grad_accumulation
from spmdtrain.train.gradients.inputs import FindGradients, StepInputs
from spmdtrain.train.gradients.sums import means, number_of
from spmdtrain.train.items.item import Metrics, Moved, Taken
from spmdtrain.train.items.items import unless_skipped
from spmdtrain.train.part import Graded
from spmdtrain.train.setup import Setup, check_setup
from spmdtrain.train.state import TrainState
from spmdtrain.train.updates import optimizers
from spmdtrain.train.updates.update_parameters import update_parameters

# Gets (gradients, updates) of a step that is being traced.
See = Callable[[dict[str, jax.Array], dict[str, jax.Array]], None]


def make_step(setup: Setup) -> Checked:
    """Returns `step(state, batch) -> (state, metrics)`, jitted, state donated.

    Metrics, float32 scalars: loss (mean over the unmasked tokens of the whole batch), grad_norm
    (before clipping), learning_rate, tokens (unmasked); for a mixture loss/SOURCE and
    tokens/SOURCE; side_loss if blocks have one; skipped (0 or 1) if a bad step does not change the
    state. A loss over no tokens is 0, and `tokens` shows it. Parts have figures of their own: where
    their losses and items are defined.

    Raises ConfigError if state or batch does not fit this setup; the state then still exists.
    """
    check_setup(setup)
    step = traced_step(setup)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out_shardings(setup))
    return checked_step(setup, jitted)


def traced_step(setup: Setup, see: See | None = None) -> Callable[..., Any]:
    """Returns the function that `make_step` jits.

    While it is traced, it calls `see(gradients, updates)` with the gradients of the mean loss
    before they are clipped, and the updates before they are scaled by a rate: both by dotted path
    of the trained parameters, sharded like them.
    """
    config = setup.config
    find_gradients = find_gradients_of(setup)
    change_gradients = _make_gradient_changes(setup)
    judge = _make_judge(setup)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        points = optimizers.gradient_points(setup.update_rules, state.params, state.opt_state)
        with matmuls(config.precision.compute):
            inputs = StepInputs(state.step, batch, items=state.items)
            result = find_gradients(points, inputs)
        unclipped = {p: x for p, x in result.gradients.items() if p in setup.update_rules}
        gradients, norm = optimizers.clip(unclipped, config.train.clip, setup.update_rules)
        gradients = change_gradients(Graded(gradients, norm, state.step, state.items))
        rate = setup.learning_rate(state.step)
        figures = means(setup, result.sums, gradients)
        number = number_of(figures)
        loss = figures["loss"]
        made, good = dict(result.made), None
        if judge:
            limits, good = judge(state.items, loss, norm)
            made |= limits
        updates, opt_state = update_parameters(setup, gradients, state, rate, good)
        if see:
            see(unclipped, updates)
        key = optimizers.rounding_key(config, state.step)
        params = optimizers.apply(
            setup.update_rules, state.params, updates, rate, key, setup.padding
        )
        moved = Moved(config, setup.model, setup.padding, state.step + 1, params)
        params, projected = setup.items.project(state.items, moved)
        figures |= {"grad_norm": norm, "learning_rate": rate}
        made |= projected
        taken = Taken(config, params, gradients, batch, loss, norm, number, good, made, state.step)
        if good is not None:
            figures["skipped"] = 1.0 - good.astype(jnp.float32)
            params = unless_skipped(good, params, state.params)
        after_items, of_items = setup.items.after_step(state.items, taken)
        # The batch of a skipped step is used up: the counter advances.
        after = TrainState(state.step + 1, params, opt_state, after_items)
        return after, figures | of_items

    return step


def _make_judge(setup: Setup) -> Callable[..., tuple[dict[str, jax.Array], jax.Array]] | None:
    """Returns `judge(items, loss, norm) -> (limits, good)`; None: no step is judged."""
    if not setup.config.judges_steps:
        return None
    from spmdtrain.train.items.spikes import judge

    return partial(judge, setup.config)


def out_shardings(setup: Setup) -> tuple[TrainState, None]:
    """Returns the shardings of a step's (state, metrics); the state keeps its own."""
    return jax.tree.map(lambda x: x.sharding, setup.state), None


def checked_step(setup: Setup, jitted: Callable[..., Any]) -> Checked:
    """Returns a jitted step that refuses a state or batch of another setup."""

    def check(state: Any, batch: Any) -> None:
        check_state_here(setup, state)
        check_batch(setup, batch, training=True)

    return Checked(jitted, check)


def make_eval_step(setup: Setup) -> Checked:
    """Returns `evaluate(params, batch) -> (sum of losses, number of tokens or pairs)`.

    There is no dropout. It raises ConfigError if params or batch do not fit this setup.
    """
    check_setup(setup)
    losses = make_losses(setup)

    def evaluate(params, batch: Batch):
        with matmuls(setup.config.precision.compute):
            sums = losses(params, batch)
        return sums["loss"], number_of(sums)

    def check(params: Any, batch: Any) -> None:
        check_params(setup, params)
        check_batch(setup, batch, training=False)

    return Checked(jax.jit(evaluate), check)


def make_gradients(setup: Setup) -> Callable[..., Any]:
    """Returns `find(params, step, batch, cotangent=None, items=None)`, which gives (gradients of
    the mean objective, sums). See `StepInputs`; `items` default to none.
    """
    find = find_gradients_of(setup)

    def gradients_and_sums(
        params,
        step,
        batch: Batch,
        cotangent: jax.Array | None = None,
        items: Mapping[str, Any] | None = None,
    ):
        result = find(params, StepInputs(step, batch, cotangent, items or {}))
        return result.gradients, result.sums

    return gradients_and_sums


def _gradients_module(setup: Setup) -> Any:
    """Returns the module that finds gradients on this mesh: over stages of a pipeline, or not."""
    if not setup.pipeline:
        return grad_accumulation
    from spmdtrain.train.gradients import grad_pipeline

    return grad_pipeline


def find_gradients_of(setup: Setup) -> FindGradients:
    """Returns what `grad_accumulation.make_gradients` does, of inputs that parts may have changed.
    The mesh decides between accumulation and pipeline.
    """
    finder = _gradients_module(setup)
    gradients = finder.make_gradients(setup, parts_of(setup.config))
    change = _make_input_changes(setup)
    return lambda params, inputs: gradients(params, change(inputs))


def make_losses(setup: Setup) -> Callable[..., Any]:
    """Returns `(params, batch) -> sums` in the same way, without dropout."""
    finder = _gradients_module(setup)
    losses = finder.make_losses(setup, parts_of(setup.config))
    change = _make_input_changes(setup)
    return lambda params, batch: losses(params, change(StepInputs(None, batch)).batch)


def _make_input_changes(setup: Setup) -> Callable[[StepInputs], StepInputs]:
    """Returns a function that applies the input changes of all parts, in order."""
    makers = (part.make_inputs for part in parts_of(setup.config) if part.make_inputs)
    changes = [change for make in makers if (change := make(setup))]

    def change_inputs(inputs: StepInputs) -> StepInputs:
        for change in changes:
            inputs = change(inputs)
        return inputs

    return change_inputs


def _make_gradient_changes(setup: Setup) -> Callable[[Graded], dict[str, jax.Array]]:
    """Returns a function that applies all parts' changes to clipped gradients, in order."""
    makers = (part.make_gradients for part in parts_of(setup.config) if part.make_gradients)
    changes = [change for make in makers if (change := make(setup))]

    def change_gradients(graded: Graded) -> dict[str, jax.Array]:
        for change in changes:
            graded = graded._replace(gradients=change(graded))
        return graded.gradients

    return change_gradients
