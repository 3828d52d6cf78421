"""Runs a training run from its first line to its last.

`run` is five verbs: prepare, shard, open, resume or begin, train. The loop itself is in steps.py.
"""

from collections.abc import Sequence
from pathlib import Path

import jax

from spmdtrain.config.run_files import PREDICTED
from spmdtrain.config.schema import RunConfig
from spmdtrain.running.distillation.teacher_weights import shard_with_teacher
from spmdtrain.running.outcome import Outcome, conclude, nothing_to_do
from spmdtrain.running.record.bundle import bundled_at_crash, bundling
from spmdtrain.running.report import stages
from spmdtrain.running.report.summary import Prediction
from spmdtrain.running.run_arguments import check_arguments
from spmdtrain.running.seams import (
    Hook,
    LearningRate,
    MakeModel,
    MakeSink,
    Optimizer,
    Source,
    TokenLoss,
    Tokens,
    TrainState,
)
from spmdtrain.running.start import kernels
from spmdtrain.running.start.begin import resume_or_begin
from spmdtrain.running.start.compiling import compiled_step
from spmdtrain.running.start.prepare import prepare
from spmdtrain.running.start.session import open_session
from spmdtrain.running.steps import train_with_returns


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
    where = check_arguments(config, directory, fresh, step, make, devices, prediction, sinks, hooks)
    devices = where.devices
    seams = {"optimizer": optimizer, "learning_rate": learning_rate, "loss": loss, "data": data}
    prepared = prepare(config, where.directory, devices, seams, where.fresh, where.step)
    stages.enter("making the model")
    parts = {name: each for name, each in prepared.seams.items() if name != "data"}
    tokenizer = prepared.data.tokenizer
    setup = shard_with_teacher(prepared.config, make, devices, tokenizer, **parts)
    sinks = [*where.sinks, bundling(prepared.data)]
    with (
        kernels.decided(setup),
        bundled_at_crash(prepared.directory, setup.config, prepared.data),
        open_session(prepared, setup, state, sinks, where.hooks) as session,
    ):
        start = resume_or_begin(session)
        if idle := nothing_to_do(session, start):
            return idle
        if prediction:
            session.reporter.write(PREDICTED, prediction.document())
        compiled, report = compiled_step(session)
        outcome = train_with_returns(session, start, compiled)
        conclude(session, start, outcome, report, prediction)
        return outcome
