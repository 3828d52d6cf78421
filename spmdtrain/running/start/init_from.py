"""Reads the weights of another run, from which a new one starts: `train.init_from`."""

import contextlib
from pathlib import Path

import jax

from spmdtrain.checkpoints.identity import code_of, model_changes
from spmdtrain.checkpoints.meta import has_fingerprints
from spmdtrain.checkpoints.model_code import check_model_code
from spmdtrain.checkpoints.restore import read_newest_good
from spmdtrain.checkpoints.store import Checkpoints
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.running.start.other_run import naming_settings
from spmdtrain.train.setup import Setup


def weights_of(run: Path, setup: Setup, reporter: Reporter) -> dict[str, jax.Array]:
    """Returns the parameters of the newest intact checkpoint of another run.

    It may lack those of adapters, and no others.
    """
    reading = contextlib.closing(Checkpoints(run, setup, keep=None))

    def asked_of(step: int) -> dict[str, jax.ShapeDtypeStruct]:
        there = checkpoints.parameters(step)
        of_model = setup.model.parameters
        return {
            path: x
            for path, x in setup.state.params.items()
            if path in there or not of_model[path].is_of_adapter
        }

    with reading as checkpoints, naming_settings(run, setup):
        _, (params, meta), line = read_newest_good(
            checkpoints, run, lambda step: checkpoints.restore_params(step, asked_of(step))
        )
    if line:
        reporter.say(line)
    if begun := len(setup.state.params) - len(params):
        reporter.say(f"{run} has no adapters: {begun} arrays of them begin")
    asked = f"train.init_from='{run}'"
    for line in check_model_code(meta.get("model_code"), code_of(setup), asked):
        reporter.say(line)
    if not has_fingerprints(meta):
        reporter.say(f"the weights of {run} have no fingerprints yet: they could not be verified")
    for name, then, now in model_changes(meta, setup.config):
        reporter.say(f"the weights of {run} were trained with {name}={then}; here it is {now}")
    return params
