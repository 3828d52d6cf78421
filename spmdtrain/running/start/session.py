"""Opens the session of a run that holds its directory: what it reads there, and where it
reports.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.running.compile_step import lower_step
from spmdtrain.running.guards.out_of_memory import MemoryGuard
from spmdtrain.running.report.attempt import Attempt, attempt
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.running.seams import Hook, MakeSink
from spmdtrain.running.start.agreement import check_model
from spmdtrain.running.start.directory import check_given, check_source, open_directory
from spmdtrain.running.start.find import Finding, find
from spmdtrain.running.start.prepare import Prepared
from spmdtrain.train.given.placed import placed
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState


@dataclass(frozen=True)
class Session:
    """A run that holds its directory.

    `done` is the number of completed steps that it starts from. `finding` is the checkpoint it
    resumes from, with remarks about it; `given` is the state that a caller starts it from.
    `lowered` is the traced step if it has been traced already.
    """

    prepared: Prepared
    setup: Setup
    attempt: Attempt
    checkpoints: Checkpoints
    reporter: Reporter
    memory: MemoryGuard
    done: int
    finding: Finding
    given: TrainState | None
    lowered: jax.stages.Lowered | None


@contextlib.contextmanager
def open_session(
    prepared: Prepared,
    setup: Setup,
    state: TrainState | None,
    sinks: Sequence[MakeSink],
    hooks: Sequence[Hook],
) -> Iterator[Session]:
    """Locks the run directory and looks for a checkpoint. Releases everything at the end.

    `state` is what a caller starts the run from. A run that cannot start touches no directory.
    Raises UserError if the directory or its contents do not fit the run.
    """
    directory = prepared.directory
    check_model(setup)
    given = None if state is None else placed(setup, state)
    if given is not None:
        check_given(directory, prepared.config.train.init_from, prepared.fresh)
    lowered = None
    if prepared.is_new:
        check_source(prepared.config, prepared.data.tokenizer, directory, prepared.fresh)
        lowered = lower_step(setup)
    with contextlib.ExitStack() as held:
        memory = held.enter_context(MemoryGuard(setup))
        held.enter_context(open_directory(directory, prepared.fresh))
        this = held.enter_context(attempt(directory, prepared.launched, setup.config.log.report))
        checkpoints = Checkpoints(directory, setup, Retention(setup.config.checkpoint))
        held.enter_context(contextlib.closing(checkpoints))
        finding = find(prepared, setup, checkpoints)
        found = finding.found
        done = found.step if found else 0 if given is None else int(given.step)
        reporter = Reporter(directory, setup.config, done, sinks, hooks)
        held.enter_context(reporter)
        yield Session(
            prepared=prepared,
            setup=setup,
            attempt=this,
            checkpoints=checkpoints,
            reporter=reporter,
            memory=memory,
            done=done,
            finding=finding,
            given=given,
            lowered=lowered,
        )
