"""Evaluates how well a trained run predicts a text: loss, perplexity, bits per byte.

Works on any files and any mesh.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmdtrain.checkpoints.restore import read_document, refuse_own_parts
from spmdtrain.config.arguments import as_run, as_texts, check_kind
from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.config.load import COMMAND_LINE
from spmdtrain.config.schema import RunConfig
from spmdtrain.config.settable import OF_EVALUATION
from spmdtrain.data.batches import Range
from spmdtrain.data.corpus import Corpus, token_corpus
from spmdtrain.data.source import CorpusData, EvalSet, open_data
from spmdtrain.data.texts.documents import find_inputs, texts_in
from spmdtrain.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer, tokenizer_fingerprint
from spmdtrain.inference.trained_run import OpenedRun, open_run
from spmdtrain.models.choose import MakeModel
from spmdtrain.train.evaluation import NOTHING, Predicted, mean_loss, unit_of, window_losses
from spmdtrain.train.step import make_eval_step


def evaluate(
    run: str | Path,
    paths: Sequence[str | Path] = (),
    *,
    step: int | None = None,
    field: str = "text",
    overrides: Sequence[str] = (),
    make: MakeModel | str | None = None,
    ema: bool = False,
    own: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the loss of `run` after `step` steps (default: the newest) on data or files.

    `paths` are either texts as `data prepare` reads them (`field` names the texts of a table or of
    JSON lines), which the run's own tokenizer encodes, or token files made with that tokenizer. All
    of their tokens count. `overrides` may set mesh.* (default: one device) and the settings in
    OF_EVALUATION. `make`: the model of the run, a class or its name, as in `model.make`. With `ema`
    the loss is that of the average of the weights, which a run with `optimizer.ema` has. `own` are
    the files and modules whose code may run if [own] of the run names it: its data and its loss,
    which validation data needs.

    The result has "loss" (nats per token), "perplexity", "bits_per_byte" (None if ids have no text,
    or if the model restores some of the tokens), the predicted "tokens" and "bytes", the
    "split_tokens" from which "tokens" were taken, the name of their "data", and "step". On
    validation data the loss equals the one that the run reports at this step, over the same
    windows.

    For a mixture, loss and bits per byte are means over the sources, weighted by their shares.
    "loss/NAME", "bits_per_byte/NAME" and "tokens/NAME" are those of one source; the first two are
    present only if one of its tokens has a loss. For a run that learned from pairs of answers, the
    loss is that of pairs, without a perplexity, and the counts are "pairs" and "split_pairs".
    Raises UserError.
    """
    paths = as_texts(paths, "paths", "book.txt")
    check_kind(field, str, "field", "the name of a column")
    if not paths:
        run = as_run(run, "run")
        refuse_own_parts(run, read_document(run, own)[1], ("data", "loss"))
    opened = open_run(
        run,
        step=step,
        make=make,
        overrides=overrides,
        settable=OF_EVALUATION,
        ema=ema,
        with_pairs=not paths,
        own=own,
    )
    sets = _eval_sets(opened, paths, field)
    takes_all = paths and opened.config.origin.get("eval.batches") != COMMAND_LINE
    limit = None if takes_all else opened.eval_windows
    predictions = _predict(opened, sets, limit)
    loss = mean_loss([predicted for predicted, _ in predictions])
    if loss is None:
        raise DataError(f"there is nothing to evaluate: {NOTHING}")
    unit = unit_of(opened.config)
    return {
        "step": opened.step,
        "data": ", ".join(paths) or _validation_data(opened.config),
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)) if unit == "tokens" else None,
        "bits_per_byte": _bits_per_byte(predictions),
        unit: sum(predicted.tokens for predicted, _ in predictions),
        f"split_{unit}": sum(predicted.of_tokens for predicted, _ in predictions),
        "bytes": sum(size for _, size in predictions),
    } | _by_source(predictions)


def _validation_data(config: RunConfig) -> str:
    """Names the validation data of a run as its settings do."""
    data = config.data
    if config.own.data:
        return config.own.data
    if data.mix:
        return ", ".join(source.name for source in data.mix)
    paths = data.validation_path or data.path or f"data.corpus={data.corpus}"
    return paths if isinstance(paths, str) else ", ".join(paths)


def _by_source(predictions: Sequence[tuple[Predicted, int]]) -> dict[str, Any]:
    """Returns the figures of each source of a mixture."""
    figures: dict[str, Any] = {}
    for predicted, size in predictions:
        if not predicted.name:
            continue
        figures[f"tokens/{predicted.name}"] = predicted.tokens
        if predicted.tokens:
            figures[f"loss/{predicted.name}"] = predicted.loss
        if size:
            figures[f"bits_per_byte/{predicted.name}"] = _bits_per_byte([(predicted, size)])
    return figures


def _bits_per_byte(predictions: Sequence[tuple[Predicted, int]]) -> float | None:
    """Returns the bits per byte of a text that mixes the sources' tokens by their shares: bits per
    token over bytes per token, each a mean weighted by the shares.

    None if a source has no bytes.
    """
    counted = [(predicted, size) for predicted, size in predictions if predicted.tokens]
    if not all(size for _, size in counted):
        return None
    nats = sum(predicted.weight * predicted.loss for predicted, _ in counted)
    size = sum(predicted.weight * size / predicted.tokens for predicted, size in counted)
    return nats / math.log(2) / size


def _eval_sets(opened: OpenedRun, paths: Sequence[str], field: str) -> list[EvalSet]:
    config = opened.config
    if not paths:
        _, data = open_data(config)
        return data.eval_sets(config)
    corpus = _corpus_of(opened, paths, field)
    every = Range(0, len(corpus.tokens))
    return CorpusData(corpus, train=Range(0, 0), validation=every).eval_sets(config)


def _corpus_of(opened: OpenedRun, paths: Sequence[str], field: str) -> Corpus:
    """Returns all of the files as one corpus, in the ids of the run's tokenizer."""
    files = find_inputs(paths)
    are_tokens = {file.endswith(".bin") for file in files}
    if are_tokens == {True}:
        config = opened.config
        # A file of bare ids has those of the run, which must have no tokenizer either.
        corpus = token_corpus(files, vocab=config.vocab, dtype=config.data.dtype)
        theirs = corpus.tokenizer.spec() if corpus.tokenizer else None
        if tokenizer_fingerprint(theirs) != tokenizer_fingerprint(opened.tokenizer_spec):
            raise DataError(
                f"{files[0]} was made with another tokenizer than the run's",
                fix="the texts themselves",
            )
        return corpus
    if len(are_tokens) > 1:
        raise ConfigError("token files and texts cannot be evaluated together", fix="one kind")
    encoded = [
        opened.tokenizer.encode(text, parse_special=False) for text in texts_in(files, field)
    ]
    documents = [_as_document(opened, ids) for ids in encoded if len(ids)]
    if not documents:
        raise DataError("the files hold no text", found=", ".join(files[:5]))
    tokens = np.concatenate(documents)
    starts = np.cumsum([0, *map(len, documents[:-1])])
    vocab = opened.config.vocab
    return Corpus(tokens, starts.astype(np.int64), vocab, opened.tokenizer, fingerprint="")


def _as_document(opened: OpenedRun, ids: np.ndarray) -> np.ndarray:
    """Returns a document as in the run's training data: with the tokens that begin and end it."""
    end = opened.end_of_text
    return opened.with_begin(ids if end is None else np.append(ids, end))


def _predict(
    opened: OpenedRun, sets: Sequence[EvalSet], limit: int | None
) -> list[tuple[Predicted, int]]:
    """Returns the model's predictions for each set, and the bytes of their text, 0 if ids have no
    text.

    `limit`: windows of each set; None: all.
    """
    setup = opened.setup
    # Which tokens such a model restores is not known here, so neither are their bytes.
    is_of_tokens = unit_of(setup.config) == "tokens"
    has_bytes = opened.tokenizer_spec and setup.model.corrupt is None and is_of_tokens
    tokenizer = opened.tokenizer if has_bytes else None
    step = make_eval_step(setup).jitted  # the batches are made here

    def predict(eval_set: EvalSet) -> tuple[Predicted, int]:
        nats = 0.0
        tokens = 0.0
        size = 0
        for ids, loss, count in window_losses(setup, step, opened.params, eval_set.windows, limit):
            nats += loss
            tokens += count
            if tokenizer is not None:
                rows = eval_set.windows.samples(ids)
                frame = [opened.begin_of_text, opened.end_of_text]
                no_text = [token for token in frame if token is not None]
                is_text = ~np.isin(rows["targets"], no_text)
                size += _bytes(tokenizer, rows["targets"], rows["mask"] * is_text)
        return Predicted(eval_set.name, eval_set.weight, nats, int(tokens), eval_set.tokens), size

    return [predict(eval_set) for eval_set in sets]


def _bytes(tokenizer: Tokenizer, targets: np.ndarray, mask: np.ndarray) -> int:
    """Returns the number of bytes of text in the counted targets.

    A window may cut a character of several tokens in two; its bytes are then those of U+FFFD.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return int(mask.sum())
    size = 0
    for row, counts in zip(targets, mask, strict=True):
        size += len(tokenizer.decode(row[counts > 0]).encode())
    return size
