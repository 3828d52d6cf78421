"""Evaluates how well a trained run predicts a text: loss, perplexity, bits per byte.

Any files will do, and any mesh.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.data.batches import Range, batch_ids
from spmdtrain.data.corpus import Corpus, token_corpus
from spmdtrain.data.documents import find_inputs, texts_in
from spmdtrain.data.source import CorpusData, EvalSet, Windows, open_data
from spmdtrain.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_fingerprint
from spmdtrain.models.choose import MakeModel
from spmdtrain.running.opened import OF_DEVICES, OpenedRun, open_run
from spmdtrain.train.batch import to_devices
from spmdtrain.train.step import make_eval_step

SETTABLE = (
    *OF_DEVICES,
    "data.packing",
    "data.validation_fraction",
    "pipeline.",
    "eval.batches",
    "precision.compute",
    "train.global_batch",
    "train.microbatch",
    "train.sequence_length",
)


def evaluate(
    run: str | Path,
    paths: Sequence[str] = (),
    *,
    step: int | None = None,
    field: str = "text",
    overrides: Sequence[str] = (),
    make: MakeModel | str | None = None,
    ema: bool = False,
) -> dict[str, Any]:
    """The loss of `run` after `step` steps (default: the newest), on validation data or files.

    `paths` are texts as `data prepare` reads them (`field` names the texts of a table or of JSON
    lines), which the run's own tokenizer encodes, or token files that were made with it; all of
    their tokens count. `overrides` may set mesh.* (default: one device) and what is in SETTABLE;
    `make` is what the run was trained with, a class or its name as in `model.make`. With `ema` it
    is the loss of the average of the weights, which the run has with `optimizer.ema`.

    Gives "loss" (nats a token), "perplexity", "bits_per_byte" (None where ids mean no text, or the
    model restores some of the tokens), "tokens" and "bytes" that were predicted, and "step". Of a
    mixture the loss is the mean of its sources' by their shares, and "loss/NAME" is that of each.
    Raises UserError.
    """
    opened = open_run(run, step=step, make=make, overrides=overrides, settable=SETTABLE, ema=ema)
    sets = _eval_sets(opened, paths, field)
    found = [_predicted(opened, each.windows) for each in sets]
    if not all(tokens for _, tokens, _ in found):
        raise DataError("there is nothing to evaluate: no token follows another")
    losses = {each.name: nats / tokens for each, (nats, tokens, _) in zip(sets, found, strict=True)}
    loss = sum(each.weight * losses[each.name] for each in sets)
    nats, tokens, size = (sum(column) for column in zip(*found, strict=True))
    figures = {
        "step": opened.step,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nats / math.log(2) / size if size else None,
        "tokens": int(tokens),
        "bytes": size,
    }
    return figures | {f"loss/{name}": value for name, value in losses.items() if name}


def _eval_sets(opened: OpenedRun, paths: Sequence[str], field: str) -> list[EvalSet]:
    config = opened.config
    if not paths:
        _, data = open_data(config)
        return data.eval_sets(config)
    corpus = _corpus_of(opened, paths, field)
    every = Range(0, len(corpus.tokens))
    return CorpusData(corpus, train=Range(0, 0), validation=every).eval_sets(config)


def _corpus_of(opened: OpenedRun, paths: Sequence[str], field: str) -> Corpus:
    """All of the files as one corpus, in the ids of the run's tokenizer."""
    files = find_inputs(paths)
    are_tokens = {file.endswith(".bin") for file in files}
    if are_tokens == {True}:
        corpus = token_corpus(files)
        theirs = corpus.tokenizer.spec() if corpus.tokenizer else None
        if tokenizer_fingerprint(theirs) != tokenizer_fingerprint(opened.tokenizer_spec):
            raise DataError(
                f"{files[0]} was made with another tokenizer than the run's",
                fix="the texts themselves",
            )
        return corpus
    if len(are_tokens) > 1:
        raise ConfigError("token files and texts cannot be evaluated together", fix="one kind")
    encoded = [opened.tokenizer.encode(text) for text in texts_in(files, field)]
    documents = [_ended(ids, opened.end_of_text) for ids in encoded if len(ids)]
    if not documents:
        raise DataError("the files hold no text", found=", ".join(files[:5]))
    tokens = np.concatenate(documents)
    starts = np.cumsum([0, *map(len, documents[:-1])])
    vocab = opened.config.vocab
    return Corpus(tokens, starts.astype(np.int64), vocab, opened.tokenizer, fingerprint="")


def _ended(ids: np.ndarray, end: int | None) -> np.ndarray:
    """A document as the run was trained on it: with the token behind it that ends it."""
    return ids if end is None else np.append(ids, end)


def _predicted(opened: OpenedRun, windows: Windows) -> tuple[float, float, int]:
    """(sum of losses in nats, tokens, bytes of their text, 0 where ids mean none)"""
    setup = opened.setup
    # It is not known here which tokens such a model restores, so neither are their bytes.
    has_bytes = opened.tokenizer_spec and setup.model.corrupt is None
    tokenizer = opened.tokenizer if has_bytes else None
    config = setup.config
    step = make_eval_step(setup)
    nats = 0.0
    tokens = 0.0
    size = 0
    batch = config.train.global_batch
    for index in range(windows.num_batches(batch, config.eval.batches)):
        ids = batch_ids(index, batch)
        placed = to_devices(windows.samples, ids, setup.batch_shape, setup.mesh, setup.rules)
        loss, count = jax.device_get(step(opened.params, placed))
        nats += float(loss)
        tokens += float(count)
        if tokenizer is not None:
            rows = windows.samples(ids)
            is_text = rows["targets"] != opened.end_of_text
            size += _bytes(tokenizer, rows["targets"], rows["mask"] * is_text)
    return nats, tokens, size


def _bytes(tokenizer: Tokenizer, targets: np.ndarray, mask: np.ndarray) -> int:
    """The bytes of the text that the counted targets are.

    A window may cut a character of several tokens in two, whose bytes are then those of U+FFFD.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return int(mask.sum())
    size = 0
    for row, counts in zip(targets, mask, strict=True):
        size += len(tokenizer.decode(row[counts > 0]).encode())
    return size
