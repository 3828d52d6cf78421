"""A run from its first line to its last.

`run` is five verbs: prepare, shard, open, begin or resume, train. `train` is the loop.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from spmdtrain.checkpoints.identity import identity
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.batches import ReadAhead, batch_ids
from spmdtrain.data.source import Data, Source, Tokens
from spmdtrain.models.choose import MakeModel
from spmdtrain.processes import pulse
from spmdtrain.running.guards.bad_steps import GoBack
from spmdtrain.running.guards.interrupt import Interrupt
from spmdtrain.running.outcome import Outcome, conclude, nothing_to_do
from spmdtrain.running.report import stages
from spmdtrain.running.report.reporter import Hook, Reporter, check
from spmdtrain.running.report.sinks import MakeSink
from spmdtrain.running.report.summary import Prediction
from spmdtrain.running.rollback import go_back
from spmdtrain.running.saves import Saves
from spmdtrain.running.start.begin import Start, resume_or_begin
from spmdtrain.running.start.compiling import compiled_step
from spmdtrain.running.start.prepare import prepare
from spmdtrain.running.start.session import Session, open_session
from spmdtrain.running.watch import Evaluate, Watch
from spmdtrain.train import evaluation
from spmdtrain.train.batch import to_devices
from spmdtrain.train.setup import Setup, shard
from spmdtrain.train.state import TrainState
from spmdtrain.train.token_loss import TokenLoss
from spmdtrain.train.updates.learning_rates import Schedule
from spmdtrain.train.updates.optimizers import Optimizer


def run(  # noqa: PLR0913 - one keyword for each thing that a caller may exchange
    config: RunConfig,
    directory: str | Path,
    *,
    fresh: bool = False,
    step: int | None = None,
    make: MakeModel | str | None = None,
    devices: Sequence[jax.Device] | None = None,
    prediction: Prediction | None = None,
    optimizer: Optimizer | None = None,
    schedule: Schedule | None = None,
    loss: TokenLoss | None = None,
    data: Source | Tokens | None = None,
    sinks: Sequence[MakeSink] = (),
    hooks: Sequence[Hook] = (),
    state: TrainState | None = None,
) -> Outcome:
    """Trains until `train.steps`, going on from the newest checkpoint below `directory`.

    A signal (interrupt.py) makes it save after the step in flight and end. The end is a summary of
    what was compiled and measured. Raises UserError for what a caller or a user did wrong.

    Args:
      fresh: set an older run in `directory` aside and begin anew.
      step: go back to this checkpoint; those of later steps are set aside.
      make: `make(config, rngs)` builds the model; default: `model.make`, see `shard`.
      devices: where to train; all unless given.
      prediction: what the summary puts beside what was measured.
      optimizer: an optax transformation, or a function of path and parameter; see `shard`.
      schedule: `schedule(step)`, the learning rate of the 0-based step; see `shard`.
      loss: `loss(logits, targets)`, the losses of tokens; see `shard`.
      data: `tokens(seed, sample index)`, the ids [sequence_length + 1] of a sample, or a `Source`
        with validation beside; takes the place of `[data]`. It must always give the same.
      sinks: where figures and events go beside the files of the run and `log.sinks`; each is
        opened by process 0 as `sink(directory, config, completed steps)`, see report/sinks.py.
      hooks: each is called as `hook(event, step, figures)` in every process after a "step", after
        an evaluation ("evaluated") and after a save is complete on disk ("saved"). One that
        returns True stops the run after the step in flight; it is saved.
      state: what a new run begins with, in the place of fresh weights; it stays as it is. Its step
        says where the run begins, as if it had taken those steps.
    """
    check(sinks, hooks)
    seams = {"optimizer": optimizer, "schedule": schedule, "loss": loss, "data": data}
    prepared = prepare(config, Path(directory), devices, seams, fresh, step)
    stages.enter("making the model")
    setup = shard(prepared.config, make, devices, optimizer=optimizer, schedule=schedule, loss=loss)
    with open_session(prepared, setup, state, sinks, hooks) as session:
        start = resume_or_begin(session)
        if idle := nothing_to_do(session, start):
            return idle
        compiled, report = compiled_step(session)
        outcome = train_with_returns(session, start, compiled)
        conclude(session, start, outcome, report, prediction)
        return outcome


def train_with_returns(session: Session, start: Start, step: Callable) -> Outcome:
    """`train`, and again from an older checkpoint wherever the guard goes back to one."""
    setup = session.setup
    data = session.prepared.data
    reporter = session.reporter
    evaluate = evaluation.make_eval_figures(setup, data)
    kept = identity(setup, data.fingerprint, session.prepared.seams)
    state, done, sample = start.state, start.step, start.sample
    with Interrupt(setup.mesh) as interrupt:
        while True:
            saves = Saves(
                setup,
                kept,
                session.checkpoints,
                reporter,
                done,
                sample,
                start.record,
                start.early_stop,
            )
            try:
                with batches(setup, data, done, sample) as ahead:
                    return train(setup, state, step, evaluate, ahead, saves, reporter, interrupt)
            except GoBack as error:
                bad = error.with_traceback(None)  # whose frames hold a state
            state, done, sample = go_back(bad, setup, saves, reporter)


def train(
    setup: Setup,
    state: TrainState,
    step: Callable,
    evaluate: Evaluate,
    ahead: Iterator,
    saves: Saves,
    reporter: Reporter,
    interrupt: Interrupt,
) -> Outcome:
    """The loop, from `state` on. Raises GoBack where it is to go on from an older checkpoint.

    `step(state, batch)` is the compiled step, and `ahead` has the batches. A hook that stops the
    run ends it with the step in flight.
    """
    config = setup.config
    done = int(state.step)
    ending = None
    with Watch(setup, done, evaluate, saves, reporter, interrupt) as watch:
        if config.eval.at_start and not saves.checkpoints.steps():
            watch.evaluate(done, state)
        while not ending:
            done += 1
            state = watch.step(done, step, state, ahead)
            if is_due(config.eval.every, done, last=done == config.train.steps):
                watch.evaluate(done, state)
            ending = watch.ending(done)
            watch.save_if_due(done, state, ending)
        pulse.tell(pulse.END, done)
        saves.finish()
    reporter.event(ending, done)
    return Outcome(ending, done, watch.median_seconds())


def is_due(every: int, step: int, last: bool) -> bool:
    """True after each `every`-th step and after the last one; never if `every` is 0."""
    return bool(every) and (last or step % every == 0)


def batches(setup: Setup, data: Data, step: int, sample: int) -> ReadAhead:
    """Device batches of `step` and the steps after it.

    The batch of `step` begins at the global sample index `sample`.
    """
    config = setup.config
    samples = data.train_samples(config)

    def make(at: int):
        ids = sample + batch_ids(at - step, config.train.global_batch)
        return to_devices(samples, ids, setup.batch_shape, setup.mesh, setup.rules)

    return ReadAhead(make, step, config.data.read_ahead)
