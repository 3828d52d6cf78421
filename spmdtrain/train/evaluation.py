"""Computes the loss on fixed windows: one evaluation for `train`, `eval` and the Python API.

The windows are those of the whole split, or the first `eval.batches x train.global_batch` of each
set. They do not depend on the mesh or on how many windows are computed at once.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.batches import batch_ids
from spmdtrain.data.source import Data, EvalSet, Windows, check_data
from spmdtrain.train.external_arrays.check_arrays import check_state_here
from spmdtrain.train.setup import Setup, check_setup
from spmdtrain.train.state import TrainState
from spmdtrain.train.step import make_eval_step

Params = dict[str, jax.Array]
NOTHING = "no token with a loss"


class Predicted(NamedTuple):
    """A model's predictions for one set: `nats` is the summed loss of `tokens` of its tokens."""

    name: str  # of the source in a mixture, else ""
    weight: float
    nats: float
    tokens: int
    of_tokens: int  # of the whole split

    @property
    def loss(self) -> float:
        """The mean loss of a token, in nats; there must be one."""
        return self.nats / self.tokens


def window_losses(
    setup: Setup, eval_step: Callable, params: Params, windows: Windows, limit: int | None
) -> Iterator[tuple[np.ndarray, float, float]]:
    """Yields (indices of windows, their summed loss in nats, tokens), a batch at a time.

    The batches hold the first `limit` windows, or all; `eval_step` comes from `make_eval_step`. The
    last batch is padded, with `windows.windows` as the index of padding.
    """
    size = setup.config.train.global_batch
    stop = windows.windows if limit is None else min(limit, windows.windows)
    for index in range(-(-stop // size)):
        ids = batch_ids(index, size)
        ids = np.where(ids < stop, ids, windows.windows)
        batch = setup.to_devices(windows.samples, ids)
        nats, tokens = jax.device_get(eval_step(params, batch))
        yield ids, float(nats), float(tokens)


def mean_loss(predictions: Sequence[Predicted]) -> float | None:
    """Returns the mean of the sets' losses by their weights, over the sets that have a loss.

    It is None if none has.
    """
    counted = [prediction for prediction in predictions if prediction.tokens]
    if not counted:
        return None
    weight = sum(prediction.weight for prediction in counted)
    return sum(prediction.weight * prediction.loss for prediction in counted) / weight


def make_eval_figures(setup: Setup, data: Data) -> Callable[[TrainState], dict[str, float]]:
    """Returns `figures(state)`, the report of an evaluation during training.

    It has "eval_loss" and "eval_tokens" (for pairs of answers "eval_pairs"), and for a mixture
    "eval_loss/NAME" and "eval_tokens/NAME" of each source; "eval_loss" is then the mean by their
    shares. A loss over no tokens is left out. If the state has an average of the weights,
    "eval_loss_ema" and "eval_loss_ema/NAME" are its losses.
    """
    step = make_eval_step(setup).jitted  # its batches are ours
    limit = setup.config.eval_windows
    unit = unit_of(setup.config)
    # Made once, on first use: packing the documents of a large corpus takes seconds.
    eval_sets = functools.cache(lambda: data.eval_sets(setup.config))

    def predict(params: Params, eval_set: EvalSet) -> Predicted:
        losses = list(window_losses(setup, step, params, eval_set.windows, limit))
        nats = sum(nats for _, nats, _ in losses)
        tokens = sum(tokens for _, _, tokens in losses)
        return Predicted(eval_set.name, eval_set.weight, nats, int(tokens), eval_set.tokens)

    def losses_of(params: Params, word: str) -> tuple[dict[str, float], dict[str, int]]:
        predictions = [predict(params, eval_set) for eval_set in eval_sets()]
        mean = mean_loss(predictions)
        losses = {} if mean is None else {word: mean}
        losses |= {f"{word}/{x.name}": x.loss for x in predictions if x.name and x.tokens}
        counts = {f"eval_{unit}": sum(x.tokens for x in predictions)}
        counts |= {f"eval_{unit}/{x.name}": x.tokens for x in predictions if x.name}
        return losses, counts | {f"eval_split_{unit}": sum(x.of_tokens for x in predictions)}

    def figures(state: TrainState) -> dict[str, float]:
        losses, counts = losses_of(state.params, "eval_loss")
        if "ema" in state.items:
            losses |= losses_of(state.averaged, "eval_loss_ema")[0]
        return losses | counts

    return figures


def make_evaluate(setup: Setup, data: Data) -> Callable[[TrainState], float]:
    """Returns `evaluate(state)`: the mean loss over the validation split, as a run reports it.

    For a mixture it is the mean of its sources' losses by their shares. `evaluate` raises DataError
    if no token has a loss.
    """
    check_setup(setup)
    check_data(data)
    figures = make_eval_figures(setup, data)

    def evaluate(state: TrainState) -> float:
        check_state_here(setup, state)
        report = figures(replace(state, items={}))
        if "eval_loss" not in report:
            raise DataError(f"there is nothing to evaluate: {NOTHING}")
        return report["eval_loss"]

    return evaluate


def unit_of(config: RunConfig) -> str:
    """Returns the unit over which losses are averaged: tokens or pairs."""
    return "pairs" if config.train.learns_pairs else "tokens"


def describe(figures: dict[str, float], unit: str = "tokens") -> str:
    """Describes an evaluation in words: its losses, and the number of their tokens or pairs."""
    parts = [
        f"{name.replace('_', ' ')} {value:.4f}"
        for name, value in figures.items()
        if name.startswith("eval_loss")
    ]
    count = figures[f"eval_{unit}"]
    counted = f"({count:,} of {figures[f'eval_split_{unit}']:,} {unit})"
    nothing = [
        f"{name.partition('/')[2]}: {NOTHING}"
        for name, value in figures.items()
        if name.startswith(f"eval_{unit}/") and not value
    ]
    if not count:
        nothing = [f"no eval loss: {NOTHING}"]
    return "  ".join([*parts, counted, *nothing])
