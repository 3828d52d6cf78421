"""The loop: batch, step, figures, and whatever is due after a step."""

from collections.abc import Callable

from spmdtrain.inference.tasks import make_evaluate_with_tasks
from spmdtrain.running.guards.guard import GoBack
from spmdtrain.running.guards.interrupt import Interrupt
from spmdtrain.running.islands.meeting_step import Leapt, MeetingStep
from spmdtrain.running.outcome import Outcome
from spmdtrain.running.record.feed import Feed
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.running.rollback import go_back
from spmdtrain.running.saves import Saves
from spmdtrain.running.start.begin import StartingPoint
from spmdtrain.running.start.compiling import kept_of
from spmdtrain.running.start.session import Session
from spmdtrain.running.watch import Evaluate, Watch
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState


def train_with_returns(session: Session, start: StartingPoint, step: Callable) -> Outcome:
    """Trains, starting again from an older checkpoint whenever the guard goes back to one."""
    setup = session.setup
    data = session.prepared.data
    reporter = session.reporter
    evaluate = make_evaluate_with_tasks(setup, data)
    kept = kept_of(session)
    state, done, sample = start.state, start.step, start.sample
    with Interrupt(setup.mesh) as interrupt:
        if setup.config.islands.are_several:
            step = MeetingStep(setup, step, reporter, interrupt, data.tokenizer)
        while True:
            saves = Saves(
                setup,
                kept,
                session.checkpoints,
                reporter,
                done,
                sample,
                start.bad_steps,
                start.early_stop,
                snapshots=session.finding.snapshots,
            )
            try:
                with Feed(setup, data, done, sample, reporter.directory) as ahead:
                    return train(setup, state, step, evaluate, ahead, saves, reporter, interrupt)
            except GoBack as error:
                bad = error.with_traceback(None)  # the frames of the traceback hold a state
            except Leapt as leap:
                saves.finish()
                before = setup.config.train.samples_before
                sample += before(leap.step) - before(done)
                state, done = leap.with_traceback(None).state, leap.step
                continue
            state, done, sample = go_back(bad, setup, saves, reporter)


def train(
    setup: Setup,
    state: TrainState,
    step: Callable,
    evaluate: Evaluate,
    ahead: Feed,
    saves: Saves,
    reporter: Reporter,
    interrupt: Interrupt,
) -> Outcome:
    """Runs the loop from `state` on.

    Raises GoBack to continue from an older checkpoint, and Leapt from a later state.

    `step(state, batch)` is the compiled step, and `ahead` yields the batches and records them. If a
    hook stops the run, it ends after the step in flight.
    """
    config = setup.config
    done = int(state.step)
    ending = "finished" if done == config.train.steps else None  # an island may leap there
    with Watch(setup, done, evaluate, saves, reporter, interrupt) as watch:
        if _evaluates_first(setup) and saves.is_empty:
            watch.evaluate(done, state)
        if ending:
            watch.save_if_due(done, state, ending)
        while not ending:
            done += 1
            state = watch.step(done, step, state, ahead)
            ahead.taken(done, state)
            if is_due(config.eval.every, done, last=done == config.train.steps):
                watch.evaluate(done, state)
            ending = watch.ending(done)
            watch.save_if_due(done, state, ending)
        watch.end(done, ending)
    return Outcome(ending, done, watch.median_seconds())


def _evaluates_first(setup: Setup) -> bool:
    """Returns True if the weights are evaluated before the first step, as weights from elsewhere
    always are.
    """
    config = setup.config
    return config.eval.at_start or bool(config.train.init_from and config.eval.every)


def is_due(every: int, step: int, last: bool) -> bool:
    """Returns True after each `every`-th step and after the last one; never if `every` is 0."""
    return bool(every) and (last or step % every == 0)
