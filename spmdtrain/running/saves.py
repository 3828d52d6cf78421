"""Saves checkpoints during a run, decides when, and reports those that have become complete."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import jax

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import Meta
from spmdtrain.config.errors import DivergedError
from spmdtrain.processes import pulse
from spmdtrain.processes.processes import of_process_0
from spmdtrain.running.guards.bad_steps import BadSteps
from spmdtrain.running.guards.early_stop import EarlyStop
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.running.ride import Ride, called
from spmdtrain.train.all_parts import items_named
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState

if TYPE_CHECKING:
    from spmdtrain.checkpoints.snapshots.snapshots import Snapshots

FIRST_AUTO = 10  # steps until the first save, from which `auto` measures the cost of one


class Saves:
    """The checkpoints that the loop saves, and the newest one that it has reported as complete.

    The run starts at step `first`, at the global sample index `sample`. Each checkpoint stores
    `record()` (of the run and its data), `bad_steps` and `early_stop` (of its
    evaluations). So does each of the `snapshots`, if the launcher keeps them. `rides` are the hooks
    between its steps.
    """

    def __init__(  # noqa: PLR0913 - what is saved, and all that is saved with it
        self,
        setup: Setup,
        record: Callable[[], Meta],
        checkpoints: Checkpoints,
        reporter: Reporter,
        first: int,
        sample: int,
        bad_steps: BadSteps | None = None,
        early_stop: EarlyStop | None = None,
        *,
        snapshots: "Snapshots | None" = None,
    ):
        self.bad_steps = bad_steps or BadSteps()
        self.early_stop = early_stop or EarlyStop(setup.config.eval)
        self.checkpoints = checkpoints
        self.snapshots = snapshots
        self.rides: Sequence[Ride] = ()
        self.setup = setup
        self.reporter = reporter
        self.first = first
        self.sample = sample
        self._record = record
        self._newest = first if first else None
        self._costs: dict[int, dict[str, float]] = {}  # what `saved` reports about each step

    def save(self, step: int, state: TrainState) -> None:
        """Starts saving `state` as the checkpoint of `step`."""
        self.checkpoints.save(step, state, self._meta_after(step))
        saved = replace(state, items=items_named(state.items).saved(state.items))
        self._costs[step] = {"bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(saved))}

    def held_up(self, step: int, seconds: float) -> None:
        """Reports that the save of `step`, now in the background, held up the loop."""
        self._costs[step]["seconds"] = seconds
        self.reporter.event("saving", step, **self._costs[step])

    def is_snapshot_due(self, step: int) -> bool:
        """Returns True if the state after `step` is to be copied into the launcher's memory."""
        every = self.setup.config.checkpoint.memory_every
        return self.snapshots is not None and step % every == 0

    def take_snapshot(self, step: int, state: TrainState, since: float) -> None:
        """Copies `state` into the launcher's memory, and reports it.

        It has held up the loop since `since`, a time of `time.perf_counter`.
        """
        assert self.snapshots is not None  # it is due
        self.snapshots.take(step, state, self._meta_after(step))
        pulse.tell(pulse.HELD, step)
        seconds = time.perf_counter() - since
        size = self.snapshots.bytes
        self.reporter.event("snapshot", step, bytes=size, seconds=seconds)

    @property
    def is_empty(self) -> bool:
        """True if nothing of this run has been saved, neither on disk nor in memory."""
        return not self.checkpoints.steps() and (self.snapshots is None or self.snapshots.is_empty)

    def _meta_after(self, step: int) -> Meta:
        """Returns what a checkpoint of `step` stores next to the arrays."""
        where = {"sample": self.sample_after(step), "guard": self.bad_steps.document()}
        return where | self.early_stop.document() | self._record()

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
            self.reporter.event("saved", step, **self._costs.pop(step))
            pulse.tell(pulse.SAVED, step)
            self._newest = step

    def wait(self) -> None:
        """Waits for the saves under way, and reports them."""
        self.checkpoints.wait()
        self.announce()

    def finish(self) -> None:
        """Waits for the last save and for what the riders have under way, and reports them."""
        self.wait()
        for finish in called(self.rides, "finish"):
            finish()

    def samples(self, step: int) -> list[int]:
        """Returns the global indices of the first and the last sample in the batch of `step`."""
        return [self.sample_after(step - 1), self.sample_after(step) - 1]

    def sample_after(self, step: int) -> int:
        """Returns the global index of the first sample that is read after `step`."""
        before = self.setup.config.train.samples_before
        return self.sample + before(step) - before(self.first)

    def diverged(
        self, step: int, what: str, fix: str = "a lower optimizer.learning_rate"
    ) -> DivergedError:
        """Returns the error for a bad `step`; it names the last good checkpoint."""
        self.finish()
        self.reporter.event("diverged", step, samples=self.samples(step))
        last = "nothing was saved"
        if self._newest is not None:
            last = f"step {self._newest} is the newest checkpoint"
        return DivergedError(f"{what}; {last}", fix=fix)


class SaveInterval:
    """The interval between saves. `every` is `checkpoint.every`; the run starts at `first`.

    A number means its multiples; 0 means never. "auto" means the interval that loses the least time
    to saves and to work redone after failures (intervals.py), given the measured times of steps and
    saves.
    """

    def __init__(self, every: int | Literal["auto"], first: int, devices: int):
        self._auto = every == "auto"
        self._devices = devices
        self._saved = first
        self.every = FIRST_AUTO if every == "auto" else every

    def is_due(self, step: int) -> bool:
        """Returns True if the run must save after `step`."""
        if self._auto:
            return step - self._saved >= self.every
        return bool(self.every) and step % self.every == 0

    def saved(self, step: int, stopped: float, step_seconds: Sequence[float]) -> bool:
        """Learns from a save that stopped training for `stopped` seconds.

        `step_seconds` are those of the steps so far. Process 0 decides for all. Returns True if the
        interval has changed.
        """
        self._saved = step
        taken = step_seconds[1:]  # the first step is not typical
        if not self._auto or not taken:
            return False
        from spmdtrain.checkpoints.intervals import plan_checkpoints

        plan = plan_checkpoints(statistics.median(taken), stopped, self._devices)
        before = self.every
        self.every = of_process_0(plan.every)
        return self.every != before
