"""Saves the weights of a published model as step 0 of a run, with the files around them."""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import config_document, identity
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.config.published.read_config import Published
from spmdtrain.config.schema import CheckpointConfig
from spmdtrain.interop.companion_files import keep_files
from spmdtrain.running.guards.bad_steps import BadSteps
from spmdtrain.running.published.as_run import Described
from spmdtrain.running.report.json_lines import write_document
from spmdtrain.running.start.directory import open_directory
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState


def save_step_0(
    run: Path, setup: Setup, published: Published, params: dict[str, jax.Array], data: Described
) -> None:
    """Writes the run directory and waits until all of it is on disk. All processes call it."""
    meta = identity(setup, data.fingerprint, {}) | {
        "sample": 0,
        "guard": BadSteps().document(),
        "imported": published.family,
    }
    state = TrainState(jnp.int32(0), params, {}, {})
    with contextlib.ExitStack() as held:
        held.enter_context(open_directory(run, fresh=False))
        checkpoints = Checkpoints(run, setup, Retention(CheckpointConfig()), by_layer=True)
        held.enter_context(contextlib.closing(checkpoints))
        if jax.process_index() == 0:
            keep_files(published.folder, run)
            write_document(run / "config.json", config_document(setup, data))
        checkpoints.save(0, state, meta)
        checkpoints.wait()
