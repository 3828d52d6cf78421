"""The riders of a run: features that take part in it through hooks, and that are imported only by a
run that asks for them.

The loop knows hooks and no feature. RIDERS lists them all; a function below opens each, and imports
its files. The sinks and hooks that a caller adds are hooks of the same kind.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from spmdtrain.config.schema import RunConfig
from spmdtrain.running.report.sinks import MakeSink
from spmdtrain.running.ride import Ride
from spmdtrain.running.saves import Saves
from spmdtrain.running.start.begin import Session
from spmdtrain.running.start.prepare import Prepared
from spmdtrain.train.batch import Batch
from spmdtrain.train.state import TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, Any]]


@dataclass(frozen=True)
class Rider:
    """A feature that rides along with each run whose settings ask for it; its hooks are optional.

    `around(prepared)` is a context around all that happens while the run holds its directory, and
    `sink(prepared)` makes a sink. `step(session, step)` returns the step that the loop calls
    instead of the compiled one. `ride(session, saves)` is a context around the steps from one
    detour to the next, with hooks between them.
    """

    is_asked: Callable[[RunConfig], bool]
    around: Callable[[Prepared], AbstractContextManager[None]] | None = None
    sink: Callable[[Prepared], MakeSink] | None = None
    step: Callable[[Session, Step], Step] | None = None
    ride: Callable[[Session, Saves], AbstractContextManager[Ride]] | None = None


def riders_of(config: RunConfig) -> list[Rider]:
    """Returns the riders that a run with these settings asks for, in the order of RIDERS."""
    return [rider for rider in RIDERS if rider.is_asked(config)]


def _bundle_at_crash(prepared: Prepared) -> AbstractContextManager[None]:
    from spmdtrain.running.record.bundle import bundled_at_crash

    return bundled_at_crash(prepared.directory, prepared.config, prepared.data)


def _bundles(prepared: Prepared) -> MakeSink:
    from spmdtrain.running.record.bundle import bundling

    return bundling(prepared.data)


@contextlib.contextmanager
def _record(session: Session, saves: Saves) -> Iterator[Ride]:
    from spmdtrain.running.record.step_record import StepRecord

    directory = session.prepared.directory
    with StepRecord(session.setup, saves.first, saves.sample, directory) as record:
        yield Ride(saw=record.saw, after_step=record.after_step, finish=record.flush)


def _page(prepared: Prepared) -> AbstractContextManager[None]:
    from spmdtrain.running.report.own_page import own_page

    return own_page(prepared.directory, is_live=prepared.config.log.report == "live")


def _replayed(session: Session, step: Step) -> Step:
    from spmdtrain.running.guards.other_devices import OtherDevices

    every = session.setup.config.guard.replay_check
    return OtherDevices(session.setup, step, every, session.reporter)


@contextlib.contextmanager
def _replicas(session: Session, saves: Saves) -> Iterator[Ride]:  # noqa: ARG001
    from spmdtrain.running.guards.replicas import ReplicaCheck

    every = session.setup.config.guard.replica_check
    check = ReplicaCheck(session.setup.mesh, every, session.reporter)
    yield Ride(
        after_step=lambda step, _, state: check.after_step(step, state),
        before_save=lambda step, state, _: check.before_save(step, state),
    )


@contextlib.contextmanager
def _exports(session: Session, saves: Saves) -> Iterator[Ride]:
    from spmdtrain.running.published.exports import Exports

    every = session.setup.config.checkpoint.export
    exports = Exports(session.reporter, every, saves.wait)
    yield Ride(hook=exports.hook, before_save=exports.before_save, finish=exports.finish)


def _meetings(session: Session, step: Step) -> Step:
    from spmdtrain.running.islands.meeting_step import MeetingStep

    tokenizer = session.prepared.data.tokenizer
    return MeetingStep(session.setup, step, session.reporter, session.interrupt, tokenizer)


RIDERS = (
    Rider(
        lambda config: config.log.record != "none",
        around=_bundle_at_crash,
        sink=_bundles,
        ride=_record,
    ),
    Rider(lambda config: config.log.report != "never", around=_page),
    Rider(lambda config: config.guard.replay_check > 0, step=_replayed),
    Rider(lambda config: config.guard.replica_check > 0, ride=_replicas),
    Rider(lambda config: config.checkpoint.export > 0, ride=_exports),
    Rider(lambda config: config.islands.are_several, step=_meetings),
)
