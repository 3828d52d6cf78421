"""Opens a trained run for reading: its settings, its model, its weights, its tokenizer."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import code_of
from spmdtrain.checkpoints.model_code import check_model_code
from spmdtrain.checkpoints.restore import read_document, read_step, refuse_own_code
from spmdtrain.config.arguments import as_flag, as_run, as_step, as_texts
from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.load import COMMAND_LINE, as_overrides, from_resolved
from spmdtrain.config.schema import MeshConfig, RunConfig
from spmdtrain.config.settable import OF_DEVICES, check_settable
from spmdtrain.config.whole_run import leave_out, of_whole_run
from spmdtrain.data.tokenizers.tokenizer import Tokenizer, from_spec
from spmdtrain.models.choose import MakeModel, check_make
from spmdtrain.parallel.axes import BATCH_AXES, batch_shards
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard

SEQUENCES = 8  # per batch shard, if no number is given


@dataclass(frozen=True)
class OpenedRun:
    """An opened run, as `open_run` returns it.

    `params` are the weights after `step`, in the shards of `setup`.
    """

    run: Path
    step: int
    setup: Setup
    params: dict[str, jax.Array]
    tokenizer_spec: dict | None
    end_of_text: int | None = None  # the id that ends each document of its data
    eval_windows: int | None = None  # per validation split; None: all, see RunConfig
    template: str | dict | None = None  # the spec of the template of its conversations
    begin_of_text: int | None = None  # the id that begins each document of its data

    @property
    def config(self) -> RunConfig:
        return self.setup.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run.

        Raises CheckpointError if it was trained on ids that have no text.
        """
        if self.tokenizer_spec is None:
            raise CheckpointError(
                f"{self.run} was trained on tokens without a tokenizer: there is no text",
                fix="its ids, by spmdtrain.generate in Python",
            )
        return from_spec(self.tokenizer_spec)

    def with_begin(self, ids: np.ndarray) -> np.ndarray:
        """Returns a text that begins like the documents of the run: with a begin of text, if any.

        A text that begins with that token already is returned as it is.
        """
        begin = self.begin_of_text
        if begin is None or (len(ids) and ids[0] == begin):
            return ids
        return np.insert(ids, 0, begin)


def open_run(
    run: str | Path,
    *,
    step: int | None = None,
    make: MakeModel | str | None = None,
    overrides: Sequence[str] = (),
    settable: Sequence[str] = OF_DEVICES,
    ema: bool = False,
    with_pairs: bool = False,
    own: Sequence[str] = (),
) -> OpenedRun:
    """Returns the weights of `run` after `step` steps, ready to compute with.

    Without `step` it is the newest intact one: see `read_step` in restore.py. `make`: the model of
    the run, a class or its name, as in `model.make`. The mesh is one device unless `overrides` set
    `mesh.*`; they may set only the keys in `settable`. With `ema` the weights are the average that
    was kept with `optimizer.ema`. A run that learned from pairs of answers is read as one that
    learned from texts, unless `with_pairs`. `own` are the files and modules whose code may run if
    [own] of the run names it. Raises UserError.
    """
    run, step, ema = as_run(run, "run"), as_step(step), as_flag(ema, "ema")
    overrides = as_overrides(overrides)
    settable = as_texts(settable, "settable", "mesh.")
    check_make(make)
    check_settable(overrides, settable)
    saved, named = read_document(run, as_texts(own, "own", "mine.py"))
    if not make:
        refuse_own_code(run, saved, named)
    # Mesh and attention depend on the devices of the training, so they are not taken from the run.
    saved["config"]["mesh"] = MeshConfig().model_dump()
    saved["config"]["model"]["attention"] = "auto"
    saved["config"]["train"] |= {"zero": 0, "microbatch": None}
    leave_out(saved["config"])
    dropped = ("mesh.", "model.attention", "train.zero", "train.microbatch", *of_whole_run())
    if not with_pairs:
        of_pairs = [name for name in saved["config"]["train"] if name.startswith("preference_")]
        saved["config"]["train"] |= {"preference": "none"} | dict.fromkeys(of_pairs)
        dropped = (*dropped, "train.preference")
    saved["origin"] = {
        key: str(where) for key, where in saved["origin"].items() if not key.startswith(dropped)
    }
    trained_batch = saved["config"]["train"]["global_batch"]
    config = from_resolved(saved, overrides)
    # As many windows as the run itself evaluates on, however many are computed together here.
    as_trained = config.train.model_copy(update={"global_batch": trained_batch})
    windows = config.model_copy(update={"train": as_trained}).eval_windows
    setup = shard(_with_batch(config), make, _devices(config))
    with contextlib.closing(Checkpoints(run, setup, keep=None)) as checkpoints:
        at, (params, meta) = read_step(
            checkpoints,
            run,
            step,
            lambda at: checkpoints.restore_params(at, setup.state.params, ema=ema),
        )
    check_model_code(meta["model_code"], code_of(setup), f"step {at} of {run}")
    begin, end = saved.get("begin_of_text"), saved.get("end_of_text")
    template = saved.get("template")
    if not isinstance(template, str | dict | None):
        raise CheckpointError(f"{run}/config.json is damaged: template={template!r:.60}")
    tokenizer = saved.get("tokenizer")
    return OpenedRun(run, at, setup, params, tokenizer, end, windows, template, begin)


def _with_batch(config: RunConfig) -> RunConfig:
    """Returns the config with a batch that this mesh divides, unless one was asked for."""
    if config.origin.get("train.global_batch") == COMMAND_LINE:
        return config
    sizes = config.mesh.sizes
    filled = any(sizes[axis] == -1 for axis in BATCH_AXES)
    shards = jax.device_count() if filled else batch_shards(sizes)
    train = config.train.model_copy(update={"global_batch": SEQUENCES * shards})
    return config.model_copy(update={"train": train})


def _devices(config: RunConfig) -> Sequence[jax.Device] | None:
    """Returns the first devices, as many as the mesh needs."""
    sizes = config.mesh.sizes.values()
    return None if -1 in sizes else jax.devices()[: math.prod(sizes)]
