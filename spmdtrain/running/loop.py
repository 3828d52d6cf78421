"""A run from its first line to its last.

`run` is five verbs: prepare, shard, open, begin or resume, train. The loop itself is in steps.py.
"""

from collections.abc import Sequence
from pathlib import Path

import jax

from spmdtrain.config.schema import RunConfig
from spmdtrain.running.given import check_arguments
from spmdtrain.running.outcome import Outcome, conclude, nothing_to_do
from spmdtrain.running.report import stages
from spmdtrain.running.report.summary import Prediction
from spmdtrain.running.seams import (
    Hook,
    MakeModel,
    MakeSink,
    Optimizer,
    Schedule,
    Source,
    TokenLoss,
    Tokens,
)
from spmdtrain.running.start.begin import resume_or_begin
from spmdtrain.running.start.compiling import compiled_step
from spmdtrain.running.start.prepare import prepare
from spmdtrain.running.start.session import open_session
from spmdtrain.running.steps import train_with_returns
from spmdtrain.train.setup import shard
from spmdtrain.train.state import TrainState


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
    where = check_arguments(config, directory, fresh, step, make, devices, prediction, sinks, hooks)
    devices = where.devices
    seams = {"optimizer": optimizer, "schedule": schedule, "loss": loss, "data": data}
    prepared = prepare(config, where.directory, devices, seams, where.fresh, where.step)
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
