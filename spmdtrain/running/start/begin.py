"""Makes the first state of a run: fresh, given, with weights of another run, or resumed."""

from dataclasses import dataclass
from typing import Any

from spmdtrain.checkpoints.identity import changes, describe_changes
from spmdtrain.checkpoints.meta import Meta
from spmdtrain.checkpoints.newest import Found
from spmdtrain.data.source import recall_progress
from spmdtrain.processes import pulse
from spmdtrain.running.guards.bad_steps import BadSteps
from spmdtrain.running.guards.early_stop import EarlyStop
from spmdtrain.running.published.abandoned import set_aside_exports
from spmdtrain.running.report import stages
from spmdtrain.running.rollback import set_aside_damaged
from spmdtrain.running.start.chosen_step import set_aside_later
from spmdtrain.running.start.first_state import first_state
from spmdtrain.running.start.session import Session
from spmdtrain.train.state import TrainState


@dataclass(frozen=True)
class StartingPoint:
    """The point from which a run continues: after `step`, at the global sample index `sample`.

    `bad_steps` are those up to there, and `early_stop` the evaluations.
    """

    state: TrainState
    step: int
    sample: int
    bad_steps: BadSteps
    early_stop: EarlyStop


def resume_or_begin(session: Session) -> StartingPoint:
    """Returns the start of a run: at the checkpoint that was found, or else of a new run."""
    found = session.finding.found
    pulse.tell(pulse.UNDONE, session.done)
    if found is not None:
        return _resume(session, found)
    stages.enter("making the first weights")
    state = _begin(session)
    step = int(state.step)
    sample = session.setup.config.train.samples_before(step)
    return _start(session, state, step, sample, {})


def _start(
    session: Session, state: TrainState, step: int, sample: int, meta: Meta
) -> StartingPoint:
    early_stop = EarlyStop(session.setup.config.eval, meta)
    return StartingPoint(state, step, sample, BadSteps.of(meta), early_stop)


def _resume(session: Session, found: Found) -> StartingPoint:
    step = found.step
    reporter = session.reporter
    setup = session.setup
    set_aside_damaged(session.checkpoints, found, reporter)
    set_aside_later(session.checkpoints, step, reporter)
    set_aside_exports(step, reporter)
    if session.checkpoints.retention:
        session.checkpoints.retention.recall(found.meta)
    recall_progress(session.prepared.data, found.meta)
    differs = changes(found.meta, setup.config, session.prepared.seams)
    changed = {"changed": differs} if differs else {}
    took: dict[str, Any] = {"seconds": pulse.phase().seconds}
    mesh = dict(setup.mesh.shape)
    line = f"resumed {session.prepared.directory} at step {step}"
    if found.from_memory:
        line += ", from the launcher's memory"
        took["from_memory"] = True
    reporter.event("resumed", step, line, from_step=step, mesh=mesh, **changed, **took)
    if differs:
        reporter.say(f"changed since step {step}: {describe_changes(differs)}")
    if adapted := session.prepared.adapted.line:
        reporter.event("adapted", step, adapted, why=adapted)
    for line in session.finding.remarks:
        reporter.say(line)
    return _start(session, found.state, step, found.meta["sample"], found.meta)


def _begin(session: Session) -> TrainState:
    """Returns the given state, a state with the weights of `train.init_from`, or a fresh one."""
    reporter = session.reporter
    setup = session.setup
    mesh = dict(setup.mesh.shape)
    if session.given is not None:
        took = pulse.phase().seconds
        reporter.event("started", session.done, mesh=mesh, init_from="state=", seconds=took)
        return session.given
    state = first_state(setup, reporter.say, reporter.directory)
    took = pulse.phase().seconds
    source = setup.config.train.init_from
    reporter.event("started", 0, mesh=mesh, init_from=source, seconds=took)
    return state
