"""Responds to a bad step: the run ends, continues without it, or goes back to a checkpoint.

If a bad step must not touch the weights, the step itself decides on the devices whether it is bad
(train/items/spikes.py). The guard sees the verdict one step later, with the other figures. Going
back leaves out the samples from the checkpoint to the last bad step. Every checkpoint keeps the
ranges that were left out; all other samples are consumed in order.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from spmdtrain.config.schema import GuardConfig
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.running.rollback import GoBack
from spmdtrain.running.saves import Saves
from spmdtrain.train.all_parts import items_named
from spmdtrain.train.state import TrainState, is_finite

NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


class Guard:
    """The guard of a run, which checks the figures of each step and does what `[guard]` says about
    bad ones.
    """

    def __init__(self, config: GuardConfig, saves: Saves, reporter: Reporter):
        self._config = config
        self._saves = saves
        self._bad_steps = saves.bad_steps
        self._reporter = reporter

    @property
    def lets_save(self) -> bool:
        """True if the run may save: not amid bad steps under `rollback`, which goes back to before
        the first of them.
        """
        return self._config.policy != "rollback" or self._bad_steps.in_a_row == 0

    def check(self, step: int, figures: Mapping[str, Any]) -> None:
        """Judges the figures of `step`, and reports the samples that it skipped.

        A step skipped because the loss scale was too large is not a bad step. Raises DivergedError
        if the run must abort, and GoBack if it must go back.
        """
        if figures.get("overflow"):  # the loss scale was too large: the batch is not bad
            return
        self._check_routers(step, figures)
        if not self._is_bad(figures):
            self._bad_steps.in_a_row = 0
            return
        what = self._describe(step, figures)
        if self._config.policy == "abort":
            raise self._saves.diverged(step, what)
        skipped = self._bad_steps.in_a_row
        self._bad_steps.in_a_row += 1
        if skipped < self._config.most_skipped:
            samples = self._saves.samples(step)
            line = f"{what}: skipped, with the samples {samples[0]} to {samples[1]}"
            self._reporter.event("skipped", step, line, why=what, samples=samples)
            return
        what = f"{what}, and the {skipped} before it were skipped"
        if self._config.policy == "skip":
            raise self._saves.diverged(step, what)
        raise GoBack(what, step - skipped, step)

    def _check_routers(self, step: int, figures: Mapping[str, Any]) -> None:
        """Raises DivergedError if a router sends nearly all tokens to the same experts."""
        limit, load = self._config.expert_load, figures.get("expert_load")
        if limit is None or load is None or load <= limit:
            return
        layer = int(figures["expert_load_layer"])
        what = f"the router of layer {layer} has collapsed: at step {step} an expert has {load:.4g}"
        raise self._saves.diverged(
            step,
            f"{what} times the mean number of tokens, above guard.expert_load={limit:g}",
            fix="model.experts.balance=0.01 or model.experts.bias_rate=0.001",
        )

    def check_state(self, step: int, state: TrainState) -> None:
        """Raises the same errors if a state to be saved is not finite. Waits for the devices."""
        if is_finite(
            state, items_named(state.items)
        ):  # the loss of the next step would reveal it, too late
            return
        what = f"the weights or the optimizer state after step {step} are not finite"
        if self._config.policy == "rollback":
            raise GoBack(what, step, step)
        raise self._saves.diverged(step, what)

    def _is_bad(self, figures: Mapping[str, Any]) -> bool:
        if "skipped" in figures:  # the step has decided
            return figures["skipped"] > 0
        return any(not figures[name] <= self._limit(name, figures) for name in _known(figures))

    def _limit(self, name: str, figures: Mapping[str, Any]) -> float:
        """Returns the largest finite value that is good."""
        fixed = self._config.grad_norm if name == "grad_norm" else None
        limit = figures.get(f"{name}_limit", fixed)
        largest = float(np.finfo(np.float32).max)
        return largest if limit is None else min(limit, largest)

    def _describe(self, step: int, figures: Mapping[str, Any]) -> str:
        for name in _known(figures):
            if not np.isfinite(figures[name]):
                return f"the {NAMES[name]} of step {step} is {figures[name]}"
        over = {name: figures[name] / self._limit(name, figures) for name in _known(figures)}
        name = max(over, key=lambda name: over[name])
        limit = self._limit(name, figures)
        what = f"the {NAMES[name]} of step {step} is {figures[name]:.4g}, above {limit:.4g}"
        if limit == (self._config.grad_norm if name == "grad_norm" else None):
            return what
        sigmas = f"{self._config.sigmas:g} standard deviations"
        return f"{what}, {sigmas} above the mean of earlier steps"


def _known(figures: Mapping[str, Any]) -> list[str]:
    """Returns the names in `NAMES` that a step has; there is no loss if no token counts in it."""
    return [name for name in NAMES if name in figures]
