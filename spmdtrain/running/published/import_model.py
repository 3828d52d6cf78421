"""Imports a published model as a run: its settings, its tokenizer, and step 0 of its weights.

`train.init_from`, `sample`, `eval` and `export` read the run like any other. Its checkpoint has no
optimizer state, so training begins in another directory.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from spmdtrain.config.arguments import as_path
from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.published.write_config import remarks_on_export
from spmdtrain.config.run_files import newest_step
from spmdtrain.config.schema import RunConfig
from spmdtrain.interop.published_weights import bytes_of
from spmdtrain.running.published.as_run import described, model_config
from spmdtrain.running.published.read_weights import read_weights
from spmdtrain.running.published.room import check_room
from spmdtrain.running.published.save_step_0 import save_step_0
from spmdtrain.running.start.directory import refuse_published
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard

# Called with the weights before anything is written: returns a line about them, or raises.
Check = Callable[[Setup, dict[str, jax.Array]], str]


@dataclass(frozen=True)
class Imported:
    """The result of reading a published model; `lines` describe it in words."""

    setup: Setup
    params: dict[str, jax.Array]
    lines: Sequence[str]


def import_model(
    folder: str | Path,
    run: str | Path,
    *,
    overrides: Sequence[str] = (),
    ignored: Sequence[str] = (),
    devices: Sequence[jax.Device] | None = None,
    check: Check | None = None,
) -> Imported:
    """Imports the model in the directory `folder` as step 0 of the run directory `run`.

    `overrides` are settings that replace those of the model; e.g. `model.vocab` adds rows to the
    vocabulary. `ignored` are patterns of tensors that are left out. `check` is called with the
    weights before the run is written, so one that raises leaves nothing behind. All processes call
    it. Raises UserError: see docs/hugging_face.md.
    """
    run = as_path(run, "run")
    started = time.monotonic()
    published, config = model_config(folder, overrides, run, ignored)
    _refuse_full(run)
    data = described(published, config)
    setup = shard(config, devices=devices or _devices(config))
    check_room(run, setup)
    params, weights = read_weights(setup, published, ignored)
    seconds = time.monotonic() - started
    checked = [] if check is None else [check(setup, params)]
    save_step_0(run, setup, published, params, data)
    size = sum(tensor.size for tensor in weights.tensors.values())
    head = "tied head" if config.model.tied else "a separate head"
    lines = [
        *published.remarks,
        *remarks_on_export(config.model, published),
        *data.remarks,
        f"{published.folder}: {published.family}, {setup.model.size:,} parameters, "
        f"{bytes_of(weights.tensors)}; {head}",
        f"{len(weights.tensors)} of {len(weights.in_files)} tensors read in {seconds:.1f} s "
        f"({size / 1e6 / seconds:,.3g} MB/s)",
        *checked,
        f"{run}: step 0; next: spmdtrain train CONFIG --set train.init_from={run}",
    ]
    return Imported(setup, params, lines)


def _devices(config: RunConfig) -> Sequence[jax.Device] | None:
    """Returns the first devices, as many as the mesh needs; None stands for all.

    Several processes take all: one without a device of the mesh would wait for ever.
    """
    sizes = config.mesh.sizes.values()
    return None if -1 in sizes or jax.process_count() > 1 else jax.devices()[: math.prod(sizes)]


def _refuse_full(run: Path) -> None:
    refuse_published(run, "another --out")
    newest = newest_step(run)
    if newest is not None:
        raise CheckpointError(f"{run} already holds step {newest}", fix="another --out")
