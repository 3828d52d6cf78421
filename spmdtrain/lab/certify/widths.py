"""Runs the coordinate check: does a model learn at the same pace in every width?

A few steps of training change the logits of some fixed sequences. With muP (arXiv:2203.03466,
appendix D.1) that change is as large in all widths; without it the change grows or shrinks with the
width, and the best learning rate moves with it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import jax
import numpy as np

from spmdtrain.config import RunConfig, from_resolved
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import MeshConfig, PipelineConfig
from spmdtrain.config.whole_run import leave_out
from spmdtrain.data.source import Data, open_data
from spmdtrain.inference.sample import make_logits
from spmdtrain.lab.certify.stepper import Own
from spmdtrain.running.device_batches import batches
from spmdtrain.train.compared.in_order import placed_arrays, plain_arrays
from spmdtrain.train.fresh import init_state
from spmdtrain.train.step import make_step
from spmdtrain.train.updates.parameter_kinds import Kind, kind_of

LEAST_SHARE = 0.1  # of the change, in every width, for a kind to be judged
Weights = dict[str, np.ndarray]  # plain ones, by dotted path
BOUND = 1.15  # of the largest change over the smallest
BOUND_OF_KIND = 1.4  # of a kind of matrices, whose share differs more from width to width
SEQUENCES = 16  # sequences whose logits are compared


@dataclass(frozen=True)
class WidthFigures:
    """The effect of a few steps on a model of one width.

    `change` is the standard deviation of the change of the logits; `by_kind` is that of the part
    that disappears when the parameters of one kind are reset to their initial values. `loss` is
    that of the last step.
    """

    embed: int
    change: float
    by_kind: dict[str, float]
    loss: float


@dataclass(frozen=True)
class CoordinateCheck:
    """The figures of all widths, from narrow to wide."""

    widths: tuple[WidthFigures, ...]

    @property
    def spread(self) -> float:
        """The largest change of the logits over the smallest; infinite if it is not finite."""
        return _spread([figures.change for figures in self.widths])

    @property
    def spread_by_kind(self) -> dict[str, float]:
        """The same for each kind of parameter alone."""
        return {
            kind: _spread([figures.by_kind[kind] for figures in self.widths])
            for kind in self.widths[0].by_kind
        }

    @property
    def is_good(self) -> bool:
        """True if neither the change of the logits nor that of matrices depends on the width.

        Kinds that contribute little are too noisy to be judged: vectors, and kinds below
        LEAST_SHARE.
        """
        kinds = self.spread_by_kind.items()
        judged = [spread for kind, spread in kinds if kind != "vector" and self._counts(kind)]
        return self.spread <= BOUND and all(spread <= BOUND_OF_KIND for spread in judged)

    def _counts(self, kind: str) -> bool:
        return all(figures.by_kind[kind] >= LEAST_SHARE * figures.change for figures in self.widths)


def _spread(changes: Sequence[float]) -> float:
    if not all(math.isfinite(change) and change > 0 for change in changes):
        return math.inf
    return max(changes) / min(changes)


def coordinate_check(
    config: RunConfig,
    widths: Iterable[int],
    steps: int,
    own: Own,
    devices: Sequence[jax.Device],
    say: Callable[[WidthFigures], None] = lambda _: None,
) -> CoordinateCheck:
    """Takes a few steps of the run in each width, and compares how far the logits move.

    Raises ConfigError if a width does not fit the other settings.
    """
    embeds = sorted(set(widths))
    if len(embeds) < 2:
        raise ConfigError("the widths to compare are fewer than two", fix="--widths 64,128,256")
    by_width = []
    for embed in embeds:
        figures = after_steps(at_width(config, embed, steps), own, devices)
        say(figures)
        by_width.append(figures)
    return CoordinateCheck(tuple(by_width))


def at_width(config: RunConfig, embed: int, steps: int) -> RunConfig:
    """Returns the run in another width, for a few steps at its highest learning rate.

    `ffn` scales with it, and so does the number of heads if `head_dim` is set, or else their size.
    """
    values = config.as_given()
    model, times = values["model"], embed / config.model.embed
    model["embed"] = embed
    grown = ["ffn"] + (["heads", "kv_heads"] if config.model.is_given("head_dim") else [])
    for name in grown:
        model[name] = _grown(f"model.{name}", model[name], times)
    if model["experts"]:
        ffn = _grown("model.experts.ffn", model["experts"]["ffn"], times)
        model["experts"] = model["experts"] | {"ffn": ffn}
    leave_out(values)
    values["train"] |= {"steps": steps, "epochs": None}
    values["optimizer"] |= {"schedule": "constant", "warmup": 0, "decay_share": None}
    values["log"] = {}
    return from_resolved({"config": values, "origin": {}})


def _grown(name: str, size: int | None, times: float) -> int | None:
    """Returns a size in another width. Raises ConfigError if it is not an integer there."""
    if size is None:
        return None
    if not (size * times).is_integer():
        raise ConfigError(
            f"{name}={size} is not whole in a model {times:g} times as wide", fix="other --widths"
        )
    return int(size * times)


def after_steps(config: RunConfig, own: Own, devices: Sequence[jax.Device]) -> WidthFigures:
    """Trains for the steps of a run, and returns their effect."""
    config, data = open_data(config)
    setup = own.shard(config, devices)
    state = init_state(setup)
    before = plain_arrays(setup, state.params)  # the first step takes the state's memory
    step = make_step(setup)
    loss = math.nan
    with batches(setup, data, 0, 0) as ahead:
        for _ in range(config.train.steps):
            state, metrics = step(state, next(ahead))
            loss = float(metrics["loss"])
    after = plain_arrays(setup, state.params)
    logits_of = _make_logits(config, own, data)
    at_last = logits_of(after)
    parameters = setup.model.parameters
    kinds: dict[str, Kind] = {path: kind_of(path, parameters[path]) for path in setup.update_rules}
    by_kind = {
        kind: _change(at_last, logits_of(after | _of_kind(before, kinds, kind)))
        for kind in get_args(Kind)
        if kind in kinds.values()
    }
    change = _change(at_last, logits_of(before))
    return WidthFigures(config.model.embed, change, by_kind, loss)


def _of_kind(weights: Mapping[str, np.ndarray], kinds: Mapping[str, Kind], kind: Kind) -> Weights:
    return {path: weights[path] for path, kind_of_path in kinds.items() if kind_of_path == kind}


def _change(after: np.ndarray, before: np.ndarray) -> float:
    return float(np.std(after - before))


def _make_logits(config: RunConfig, own: Own, data: Data) -> Callable[[Weights], np.ndarray]:
    """Returns `logits(weights)` on one device, for sequences after those of the steps."""
    one = {"mesh": MeshConfig(), "pipeline": PipelineConfig()}
    train = config.train.model_copy(update={"microbatch": None, "zero": 0})
    alone = own.shard(config.model_copy(update=one | {"train": train}), jax.local_devices()[:1])
    logits_of = make_logits(alone)
    first = config.train.steps * config.train.global_batch
    tokens = data.train_samples(config)(np.arange(first, first + SEQUENCES))["tokens"]

    def logits(weights: Weights) -> np.ndarray:
        return np.asarray(logits_of(placed_arrays(alone, weights), tokens), np.float64)

    return logits
