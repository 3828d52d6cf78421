"""Saves checkpoints during a run, and reports those that have become complete."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import Meta
from spmdtrain.config.errors import DivergedError
from spmdtrain.processes import pulse
from spmdtrain.running.guards.bad_steps import BadSteps
from spmdtrain.running.guards.early_stop import EarlyStop
from spmdtrain.running.published.exports import Exports
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState


class Saves:
    """The checkpoints that the loop saves, and the newest one that it has reported as complete.

    The run starts at step `first`, at the global sample index `sample`. Each checkpoint stores
    `kept()` (of the run and its data), `bad_steps` and `early_stop` (of its
    evaluations).
    """

    def __init__(
        self,
        setup: Setup,
        kept: Callable[[], Meta],
        checkpoints: Checkpoints,
        reporter: Reporter,
        first: int,
        sample: int,
        bad_steps: BadSteps | None = None,
        early_stop: EarlyStop | None = None,
    ):
        self.bad_steps = bad_steps or BadSteps()
        self.early_stop = early_stop or EarlyStop(setup.config.eval)
        self.checkpoints = checkpoints
        self._setup = setup
        self._reporter = reporter
        self._first = first
        self._sample = sample
        self._kept = kept
        self._exports = Exports(reporter, setup.config.checkpoint.export)
        self._newest = first if first else None
        self._held: dict[int, dict[str, float]] = {}  # what `saved` reports about each step

    def save(self, step: int, state: TrainState) -> None:
        """Starts saving `state` as the checkpoint of `step`."""
        if self._setup.config.checkpoint.export:  # a save may remove what is being exported
            self.checkpoints.wait()
            self.announce()
            self._exports.wait()
        where = {"sample": self._sample_after(step), "guard": self.bad_steps.document()}
        self.checkpoints.save(step, state, where | self.early_stop.document() | self._kept())
        arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        self._held[step] = {"bytes": arrays}

    def held_up(self, step: int, seconds: float) -> None:
        """Reports that the save of `step`, now in the background, held up the loop."""
        self._held[step]["seconds"] = seconds
        self._reporter.event("saving", step, **self._held[step])

    def evaluated(self, step: int, figures: Mapping[str, Any]) -> None:
        """Records an evaluation: it may decide which checkpoints are kept, and end the run."""
        self.early_stop.evaluated(figures)
        if self.checkpoints.retention:
            self.checkpoints.retention.evaluated(step, figures)

    def wants(self, step: int) -> bool:
        """Returns True if `step` must be saved because it is among the best, even if no save is
        due.
        """
        retention = self.checkpoints.retention
        if not retention or not retention.keeps_best:
            return False
        return retention.wants(step, self.checkpoints.steps())

    def announce(self) -> None:
        """Reports the saves that are now complete on disk."""
        for step in self.checkpoints.completed():
            self._reporter.event("saved", step, **self._held.pop(step))
            pulse.tell(pulse.SAVED, step)
            self._newest = step
            self._exports.saved(step)

    def finish(self) -> None:
        """Waits for the last save and its export, and reports them."""
        self.checkpoints.wait()
        self.announce()
        self._exports.finish()

    def samples(self, step: int) -> list[int]:
        """Returns the global indices of the first and the last sample in the batch of `step`."""
        return [self._sample_after(step - 1), self._sample_after(step) - 1]

    def _sample_after(self, step: int) -> int:
        """Returns the global index of the first sample that is read after `step`."""
        before = self._setup.config.train.samples_before
        return self._sample + before(step) - before(self._first)

    def diverged(
        self, step: int, what: str, fix: str = "a lower optimizer.learning_rate"
    ) -> DivergedError:
        """Returns the error for a bad `step`; it names the last good checkpoint."""
        self.finish()
        self._reporter.event("diverged", step, samples=self.samples(step))
        last = "nothing was saved"
        if self._newest is not None:
            last = f"step {self._newest} is the newest checkpoint"
        return DivergedError(f"{what}; {last}", fix=fix)
