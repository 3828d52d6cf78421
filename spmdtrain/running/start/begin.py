"""The state that a run begins with: fresh, given, with the weights of another run, or resumed."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import jax

from spmdtrain.checkpoints.identity import changes, code_of, describe_changes, model_changes
from spmdtrain.checkpoints.meta import Meta, has_fingerprints
from spmdtrain.checkpoints.model_code import check_model_code
from spmdtrain.checkpoints.newest import Found
from spmdtrain.checkpoints.restore import read_newest_good
from spmdtrain.checkpoints.store import Checkpoints
from spmdtrain.running.guards.bad_steps import Record
from spmdtrain.running.guards.early_stop import EarlyStop
from spmdtrain.running.report import stages
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.running.rollback import set_aside_damaged
from spmdtrain.running.start.chosen_step import set_aside_later
from spmdtrain.running.start.other_run import naming_settings
from spmdtrain.running.start.session import Session
from spmdtrain.train.setup import Setup, init_state, with_weights
from spmdtrain.train.state import TrainState


@dataclass(frozen=True)
class Start:
    """Where a run goes on: after `step`, with the global sample index `sample`.

    `record` has the bad steps up to there, and `early_stop` the evaluations.
    """

    state: TrainState
    step: int
    sample: int
    record: Record
    early_stop: EarlyStop


def resume_or_begin(session: Session) -> Start:
    """The start of a run from the checkpoint that was found, or else of a new one."""
    if session.found is not None:
        return _resume(session, session.found)
    stages.enter("making the first weights")
    state = _begin(session)
    step = int(state.step)
    sample = step * session.setup.config.train.global_batch
    return _start(session, state, step, sample, {})


def _start(session: Session, state: TrainState, step: int, sample: int, meta: Meta) -> Start:
    early_stop = EarlyStop(session.setup.config.eval, meta)
    return Start(state, step, sample, Record.of(meta), early_stop)


def _resume(session: Session, found: Found) -> Start:
    step = found.step
    reporter = session.reporter
    setup = session.setup
    set_aside_damaged(session.checkpoints, found, reporter)
    set_aside_later(session.checkpoints, step, reporter)
    if session.checkpoints.retention:
        session.checkpoints.retention.recall(found.meta)
    differs = changes(found.meta, setup.config, session.prepared.seams)
    changed = {"changed": differs} if differs else {}
    reporter.event("resumed", step, from_step=step, mesh=dict(setup.mesh.shape), **changed)
    reporter.say(f"resumed {session.prepared.directory} at step {step}")
    if differs:
        reporter.say(f"changed since step {step}: {describe_changes(differs)}")
    if adapted := session.prepared.adapted.line:
        reporter.event("adapted", step, why=adapted)
        reporter.say(adapted)
    for line in session.remarks:
        reporter.say(line)
    return _start(session, found.state, step, found.meta["sample"], found.meta)


def _begin(session: Session) -> TrainState:
    """The given state, or one with the weights of `train.init_from`, or a fresh one."""
    reporter = session.reporter
    setup = session.setup
    mesh = dict(setup.mesh.shape)
    if session.given is not None:
        reporter.event("started", int(session.given.step), mesh=mesh, init_from="state=")
        return session.given
    source = setup.config.train.init_from
    params = _weights_of(Path(source), setup, reporter) if source else None
    state = init_state(setup)
    if params is not None:
        state = with_weights(setup, state, params)
    reporter.event("started", 0, mesh=mesh, init_from=source)
    return state


def _weights_of(run: Path, setup: Setup, reporter: Reporter) -> dict[str, jax.Array]:
    """The parameters of the newest intact checkpoint of another run."""
    reading = contextlib.closing(Checkpoints(run, setup, keep=None))
    with reading as checkpoints, naming_settings(run, setup):
        _, (params, meta), line = read_newest_good(
            checkpoints, run, lambda step: checkpoints.restore_params(step, setup.state.params)
        )
    if line:
        reporter.say(line)
    asked = f"train.init_from='{run}'"
    for line in check_model_code(meta.get("model_code"), code_of(setup), asked):
        reporter.say(line)
    if not has_fingerprints(meta):
        reporter.say(f"the weights of {run} have no fingerprints yet: they could not be verified")
    for name, then, now in model_changes(meta, setup.config):
        reporter.say(f"the weights of {run} were trained with {name}={then}; here it is {now}")
    return params
