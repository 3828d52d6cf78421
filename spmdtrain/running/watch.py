"""Watches the steps of a run: reads their figures, judges them, and decides what is due."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from spmdtrain.processes import pulse
from spmdtrain.running.guards.guard import Guard
from spmdtrain.running.guards.interrupt import Interrupt
from spmdtrain.running.outcome import Status
from spmdtrain.running.report.metrics import OneLate, StepClock, make_figures
from spmdtrain.running.report.progress import Progress, quantity
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.running.ride import called
from spmdtrain.running.saves import SaveInterval, Saves
from spmdtrain.train import evaluation
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState

if TYPE_CHECKING:
    from spmdtrain.running.guards.stragglers import Stragglers

Evaluate = Callable[[TrainState], dict[str, float]]
# A share of the loss of a uniform guess: above it, weights from elsewhere do not fit the data.
MOST_OF_A_GUESS = 0.7


class Watch:
    """The watch over a run: it takes the steps after `first`, and checks each. Use it as a context.

    The figures of a step are read once the next one has been dispatched, so the devices never wait
    for the host. `evaluate(state)` returns the figures of an evaluation. A method that checks a
    step raises DivergedError if the run must end, and Detour if it must go back.
    """

    def __init__(
        self,
        setup: Setup,
        first: int,
        evaluate: Evaluate,
        saves: Saves,
        reporter: Reporter,
        interrupt: Interrupt,
    ):
        config = setup.config
        self._config = config
        self._first = first
        self._total = config.train.steps
        self._evaluate = evaluate
        self._saves = saves
        self._reporter = reporter
        self._interrupt = interrupt
        self._guard = Guard(config.guard, saves, reporter)
        self._stragglers = _make_stragglers(setup, reporter)
        self._interval = SaveInterval(config.checkpoint.every, first, setup.mesh.size)
        self._late = OneLate(self._read)
        self._clock = StepClock()
        self._figures_of = make_figures(setup)
        self._seconds: list[float] = []  # of the steps that were read
        self._settled: list[float] = []  # of those that `median_seconds` counts
        self._waits: dict[int, float] = {}  # for batches, of the steps that were not
        quiet = jax.process_index() > 0
        self._progress = Progress(self._total, first, config.log.every, quiet=quiet)

    def __enter__(self) -> "Watch":
        self._progress.__enter__()
        self._reporter.progress = self._progress
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    def begin(self, number: int, state: TrainState) -> Status | None:
        """Evaluates and saves a state after step `number` from which the run continues, if due.

        Returns "finished" if there is nothing to train: a detour may lead to the last step.
        """
        starts_elsewhere = self._config.train.init_from and self._config.eval.every
        if (self._config.eval.at_start or starts_elsewhere) and self._saves.is_empty:
            self.evaluate(number, state)
        if number != self._total:
            return None
        self.save_if_due(number, state, "finished")
        return "finished"

    def step(self, number: int, step: Callable, state: TrainState, batches: Iterator) -> TrainState:
        """Dispatches step `number` on the next batch, and reads the figures of the step before."""
        # The first step ends when its metrics are read.
        pulse.tell(pulse.STEP if self._seconds else pulse.FIRST_STEP, number)
        start = time.perf_counter()
        batch = next(batches)
        self._waits[number] = time.perf_counter() - start
        self._late.before_dispatch()
        state, metrics = self._dispatch(number, step, state, batch)
        self._late.push(number, metrics)
        with self._waiting():
            for after_step in called(self._saves.rides, "after_step"):
                after_step(number, batch, state)
        if self._stragglers:
            self._stragglers.after_step(number)
        self._saves.announce()
        return state

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for a wait that is not this process's own work."""
        return self._stragglers.waiting() if self._stragglers else contextlib.nullcontext()

    def _dispatch(self, number: int, step: Callable, state: TrainState, batch: Any) -> Any:
        """Returns the results of the step, traced if the profiler is asked for it."""
        chosen = self._config.log.profile
        if number not in chosen:
            with self._waiting():
                return step(state, batch)
        from spmdtrain.running.report.profile import profiled

        self._late.flush()  # what still runs would be in the trace, too
        with contextlib.ExitStack() as tracing:
            with self._waiting():
                profile = profiled(self._reporter.directory, number, chosen, step)
                results = tracing.enter_context(profile)(step(state, batch))
            with self._clock.pause():  # a trace takes longer to write than most steps take
                tracing.close()
        return results

    def evaluate_if_due(self, number: int, state: TrainState) -> None:
        """Evaluates after each `eval.every`-th step and after the last one."""
        every = self._config.eval.every
        if every and (number == self._total or number % every == 0):
            self.evaluate(number, state)

    def evaluate(self, number: int, state: TrainState) -> None:
        """Evaluates `state`, the result of step `number`, and reports the figures."""
        with self._pause():
            pulse.tell(pulse.EVALUATE, number)
            figures = self._evaluate(state)
            self._saves.evaluated(number, figures)
            self._reporter.evaluated(number, pulse.phase().seconds, figures)
            self._say(number, evaluation.describe(figures, evaluation.unit_of(self._config)))
            if not number and (line := self._useless_weights(figures)):
                self._say(number, line)

    def _useless_weights(self, figures: Mapping[str, Any]) -> str:
        """Returns a line if weights from elsewhere predict hardly better than a guess, otherwise
        "".
        """
        source = self._config.train.init_from
        guess = math.log(self._config.vocab)
        loss = figures.get("eval_loss")
        if not source or loss is None or not loss > MOST_OF_A_GUESS * guess:
            return ""
        return (
            f"the weights of {source} predict hardly better than a guess, whose loss is "
            f"{guess:.2f}: do the tokens come from its tokenizer?"
        )

    def ending(self, number: int) -> Status | None:
        """Returns why all processes end after step `number`; None if they continue."""
        if number == self._total:
            return "finished"
        with self._waiting():
            request = self._interrupt.agreed(self._reporter.stop_asked)
        return request or ("stopped_early" if self._saves.early_stop.is_over else None)

    def save_if_due(self, number: int, state: TrainState, ending: Status | None) -> None:
        """Saves `state` if a save or a snapshot is due, and always at the end."""
        on_disk = ending or self._interval.is_due(number) or self._saves.wants(number)
        in_memory = not ending and self._saves.is_snapshot_due(number)
        if not (on_disk or in_memory):
            return
        self._late.flush()
        if not (ending or self._guard.lets_save):
            return
        with self._pause():
            pulse.tell(pulse.SAVE, number)
            start = time.perf_counter()
            self._guard.check_state(number, state)
            for before_save in called(self._saves.rides, "before_save"):
                before_save(number, state, bool(on_disk))
            if on_disk:
                self._save(number, state, start)
                start = time.perf_counter()
            if in_memory:
                self._saves.take_snapshot(number, state, start)

    def end(self, number: int, ending: Status) -> None:
        """Waits for the last save after step `number`, and reports why the loop is over."""
        pulse.tell(pulse.END, number)
        self._saves.finish()
        self._reporter.event(ending, number, seconds=pulse.phase().seconds)

    def median_seconds(self) -> float | None:
        """Returns the median seconds of the steps but the first; None before the second.

        With `train.stages`, only the steps after the last stage count.
        """
        return statistics.median(self._settled) if self._settled else None

    def _save(self, number: int, state: TrainState, start: float) -> None:
        """Saves `state` on disk. It has held up the loop since `start`."""
        self._saves.save(number, state)
        stopped = time.perf_counter() - start
        self._saves.held_up(number, pulse.phase().seconds)
        if self._interval.saved(number, stopped, self._seconds):
            more = f"the next one follows after {quantity(self._interval.every)} steps"
            self._say(number, f"a save stops the run for {stopped:.2g} s: {more}")

    def _read(self, number: int, metrics: Any, ended: float | None) -> None:
        with self._waiting():
            metrics = jax.device_get(metrics)
        figures = self._figures_of(number, metrics, self._clock.tick(ended))
        self._seconds.append(figures["step_seconds"])
        if number > self._first + 1 and self._config.train.stage_of(number).last is None:
            self._settled.append(figures["step_seconds"])
        self._reporter.step(number, **figures, input_seconds=self._waits.pop(number))
        if number == self._first + 1:
            self._reporter.event("first_step", number, seconds=pulse.phase().seconds)
            pulse.tell(pulse.STEP, number + 1)
        self._guard.check(number, figures)
        is_end = number in (self._first + 1, self._total)
        self._progress.update(number, figures, due=is_end)

    def _say(self, number: int, text: str) -> None:
        self._reporter.say(f"step {number}/{self._total}  {text}")

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Counts the time inside for no step and no straggler. First reads the held figures."""
        self._late.flush()
        with self._waiting(), self._clock.pause():
            yield


def _make_stragglers(setup: Setup, reporter: Reporter) -> "Stragglers | None":
    """Returns the watch for a slow process; None if there is only one."""
    if jax.process_count() == 1:
        return None
    from spmdtrain.running.guards.stragglers import Stragglers

    return Stragglers(setup.mesh, setup.config.log.every, reporter)
