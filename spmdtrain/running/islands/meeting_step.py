"""Lets a run meet the other islands between its steps."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from spmdtrain.config.run_files import birth_of
from spmdtrain.processes import pulse
from spmdtrain.processes.processes import any_process, by_process_0
from spmdtrain.running.guards.interrupt import Interrupt
from spmdtrain.running.islands.island import Island
from spmdtrain.running.islands.meetings import Meetings
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.running.rollback import Detour
from spmdtrain.running.saves import Saves
from spmdtrain.train.batch import Batch
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState


class Leapt(Detour):
    """A leap to `state`, at a later step: others have met without this island."""

    def __init__(self, state: TrainState, step: int):
        super().__init__(f"on from step {step}")
        self.state = state
        self.step = step

    def destination(self, saves: Saves) -> tuple[TrainState, int, int]:
        saves.finish()
        return self.state, self.step, saves.sample_after(self.step)


class CutShort(Exception):
    """A signal has ended the waiting for other islands."""


class MeetingStep:
    """A step that is followed by a meeting when it is time: call it like the compiled step.

    Raises Leapt, before a step, if the others have met without this island. A signal ends the
    waiting for others: the state then has a note, and the next call begins with the meeting.
    """

    def __init__(
        self,
        setup: Setup,
        step: Callable[..., Any],
        reporter: Reporter,
        interrupt: Interrupt,
        tokenizer: dict[str, Any] | None,
    ):
        settings = setup.config.islands
        assert settings.directory is not None and settings.index is not None, "the schema asks"
        self._meetings = Meetings(
            Path(settings.directory), settings.index, settings.patience, self._waits
        )
        birth = by_process_0(lambda: birth_of(reporter.directory))
        self._island = Island(setup, self._meetings, birth, tokenizer)
        self._count = settings.count
        self._step = step
        self._reporter = reporter
        self._interrupt = interrupt
        self._last_step = setup.config.train.steps
        self._may_stop = False  # while it waits
        self._done = 0
        self._last: jax.Array | None = None  # the step of the state that it has returned
        self._told = (0, 0)  # bytes sent and received up to the last meeting

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        if state.step is not self._last:
            self._done = int(state.step)
            self._call_roll()
            if (met := self._island.unmet(state)) and self._island.is_kept(met):
                state = self._taken(met, state)
            self._look(state)
            self._island.promise(self._done)
        elif self._island.takes(self._done):
            self._look(state)
        state, metrics = self._step(state, batch)
        self._done += 1
        state = self._met(state)
        self._last = state.step
        return state, metrics

    def _call_roll(self) -> None:
        """Waits for all islands to come; a signal ends that as it ends any waiting."""
        self._may_stop = True
        with contextlib.suppress(CutShort):
            self._meetings.call_roll(self._count)
        self._may_stop = False

    def _look(self, state: TrainState) -> None:
        """Raises Leapt if the others have met without this island."""
        state, reached = self._island.leap(self._done, state)
        if reached > self._done:
            line = f"the others have met without this island: on from step {reached}"
            text = f"step {self._done}: {line}"
            self._reporter.event("leapt", self._done, text, to_step=reached)
            raise Leapt(state, reached)

    def _met(self, state: TrainState) -> TrainState:
        done = self._done
        if self._island.sends(done):
            self._island.send(done, state)
        met = self._island.takes(done)
        if not met:
            return state
        # After the last step nothing would follow in which to take the result.
        self._may_stop = done < self._last_step
        try:
            return self._taken(met, state)
        except CutShort:
            return self._island.with_unmet(met, state)
        finally:
            self._may_stop = False

    def _taken(self, met: int, state: TrainState) -> TrainState:
        """Returns the state after the meeting of step `met`. Raises CutShort."""
        done = self._done
        begin = time.perf_counter()
        state, members, missing = self._island.take(met, state, done)
        state = self._island.with_unmet(0, state)
        (sent, received), before = self._meetings.traffic(), self._told
        self._told = sent, received
        line = f"the meeting of step {met} went on without island {', '.join(map(str, missing))}"
        self._reporter.event(
            "met",
            done,
            line if missing else "",
            meeting=met,
            islands=members,
            seconds=time.perf_counter() - begin,
            sent=sent - before[0],
            received=received - before[1],
        )
        return state

    def _waits(self) -> None:
        """Tells a launcher that this process does not hang. May raise CutShort on a signal."""
        pulse.tell(pulse.phase().name, self._done)
        if self._may_stop and any_process(self._interrupt.requested):
            self._interrupt.is_settled = True
            raise CutShort
