"""Runs a training run from its first line to its last.

`run` is five verbs: prepare, shard, open (which resumes or begins), compile, train. The loop of
steps is `take_steps`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from spmdtrain.config.run_files import PREDICTED
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.source import Data, Source, Tokens
from spmdtrain.models.choose import MakeModel
from spmdtrain.running.device_batches import batches
from spmdtrain.running.outcome import Outcome, conclude, nothing_to_do
from spmdtrain.running.report import stages
from spmdtrain.running.report.reporter import Hook
from spmdtrain.running.report.sinks import MakeSink
from spmdtrain.running.report.summary import Prediction
from spmdtrain.running.ride import called
from spmdtrain.running.riders import Rider, Step, riders_of
from spmdtrain.running.rollback import Detour
from spmdtrain.running.saves import Saves
from spmdtrain.running.start import kernels
from spmdtrain.running.start.begin import Session, open_session
from spmdtrain.running.start.compiling import compiled_step, record_of
from spmdtrain.running.start.prepare import Prepared, check_arguments, prepare
from spmdtrain.running.start.sharding import shard_with_weights
from spmdtrain.running.watch import Evaluate, Watch
from spmdtrain.train.batch import Batch
from spmdtrain.train.evaluation import make_eval_figures
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState
from spmdtrain.train.token_loss import TokenLoss
from spmdtrain.train.updates.learning_rates import LearningRate
from spmdtrain.train.updates.optimizers import Optimizer


def run(  # noqa: PLR0913 - one keyword for each thing that a caller may replace
    config: RunConfig,
    directory: str | Path,
    *,
    fresh: bool = False,
    step: int | None = None,
    make: MakeModel | str | None = None,
    devices: Sequence[jax.Device] | None = None,
    prediction: Prediction | None = None,
    optimizer: Optimizer | None = None,
    learning_rate: LearningRate | None = None,
    loss: TokenLoss | None = None,
    data: Source | Tokens | None = None,
    sinks: Sequence[MakeSink] = (),
    hooks: Sequence[Hook] = (),
    state: TrainState | None = None,
) -> Outcome:
    """Trains until `train.steps`, resuming from the newest checkpoint in `directory`, if any.

    On a signal (interrupt.py) it saves after the step in flight and ends. At the end it summarises
    what was predicted, compiled and measured. Raises UserError for a mistake of the caller or the
    user.

    A part that is not given is the one that `config.own` names, if any.

    Args:
      fresh: set an older run in `directory` aside and start from scratch.
      step: go back to this checkpoint; those of later steps are set aside.
      make: `make(config, rngs)` builds the model; default: `model.make`, see `shard`.
      devices: where to train; default: all.
      prediction: what the summary compares the measurements with.
      optimizer: an optax transformation, or a function of path and parameter; see `shard`.
      learning_rate: `learning_rate(step)`, the learning rate of the 0-based step; see `shard`.
      loss: `loss(logits, targets)`, the loss of each token; see `shard`.
      data: `tokens(seed, sample index)`, the ids [sequence_length + 1] of a sample, or a `Source`,
        which also has validation data; replaces `[data]`. It must be deterministic.
      sinks: more destinations for figures and events, in addition to the files of the run and
        `log.sinks`; process 0 opens each as `sink(directory, config, completed steps)`, see
        report/sinks.py.
      hooks: each is called as `hook(event, step, figures)` in every process after a step ("step"),
        after an evaluation ("evaluated") and after a save is complete on disk ("saved"). If one
        returns True, the run saves after the step in flight and stops.
      state: the state that a new run starts from, instead of fresh weights; it is not modified.
        The run starts at the state's own step, as if it had taken the steps up to there.
    """
    check_arguments(config, make, prediction, sinks, hooks)
    seams = {"optimizer": optimizer, "learning_rate": learning_rate, "loss": loss, "data": data}
    prepared = prepare(
        config, directory, devices, seams, sinks=sinks, hooks=hooks, fresh=fresh, step=step
    )
    stages.enter("making the model")
    setup = make_setup(prepared, make)
    riders = riders_of(prepared.config)
    own_sinks = [rider.sink(prepared) for rider in riders if rider.sink]
    around = [rider.around(prepared) for rider in riders if rider.around]
    with kernels.decided(setup), open_session(prepared, setup, state, own_sinks, around) as session:
        if idle := nothing_to_do(session):
            return idle
        if prediction:
            session.reporter.write(PREDICTED, prediction.document())
        compiled, report = compiled_step(session)
        outcome = train(session, compiled, riders)
        conclude(session, outcome, report, prediction)
        return outcome


def make_setup(prepared: Prepared, make: MakeModel | str | None) -> Setup:
    """Returns the setup of a run, with the other weights that it reads."""
    parts = {name: part for name, part in prepared.seams.items() if name != "data"}
    tokenizer = prepared.data.tokenizer
    return shard_with_weights(prepared.config, make, prepared.devices, tokenizer, **parts)


def train(session: Session, step: Step, riders: Sequence[Rider] = ()) -> Outcome:
    """Takes the steps of a run, and takes them up again wherever a detour leads.

    `step(state, batch)` is the compiled step.
    """
    setup, data, reporter = session.setup, session.prepared.data, session.reporter
    evaluate = make_evaluate(setup, data)
    record = record_of(session)
    state, done, sample = session.state, session.done, session.sample
    with session.interrupt as interrupt:
        for rider in riders:
            step = rider.step(session, step) if rider.step else step
        while True:
            saves = session.saves(record, done, sample)
            with riding(session, saves, riders):
                saw = called(saves.rides, "saw")
                try:
                    with batches(setup, data, done, sample, saw=saw) as ahead:
                        watch = Watch(setup, done, evaluate, saves, reporter, interrupt)
                        return take_steps(watch, step, state, ahead)
                except Detour as error:
                    detour = error.with_traceback(None)  # the frames of the traceback hold a state
                state, done, sample = detour.destination(saves)


def make_evaluate(setup: Setup, data: Data) -> Evaluate:
    """Returns `evaluate(state)`, which returns the losses, and the figures of `eval.tasks`."""
    losses = make_eval_figures(setup, data)
    if not setup.config.eval.tasks:
        return losses
    from spmdtrain.inference.tasks import with_tasks

    return with_tasks(losses, setup, data)


@contextlib.contextmanager
def riding(session: Session, saves: Saves, riders: Sequence[Rider]) -> Iterator[None]:
    """Lets the riders put their hooks between the steps that are taken inside."""
    with contextlib.ExitStack() as rides:
        saves.rides = [
            rides.enter_context(rider.ride(session, saves)) for rider in riders if rider.ride
        ]
        rides.enter_context(session.reporter.telling(called(saves.rides, "hook")))
        yield


def take_steps(watch: Watch, step: Step, state: TrainState, batches: Iterator[Batch]) -> Outcome:
    """Takes steps from `state` on until the run ends: batch, step, figures, and whatever is due.

    Raises Detour to continue from another state. If a hook stops the run, it ends after the step in
    flight.
    """
    done = int(state.step)
    with watch:
        ending = watch.begin(done, state)
        while not ending:
            done += 1
            state = watch.step(done, step, state, batches)
            watch.evaluate_if_due(done, state)
            ending = watch.ending(done)
            watch.save_if_due(done, state, ending)
        watch.end(done, ending)
    return Outcome(ending, done, watch.median_seconds())
