"""Computes the log-probabilities that a run, as the reference model, gives to pairs of answers.

They are stored next to the token file, so training needs no second model.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from spmdtrain.config.arguments import as_path
from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.config.settable import OF_REFERENCE
from spmdtrain.data.batches import Range, batch_ids
from spmdtrain.data.corpus import token_corpus
from spmdtrain.data.packing import PackedWindows
from spmdtrain.data.token_files.references import write_references
from spmdtrain.data.token_files.tokens import open_tokens
from spmdtrain.data.tokenizers.tokenizer import tokenizer_fingerprint
from spmdtrain.inference.trained_run import OpenedRun, open_run
from spmdtrain.models.abstract import matmuls
from spmdtrain.models.choose import MakeModel
from spmdtrain.train.gradients.pair_head import make_segment_sums


def write_reference(
    path: str | Path,
    run: str | Path,
    *,
    step: int | None = None,
    overrides: Sequence[str] = (),
    make: MakeModel | str | None = None,
    ema: bool = False,
) -> np.ndarray:
    """Writes and returns the log-probabilities of the pairs in a token file, float32 [pairs, 2].

    They are the log-probabilities of the chosen and of the rejected answers, by the weights of
    `run` after `step` steps (default: the newest). `overrides` may set mesh.* (default: one device)
    and the settings in OF_REFERENCE; a pair must fit into `train.sequence_length`. Raises
    UserError.
    """
    source = open_tokens(as_path(path, "path"))
    if not source.has_pairs:
        raise DataError(
            f"{source.path} holds no pairs of answers",
            fix="spmdtrain data prepare FILE --chat --pairs --out NAME",
        )
    opened = open_run(
        run, step=step, make=make, overrides=overrides, settable=OF_REFERENCE, ema=ema
    )
    if opened.setup.mesh.shape["pipeline"] > 1:
        raise ConfigError("the reference is computed without a pipeline", fix="mesh.fsdp or tensor")
    theirs, ours = map(tokenizer_fingerprint, (source.tokenizer_spec, opened.tokenizer_spec))
    if theirs != ours:
        raise DataError(
            f"{source.path} was made with another tokenizer than that of {run}",
            fix=f"spmdtrain data prepare FILE --chat --pairs --tokenizer {run} --out NAME",
        )
    numbers = _log_probabilities(opened, source.path)
    if jax.process_index() == 0:
        write_references(source, numbers, str(run), opened.step)
    return numbers


def _log_probabilities(opened: OpenedRun, path: str) -> np.ndarray:
    """Returns the log-probabilities of all pairs of a file, float32 [pairs, 2]."""
    setup = opened.setup
    corpus = token_corpus([path])
    every = Range(0, len(corpus.tokens))
    windows = PackedWindows(corpus, every, setup.config.train.sequence_length)
    everywhere = jax.sharding.NamedSharding(setup.mesh, jax.sharding.PartitionSpec())
    find = jax.jit(make_segment_sums(setup), out_shardings=everywhere)
    numbers = np.full((len(corpus.document_starts), 2), np.nan, np.float32)
    size = setup.config.train.global_batch
    with jax.set_mesh(setup.mesh), matmuls(setup.config.precision.compute):
        for index in range(-(-windows.windows // size)):
            ids = batch_ids(index, size)
            batch = setup.to_devices(windows.samples, ids)
            sums = jax.device_get(find(opened.params, batch)).reshape(size, -1)
            for window, of_window in zip(ids.tolist(), sums, strict=True):
                for number, (start, _) in enumerate(windows.pieces(window)):
                    pair = int(np.searchsorted(corpus.document_starts, start))
                    numbers[pair] = of_window[2 * number : 2 * number + 2]
    assert np.isfinite(numbers).all(), "every pair is in a window"
    return numbers
