"""Names the settings that differ when a run directory belongs to another run.

A checkpoint only shows that leaves differ. config.json says which settings make them differ.
"""

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spmdtrain.checkpoints.identity import (
    changes,
    check_identity,
    flat,
    refuse_other_settings,
    settings_of,
)
from spmdtrain.checkpoints.restore import read_document
from spmdtrain.config.errors import CheckpointError, UnfitError
from spmdtrain.config.run_files import given_in
from spmdtrain.config.sections import is_among, listed
from spmdtrain.data.source import Data
from spmdtrain.train.setup import Setup

NOTHING: Mapping[str, Any] = MappingProxyType({})
OPTIMIZER = "optimizer="


def recorded(run: Path) -> dict[str, Any]:
    """Returns the settings of a run by dotted name; empty if its config.json is unreadable."""
    try:
        document, named = read_document(run)
    except CheckpointError:
        return {}
    return flat(given_in(document)) | {"model.make": named.make}


@contextlib.contextmanager
def naming_settings(
    run: Path, setup: Setup, data: Data | None = None, seams: Mapping[str, Any] = NOTHING
) -> Iterator[None]:
    """Names the settings that have changed if a checkpoint of `run` does not fit.

    Without `data`, only weights are read, and the corpus may differ. `seams` are what the caller
    replaced.
    """
    try:
        yield
    except UnfitError as error:
        then = recorded(run)
        if data is not None and "imported" in error.meta:
            raise CheckpointError(
                f"{run} holds an imported model: step 0, without optimizer state",
                fix=f"--set train.init_from={run} and another --run",
            ) from None
        if data is not None:
            check_identity(error.meta, setup, data, f"the checkpoint in {run}", then)
        then_given, now_given = changes(error.meta, setup.config, seams).get(OPTIMIZER, ("", ""))
        if then_given != now_given:
            raise CheckpointError(
                error.what,
                asked=f"{OPTIMIZER}{now_given or 'none'}",
                found=f"{OPTIMIZER}{then_given or 'none'} in the checkpoint",
                fix="the optimizer of that run, or another --run",
            ) from None
        names = [*_of_model(setup, then), *_of_optimizer(setup, then)] if then else []
        now = settings_of(setup.config)
        changed = [name for name in names if then.get(name) != now.get(name)]
        fix = ""
        of_model = [name for name in changed if name.startswith("model.")]
        if of_model and _starts_from(run, setup):  # of which it may train other parts
            changed = of_model
            fix = f"--set {shlex.quote(f'model.from={run}')}"
        refuse_other_settings(error.what, changed, setup.config, then, fix)
        raise


def _starts_from(run: Path, setup: Setup) -> bool:
    """Returns True if the run starts from the weights of `run`."""
    source = setup.config.train.init_from
    return source is not None and Path(os.path.expanduser(source)) == run


def _of_model(setup: Setup, then: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*settings_of(setup.config), *then])
    of_model = (name for name in names if name.startswith(("model.", "finetune.")))
    of_no_array = listed("of_no_array")
    return [name for name in of_model if not is_among(name, of_no_array)]


def _of_optimizer(setup: Setup, then: Mapping[str, Any]) -> list[str]:
    if then.get("optimizer.name") != setup.config.optimizer.name:
        return ["optimizer.name"]
    return [f"optimizer.{name}" for name in ("moment_dtype", "groups", "momentum", "basis_largest")]
