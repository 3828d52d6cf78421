"""Imports a published model as a run: its settings, its tokenizer, and step 0 of its weights.

`train.init_from`, `sample`, `eval` and `export` read the run like any other. Its checkpoint has no
state of an optimizer, so a training begins in a directory of its own.
"""

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.checkpoints.identity import config_document, identity
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.checkpoints.store import Checkpoints, newest_step
from spmdtrain.config.errors import CheckpointError, ConfigError, DataError, UserError
from spmdtrain.config.given import as_path
from spmdtrain.config.load import from_resolved
from spmdtrain.config.published.reading import Published, read_published
from spmdtrain.config.schema import CheckpointConfig, RunConfig
from spmdtrain.data.tokenizers.tokenizer import end_of_text, open_tokenizer
from spmdtrain.interop.directory import KEPT, TOKENIZER, keep_files
from spmdtrain.interop.weights import Weights, bytes_of
from spmdtrain.processes.processes import any_process
from spmdtrain.running.guards.bad_steps import BadSteps
from spmdtrain.running.report.json_lines import write_document
from spmdtrain.running.start.directory import open_directory
from spmdtrain.train.given.from_layers import layer_shapes, params_from_layers
from spmdtrain.train.setup import Setup, shard
from spmdtrain.train.state import TrainState

LONGEST_SAMPLE = 1024  # tokens of the sequences that an imported run is evaluated on


@dataclass(frozen=True)
class Described:
    """What config.json of a run says of its data: of an import, its tokenizer."""

    tokenizer: dict[str, Any] | None
    end_of_text: int | None
    fingerprint: str = ""
    template: str | None = None


@dataclass(frozen=True)
class Imported:
    """What an import has read; `lines` say it in words."""

    setup: Setup
    params: dict[str, jax.Array]
    lines: Sequence[str]


def model_config(
    folder: str | Path, overrides: Sequence[str] = (), run: str | Path = "RUN"
) -> tuple[Published, RunConfig]:
    """Returns a published model, and the configuration of a run with it.

    `overrides` are `a.b=c` strings on top. Raises ConfigError as `read_published` does.
    """
    published = read_published(as_path(folder, "folder"))
    dtype = "bfloat16" if published.dtype == "bfloat16" else "float32"
    length = min(LONGEST_SAMPLE, published.settings["max_length"])
    data = {"corpus": "synthetic"}
    if (published.folder / TOKENIZER).is_file():
        data = {"corpus": "stdlib", "tokenizer": str(Path(run) / KEPT / TOKENIZER)}
    sections = {
        "model": published.settings,
        "precision": {"params": dtype, "compute": dtype},
        "train": {"sequence_length": length},
        "data": data,
    }
    where = str(published.folder / "config.json")
    origin = {f"{section}.{name}": where for section, values in sections.items() for name in values}
    return published, from_resolved({"config": sections, "origin": origin}, overrides)


def read_weights(
    setup: Setup, published: Published, ignored: Sequence[str] = ()
) -> tuple[dict[str, jax.Array], Weights]:
    """Returns the weights of a published model in the shards of `setup`, and where they came from.

    All processes call it; each reads its own parts. Raises CheckpointError in all of them where the
    files do not hold this model.
    """
    wrong = None
    weights = None
    try:
        weights = Weights(published, setup.config.model, layer_shapes(setup), ignored)
    except UserError as error:
        wrong = error
    if any_process(wrong is not None):
        raise wrong or CheckpointError(
            f"another process cannot read {published.folder}",
            fix="a folder that every host sees as the same one",
        )
    assert weights is not None
    return params_from_layers(setup, weights.read), weights


def import_model(
    folder: str | Path,
    run: str | Path,
    *,
    overrides: Sequence[str] = (),
    ignored: Sequence[str] = (),
    devices: Sequence[jax.Device] | None = None,
) -> Imported:
    """Imports the model in the directory `folder` as step 0 of the run directory `run`.

    `overrides` are settings on top of its own: `model.vocab` adds rows to the vocabulary, say.
    `ignored` are patterns of tensors that are left out. All processes call it. Raises UserError:
    see docs/hugging_face.md.
    """
    run = as_path(run, "run")
    started = time.monotonic()
    published, config = model_config(folder, overrides, run)
    _refuse_full(run)
    data = _described(published, config)
    setup = shard(config, devices=devices or _devices(config))
    params, weights = read_weights(setup, published, ignored)
    seconds = time.monotonic() - started
    _save(run, setup, published, params, data)
    size = sum(tensor.size for tensor in weights.tensors.values())
    head = "tied head" if config.model.tied else "a head of its own"
    lines = [
        *published.remarks,
        f"{published.folder}: {published.family}, {setup.model.size:,} parameters, "
        f"{bytes_of(weights.tensors)}; {head}",
        f"{len(weights.tensors)} of {len(weights.there)} tensors read in {seconds:.1f} s "
        f"({size / 1e6 / seconds:,.0f} MB/s)",
        f"{run}: step 0; next: spmdtrain train CONFIG --set train.init_from={run}",
    ]
    return Imported(setup, params, lines)


def _devices(config: RunConfig) -> Sequence[jax.Device] | None:
    """Returns the first devices, as many as the mesh needs; None: all."""
    sizes = config.mesh.sizes.values()
    return None if -1 in sizes else jax.devices()[: math.prod(sizes)]


def _refuse_full(run: Path) -> None:
    there = newest_step(run)
    if there is not None:
        raise CheckpointError(f"{run} holds step {there} already", fix="another --out")


def _described(published: Published, config: RunConfig) -> Described:
    """Returns the tokenizer of a published model. DataError if the model lacks rows for it."""
    if not (published.folder / TOKENIZER).is_file():
        return Described(None, None)
    name = str(published.folder)
    tokenizer = open_tokenizer(name)
    vocab = config.model.vocab or 0
    if tokenizer.size > vocab:
        raise DataError(
            f"the tokenizer of {name} has {tokenizer.size:,} tokens, and the model {vocab:,} rows",
            fix=f"spmdtrain import --set model.vocab={-(-tokenizer.size // 64) * 64}, which adds "
            "rows (the mean of the others)",
        )
    end = None
    with contextlib.suppress(DataError):  # a tokenizer need not name one
        tokenizer, end = end_of_text(tokenizer, "auto", name)
    return Described(tokenizer.spec(), end)


def _save(
    run: Path, setup: Setup, published: Published, params: dict[str, jax.Array], data: Described
) -> None:
    meta = identity(setup, data.fingerprint, {}) | {
        "sample": 0,
        "guard": BadSteps().document(),
        "imported": published.family,
    }
    state = TrainState(jnp.int32(0), params, {}, {})
    with contextlib.ExitStack() as held:
        held.enter_context(open_directory(run, fresh=False))
        checkpoints = Checkpoints(run, setup, Retention(CheckpointConfig()))
        held.enter_context(contextlib.closing(checkpoints))
        if jax.process_index() == 0:
            keep_files(published.folder, run)
            write_document(run / "config.json", config_document(setup, data))
        checkpoints.save(0, state, meta)
        checkpoints.wait()


def untied(published: Published) -> str:
    """Returns the override that gives a tied model a head of its own. ConfigError if it has one."""
    if not published.settings["tied"]:
        raise ConfigError(
            f"--untie: {published.folder} has a head of its own", fix="leaving it out"
        )
    return "model.tied=false"
