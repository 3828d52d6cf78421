"""Saves a training state that was made or changed by hand, in the form a run would save it."""

import contextlib
from pathlib import Path

import jax

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import config_document, identity
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.config.arguments import as_run, as_whole
from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.run_files import CONFIG, newest_step
from spmdtrain.config.schema import CheckpointConfig
from spmdtrain.data.indices import LAST_SAMPLE
from spmdtrain.data.source import Source, Tokens, open_data
from spmdtrain.running.guards.bad_steps import BadSteps
from spmdtrain.running.report.json_lines import write_document
from spmdtrain.running.start.directory import open_directory
from spmdtrain.train.external_arrays.place_state import placed
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState

MOST_KEPT = 2**31 - 1  # a caller who saves by hand also deletes by hand


def save(
    setup: Setup,
    state: TrainState,
    directory: str | Path,
    *,
    data: Source | Tokens | None = None,
    sample: int | None = None,
) -> None:
    """Saves the state in a run directory under its own step, and waits until it is on disk.

    `restore`, `weights`, `generate` and `evaluate` read it, and `run` resumes from it. All
    processes must call this.

    Args:
      data: what `run` gets as `data=`.
      sample: the global index of the first sample of the next step; default: the number of samples
        that this many steps read.

    Raises ConfigError if the state does not belong to this setup, and CheckpointError if the
    directory holds this step or a later one.
    """
    directory = as_run(directory, "directory")
    if sample is not None:
        sample = as_whole(sample, "sample", 0, LAST_SAMPLE)
    state = placed(setup, state)
    step = as_whole(state.step, "state.step", 0)
    newest = newest_step(directory)
    if newest is not None and newest >= step:
        raise CheckpointError(
            f"{directory} already holds step {newest}",
            asked=f"step {step}",
            fix="another directory",
        )
    _, opened = open_data(setup.config, data)
    if sample is None:
        sample = setup.config.train.samples_before(step)
    meta = identity(setup, opened.fingerprint, {"loss": setup.loss, "data": data})
    meta |= {"sample": sample, "guard": BadSteps().document()}
    with contextlib.ExitStack() as held:
        held.enter_context(open_directory(directory, fresh=False))
        checkpoints = Checkpoints(directory, setup, Retention(CheckpointConfig(keep=MOST_KEPT)))
        held.enter_context(contextlib.closing(checkpoints))
        if newest is not None:
            checkpoints.recall(newest)
        if jax.process_index() == 0:
            write_document(directory / CONFIG, config_document(setup, opened))
        checkpoints.save(step, state, meta)
        checkpoints.wait()
