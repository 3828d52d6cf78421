"""Takes the run directory and makes the state that the run starts from: fresh, given, with weights
of another run, or resumed.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import changes, check_identity, describe_changes
from spmdtrain.checkpoints.meta import Meta
from spmdtrain.checkpoints.newest import LoadedState
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.data.source import recall_progress
from spmdtrain.processes import pulse
from spmdtrain.running.compile_step import lower_step
from spmdtrain.running.guards.bad_steps import BadSteps
from spmdtrain.running.guards.early_stop import EarlyStop
from spmdtrain.running.guards.interrupt import Interrupt
from spmdtrain.running.guards.out_of_memory import MemoryGuard
from spmdtrain.running.report import stages
from spmdtrain.running.report.attempt import Attempt, attempt
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.running.report.sinks import MakeSink
from spmdtrain.running.rollback import set_aside_damaged, set_aside_exports
from spmdtrain.running.saves import Saves
from spmdtrain.running.start.agreement import check_model
from spmdtrain.running.start.chosen_step import chosen_or_newest, set_aside_later
from spmdtrain.running.start.directory import check_given, open_directory
from spmdtrain.running.start.first_state import first_state
from spmdtrain.running.start.other_run import naming_settings, recorded
from spmdtrain.running.start.prepare import Prepared
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState

if TYPE_CHECKING:
    from spmdtrain.checkpoints.snapshots.snapshots import Snapshots


@dataclass(frozen=True)
class Session:
    """A run that holds its directory, and the point at which it starts.

    It starts from `state` after `done` steps, at the global sample index `sample`. `meta` is that
    of the checkpoint it resumes from; a new run has none. `bad_steps` and `early_stop` count what
    happened up to there. `snapshots` are set if the settings ask for any, and `lowered` if the step
    has been traced already.
    """

    prepared: Prepared
    setup: Setup
    attempt: Attempt
    checkpoints: Checkpoints
    snapshots: "Snapshots | None"
    reporter: Reporter
    memory: MemoryGuard
    interrupt: Interrupt
    state: TrainState
    done: int
    sample: int
    meta: Meta | None
    bad_steps: BadSteps
    early_stop: EarlyStop
    lowered: jax.stages.Lowered | None

    def saves(self, record: Callable[[], Meta], done: int, sample: int) -> Saves:
        """Returns the saves after `done` steps, at the global sample index `sample`.

        Each stores `record()`, which describes the run and its data.
        """
        return Saves(
            self.setup,
            record,
            self.checkpoints,
            self.reporter,
            done,
            sample,
            self.bad_steps,
            self.early_stop,
            snapshots=self.snapshots,
        )


@contextlib.contextmanager
def open_session(
    prepared: Prepared,
    setup: Setup,
    state: TrainState | None,
    sinks: Sequence[MakeSink] = (),
    around: Sequence[AbstractContextManager[None]] = (),
) -> Iterator[Session]:
    """Locks the run directory, and resumes or begins the run in it. Releases everything at the end.

    `state` is what a caller starts the run from. `sinks` follow those of the run, and the contexts
    `around` it are entered once it holds the directory. A run that cannot start touches no
    directory. Raises UserError if the directory or its contents do not fit the run.
    """
    directory = prepared.directory
    config = setup.config
    check_model(setup)
    if state is not None:
        from spmdtrain.train.external_arrays.place_state import placed

        state = placed(setup, state)
        check_given(directory, prepared.config.train.init_from, prepared.fresh)
    lowered = None
    if prepared.is_new and config.train.init_from:
        from spmdtrain.running.start.init_from import check_source

        check_source(prepared.config, prepared.data.tokenizer, directory, prepared.fresh)
    if prepared.is_new:
        lowered = lower_step(setup)
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(open_directory(directory, prepared.fresh))
        for context in around:
            contexts.enter_context(context)
        memory = contexts.enter_context(MemoryGuard(setup))
        this = contexts.enter_context(attempt(directory, prepared.launched))
        checkpoints = Checkpoints(directory, setup, Retention(config.checkpoint))
        contexts.enter_context(contextlib.closing(checkpoints))
        pulse.tell(pulse.RESTORE)
        stages.enter("looking for a checkpoint")
        snapshots = _snapshots(setup, checkpoints, clear=prepared.chooses)
        checkpoint = _find(prepared, setup, checkpoints, snapshots)
        # A checkpoint of another run is refused before the reporter forgets later steps.
        remarks = _check(prepared, setup, checkpoint) if checkpoint else []
        done = checkpoint.step if checkpoint else 0 if state is None else int(state.step)
        reporter = Reporter(directory, config, done, [*prepared.sinks, *sinks], prepared.hooks)
        contexts.enter_context(reporter)
        pulse.tell(pulse.UNDONE, done)
        if checkpoint is None:
            state = _begin(setup, state, reporter)
        else:
            state = _resume(prepared, setup, checkpoint, checkpoints, reporter, remarks)
        meta = checkpoint.meta if checkpoint else None
        yield Session(
            prepared=prepared,
            setup=setup,
            attempt=this,
            checkpoints=checkpoints,
            snapshots=snapshots,
            reporter=reporter,
            memory=memory,
            interrupt=Interrupt(setup.mesh),
            state=state,
            done=done,
            sample=meta["sample"] if meta else config.train.samples_before(done),
            meta=meta,
            bad_steps=BadSteps.of(meta or {}),
            early_stop=EarlyStop(config.eval, meta),
            lowered=lowered,
        )


def _snapshots(setup: Setup, checkpoints: Checkpoints, *, clear: bool) -> "Snapshots | None":
    """Returns the snapshots of the run, if the settings ask for any; see `open_snapshots`."""
    if not setup.config.checkpoint.memory_every:
        return None
    from spmdtrain.running.start.open_snapshots import open_snapshots

    return open_snapshots(setup, checkpoints, clear=clear)


def _find(
    prepared: Prepared, setup: Setup, checkpoints: Checkpoints, snapshots: "Snapshots | None"
) -> LoadedState | None:
    """Returns the checkpoint of the chosen step, or the newest intact one; None if there is none.

    A snapshot in the launcher's memory is as good as a checkpoint of its step.
    """
    newest = checkpoints.newest()
    snapshot = snapshots.newest(newest or 0) if snapshots else None
    if snapshot is not None:
        return snapshot
    if newest is None and prepared.step is None:
        return None
    directory = prepared.directory
    with naming_settings(directory, setup, prepared.data, prepared.seams):
        return chosen_or_newest(checkpoints, directory, prepared.step, setup.state)


def _check(prepared: Prepared, setup: Setup, checkpoint: LoadedState) -> list[str]:
    """Returns remarks about a checkpoint. Raises CheckpointError if it belongs to another run."""
    directory = prepared.directory
    where = f"step {checkpoint.step} of {directory}"
    return check_identity(checkpoint.meta, setup, prepared.data, where, recorded(directory))


def _resume(
    prepared: Prepared,
    setup: Setup,
    checkpoint: LoadedState,
    checkpoints: Checkpoints,
    reporter: Reporter,
    remarks: Sequence[str],
) -> TrainState:
    """Returns the state of a checkpoint; what the run left behind after that step is set aside."""
    step = checkpoint.step
    directory = prepared.directory
    set_aside_damaged(checkpoints, checkpoint, reporter)
    set_aside_later(checkpoints, step, reporter)
    set_aside_exports(step, reporter)
    if checkpoints.retention:
        checkpoints.retention.recall(checkpoint.meta)
    recall_progress(prepared.data, checkpoint.meta)
    differs = changes(checkpoint.meta, setup.config, prepared.seams)
    values: dict[str, Any] = {"changed": differs} if differs else {}
    values["seconds"] = pulse.phase().seconds
    line = f"resumed {directory} at step {step}"
    if checkpoint.from_memory:
        line += ", from the launcher's memory"
        values["from_memory"] = True
    mesh = dict(setup.mesh.shape)
    reporter.event("resumed", step, line, from_step=step, mesh=mesh, **values)
    if differs:
        reporter.say(f"changed since step {step}: {describe_changes(differs)}")
    if prepared.adapted:
        why = prepared.adapted.line
        reporter.event("adapted", step, why, why=why)
    for line in remarks:
        reporter.say(line)
    return checkpoint.state


def _begin(setup: Setup, state: TrainState | None, reporter: Reporter) -> TrainState:
    """Returns the given state, a state with the weights of `train.init_from`, or a fresh one."""
    stages.enter("making the first weights")
    mesh = dict(setup.mesh.shape)
    if state is not None:
        seconds = pulse.phase().seconds
        reporter.event("started", int(state.step), mesh=mesh, init_from="state=", seconds=seconds)
        return state
    state = first_state(setup, reporter.say, reporter.directory)
    seconds = pulse.phase().seconds
    source = setup.config.train.init_from
    reporter.event("started", 0, mesh=mesh, init_from=source, seconds=seconds)
    return state
