"""Reads the weights of the teacher that a run names: another run, or a published model."""

import contextlib
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import code_of
from spmdtrain.checkpoints.leaves.fingerprint import Fingerprint, fingerprint, fingerprints
from spmdtrain.checkpoints.model_code import check_model_code
from spmdtrain.checkpoints.restore import read_step
from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.published.model_from import is_run
from spmdtrain.config.published.read_config import read_published
from spmdtrain.config.schema import RunConfig
from spmdtrain.running.published.read_weights import read_weights
from spmdtrain.running.same_tokenizer import check_same
from spmdtrain.train.distillation.run_teacher import teacher_of, with_opened
from spmdtrain.train.setup import Setup, check_setup

SHOWN = 16  # hex digits of a fingerprint


def check_teacher(config: RunConfig, tokenizer: dict[str, Any] | None) -> None:
    """Raises ConfigError if the teacher of a run has another tokenizer than the data.

    `tokenizer`: the spec of that of the data, None if they are ids.
    """
    name = config.distill.teacher
    assert name is not None, "the run names a teacher"
    folder = Path(os.path.expanduser(name))
    fix = "a teacher with the tokenizer of the data"
    check_same(f"distill.teacher={name!r}", folder, tokenizer, "the data", fix)


def with_teacher(setup: Setup) -> Setup:
    """Returns the setup with the weights of its teacher opened, so that states can hold them.

    They are read when a state is made: by `init_state`, `restore` or `run`. Without
    `distill.teacher` the setup is returned unchanged. Raises ConfigError if it is no setup.
    """
    check_setup(setup)
    name, teacher = setup.config.distill.teacher, teacher_of(setup)
    if name is None or teacher is None:
        return setup
    on_disk = TeacherWeights(Path(os.path.expanduser(name)), teacher.setup)
    return with_opened(setup, on_disk)


class TeacherWeights:
    """The weights in the directory of a run or of a published model, in the shards of `setup`.

    Of a run they are those of its newest intact checkpoint when they are first read, and stay those
    if the run goes on. All processes read together. Raises UserError if there are none, or if they
    have changed since they were first read.
    """

    def __init__(self, folder: Path, setup: Setup):
        self._folder = folder
        self._setup = setup
        self._step: int | None = None
        self._fingerprint = ""

    def read(self) -> dict[str, jax.Array]:
        params = self._of_run() if is_run(self._folder) else self._published()
        fingerprint = fingerprint_of(self._setup, params)
        if self._fingerprint not in ("", fingerprint):
            raise CheckpointError(
                f"the teacher in {self._folder} has changed since it was first read",
                asked=self._fingerprint,
                found=fingerprint,
                fix="a copy of it that nobody writes to",
            )
        self._fingerprint = fingerprint
        return params

    def fingerprint(self) -> str:
        if not self._fingerprint:
            self.read()
        return self._fingerprint

    def _of_run(self) -> dict[str, jax.Array]:
        folder, setup = self._folder, self._setup
        with contextlib.closing(Checkpoints(folder, setup, keep=None)) as checkpoints:
            self._step, (params, meta) = read_step(
                checkpoints,
                folder,
                self._step,
                lambda at: checkpoints.restore_params(at, setup.state.params),
            )
        check_model_code(meta["model_code"], code_of(setup), f"step {self._step} of {folder}")
        return params

    def _published(self) -> dict[str, jax.Array]:
        return read_weights(self._setup, read_published(self._folder))[0]


def fingerprint_of(setup: Setup, params: dict[str, jax.Array]) -> str:
    """Returns a text that tells these weights at rest from others of their dtypes, on any mesh."""
    of_padded = fingerprints(params)
    leaves = {
        path: [
            *setup.padding.of_model[path],
            str(x.dtype),
            *_unpadded(setup, path, x, of_padded[path]),
        ]
        for path, x in params.items()
    }
    return hashlib.sha256(json.dumps(leaves, sort_keys=True).encode()).hexdigest()[:SHOWN]


def _unpadded(setup: Setup, path: str, x: jax.Array, of_padded: Fingerprint) -> Fingerprint:
    """Returns the fingerprint of a weight without the rows of zeros that the mesh appended.

    It is a sum over elements, so those of the zeros are subtracted.
    """
    shape = setup.padding.of_model[path]
    if x.shape == shape:
        return of_padded
    assert x.shape[1:] == shape[1:], "only rows of a vocabulary are appended to a frozen weight"
    elements = math.prod(shape)
    zeros = fingerprint(np.zeros(x.size - elements, x.dtype), elements)
    first, second = ((ours - theirs) % 2**32 for ours, theirs in zip(of_padded, zeros, strict=True))
    return first, second
