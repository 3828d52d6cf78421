"""Opens the samples of a run: from a corpus, a mixture, a stream, or a function of the caller.

All kinds of data provide the same three things: the arrays of a global sample index, the sets to
evaluate on, and a fingerprint by which a resumed run recognises the same data.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from spmdtrain.config.arguments import as_whole, check_kind, shown
from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.config.own_parts import own_part
from spmdtrain.config.schema import RunConfig, check_config
from spmdtrain.config.schema.data import STREAMED
from spmdtrain.data.batches import EvalSet as EvalSet
from spmdtrain.data.batches import EvalWindows, Range, TrainStream, split
from spmdtrain.data.batches import Windows as Windows
from spmdtrain.data.corpus import CORPORA, Corpus, check_vocab, common_template, open_corpus
from spmdtrain.data.cut_documents import count_cut, cut_note
from spmdtrain.data.epochs import Endless
from spmdtrain.data.indices import sample_indices
from spmdtrain.data.shuffle import random_bits
from spmdtrain.data.targets import check_targets
from spmdtrain.data.token_arrays import TokenArrays

if TYPE_CHECKING:
    from spmdtrain.data.mixtures.mixture_phases import PhasedMixture
    from spmdtrain.data.packing import PackedStream
    from spmdtrain.data.recorded import RecordedData
    from spmdtrain.data.streams.stream_data import StreamData

# tokens(seed, index): the ids of sample `index`, integers [sequence_length + 1]. Always the same
# for the same arguments: that is why a resumed run continues bit-exactly.
Tokens = Callable[[int, int], Any]
Samples = Callable[[np.ndarray], dict[str, np.ndarray]]
# The stream of random bits for the seeds of a mixture's sources; corpus.py and batches.py use 0 to
# 3.
SOURCE = 4
FINGERPRINTED = 4  # samples of a source that a resumed run compares


@dataclass(frozen=True)
class Source:
    """A source of custom samples: `tokens(seed, index)`, and optionally some for evaluation.

    `validation(seed, index)` gives the `validation_samples` samples that `eval.every` evaluates on.
    """

    tokens: Tokens
    validation: Tokens | None = None
    validation_samples: int = 0

    def __post_init__(self):
        fix = "a function (seed, sample index) -> tokens"
        for name, function in (("tokens", self.tokens), ("validation", self.validation)):
            if not callable(function) and not (name == "validation" and function is None):
                raise ConfigError(f"Source({name}={shown(function)}) is not a function", fix=fix)
        count = as_whole(self.validation_samples, "validation_samples", 0, 2**31 - 1)
        object.__setattr__(self, "validation_samples", count)


@dataclass(frozen=True)
class CorpusData:
    """The corpus of a run, split into training and validation tokens."""

    corpus: Corpus
    train: Range
    validation: Range
    beside: TokenArrays | None = None  # of the training tokens

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    @property
    def vocab(self) -> int:
        """The number of ids: all are below it."""
        return self.corpus.vocab

    @property
    def tokenizer(self) -> dict | None:
        """The spec of the tokenizer; None if ids do not stand for text."""
        tokenizer = self.corpus.tokenizer
        return tokenizer.spec() if tokenizer else None

    @property
    def begin_of_text(self) -> int | None:
        """The id that begins each document; None if there is none."""
        return self.corpus.begin_of_text

    @property
    def end_of_text(self) -> int | None:
        """The id that ends each document; None if there is none."""
        return self.corpus.end_of_text

    @property
    def template(self) -> str | dict | None:
        """The spec of the template, if there are conversations (chats/encode_conversation.py)."""
        return self.corpus.template

    def train_samples(self, config: RunConfig) -> Samples:
        return self._train_stream(config).samples

    def samples_per_epoch(self, config: RunConfig) -> int:
        return self._train_stream(config).windows

    def _train_stream(self, config: RunConfig) -> "TrainStream | PackedStream":
        length = config.train.sequence_length
        order = {"seed": config.train.seed, "shuffle": config.data.shuffle}
        if config.data.packing == "best_fit":
            from spmdtrain.data.packing import PackedStream

            return PackedStream(self.corpus, self.train, length, beside=self.beside, **order)
        packing = config.data.packing
        return TrainStream(
            self.corpus, self.train, length, packing=packing, beside=self.beside, **order
        )

    def eval_sets(self, config: RunConfig) -> list[EvalSet]:
        length = config.train.sequence_length
        packing = config.data.packing
        count = self.validation.size - 1
        if packing == "best_fit":
            from spmdtrain.data.packing import PackedWindows

            windows = PackedWindows(self.corpus, self.validation, length)
            count = windows.pairs or count
        else:
            windows = EvalWindows(self.corpus, self.validation, length, packing=packing)
        return [EvalSet("", 1.0, windows, count)]

    def describe(self, config: RunConfig) -> str:
        """Returns the line in which a run describes its data."""
        parts = [f"{config.data.corpus}, {self.train.size:,} tokens to train"]
        if self.beside is not None:
            parts.append(self.beside.described)
        cut, conversations = self.cut_conversations(config)
        if cut:
            parts.append(cut_note(cut, conversations, config.data.packing))
        return ", ".join(parts)

    def cut_conversations(self, config: RunConfig) -> tuple[int, int]:
        """Returns how many training conversations windows cut, and how many there are.

        Pairs are never cut; cutting ordinary texts is no problem, so they are not counted.
        """
        if self.corpus.loss is None or self.corpus.has_pairs:
            return 0, 0
        length, packing = config.train.sequence_length, config.data.packing
        return count_cut(self.corpus.document_starts, self.train, length, packing)


@dataclass(frozen=True)
class MixtureData:
    """A mixture of several corpora with one tokenizer, and their shares of the samples."""

    names: tuple[str, ...]
    sources: tuple[CorpusData, ...]
    mixture: "PhasedMixture"

    @property
    def fingerprint(self) -> str:
        """A hash of shares and contents, whatever the names."""
        parts = [*self.mixture.identity, *(source.fingerprint for source in self.sources)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    @property
    def vocab(self) -> int:
        """The number of ids, the same in every source: they share a tokenizer."""
        return self.sources[0].vocab

    @property
    def tokenizer(self) -> dict | None:
        return self.sources[0].tokenizer

    @property
    def begin_of_text(self) -> int | None:
        """The id that begins each document of every source."""
        begins = {source.begin_of_text for source in self.sources}
        return begins.pop() if len(begins) == 1 else None

    @property
    def end_of_text(self) -> int | None:
        """The id that ends each document of every source."""
        ends = {source.end_of_text for source in self.sources}
        return ends.pop() if len(ends) == 1 else None

    @property
    def template(self) -> str | dict | None:
        """The spec of the template of every source of conversations."""
        return common_template(source.template for source in self.sources)

    def samples_per_epoch(self, config: RunConfig) -> Endless:  # noqa: ARG002 - as a corpus
        return Endless("a mixture, whose sources are read through at different times")

    def train_samples(self, config: RunConfig) -> Samples:
        """Returns endless samples; each source is read in its own order, independently."""
        seeds = random_bits(config.train.seed, SOURCE, np.arange(len(self.sources)))
        readers = [
            source.train_samples(_with_seed(config, int(seed)))
            for source, seed in zip(self.sources, seeds, strict=True)
        ]

        def samples(indices: np.ndarray) -> dict[str, np.ndarray]:
            drawn, own = self.mixture.locate(indices)
            if not len(drawn):
                raise DataError("a batch has at least one sample", found="no sample index")
            batch: dict[str, np.ndarray] = {}
            for source in np.unique(drawn).tolist():
                rows = drawn == source
                for name, values in readers[source](own[rows]).items():
                    if name not in batch:
                        batch[name] = np.empty((len(drawn), *values.shape[1:]), values.dtype)
                    batch[name][rows] = values
            sample = np.asarray(indices).astype(np.uint32)
            return batch | {"sample": sample, "source": drawn.astype(np.int32)}

        return samples

    def eval_sets(self, config: RunConfig) -> list[EvalSet]:
        """Returns the validation split of each source, weighted by its share."""
        sets = []
        parts = zip(self.names, self.mixture.shares, self.sources, strict=True)
        for name, share, source in parts:
            (only,) = source.eval_sets(config)
            sets.append(only._replace(name=name, weight=share))
        return sets

    def describe(self, config: RunConfig) -> str:
        """Returns the run's description of its data: shares, and how often each source is read."""
        samples = config.train.samples_before(config.train.steps)
        drawn = samples * config.train.sequence_length
        shares = self.mixture.shares
        if config.data.phases:
            shares = (self.mixture.drawn(samples) / samples).tolist()
        parts = zip(self.names, shares, self.sources, strict=True)
        described = [
            f"{name} {100 * share:.3g} % ({share * drawn / source.train.size:.2g} epochs)"
            for name, share, source in parts
        ]
        phases = f", in {len(config.data.phases) + 1} phases" if config.data.phases else ""
        counts = [source.cut_conversations(config) for source in self.sources]
        cut, conversations = (sum(column) for column in zip(*counts, strict=True))
        note = f", {cut_note(cut, conversations, config.data.packing)}" if cut else ""
        return f"{', '.join(described)} of the samples{phases}{note}"


def _with_seed(config: RunConfig, seed: int) -> RunConfig:
    """Returns the config with another seed, which may have 64 bits."""
    return config.model_copy(update={"train": config.train.model_copy(update={"seed": seed})})


@dataclass(frozen=True)
class SourceData:
    """A source, with the fingerprint of its first samples."""

    source: Source
    fingerprint: str
    tokenizer: None = None
    begin_of_text: None = None
    end_of_text: None = None
    template: None = None

    def samples_per_epoch(self, config: RunConfig) -> Endless:  # noqa: ARG002 - as a corpus
        return Endless("custom samples, without an end")

    def train_samples(self, config: RunConfig) -> Samples:
        return lambda indices: _read(self.source.tokens, config, indices)

    def eval_sets(self, config: RunConfig) -> list[EvalSet]:
        tokens = self.source.validation_samples * config.train.sequence_length
        return [EvalSet("", 1.0, SourceWindows(self.source, config), tokens)]

    def describe(self, config: RunConfig) -> str:  # noqa: ARG002 - as in the other kinds
        return "own samples"


class SourceWindows:
    """The evaluation samples of a source."""

    def __init__(self, source: Source, config: RunConfig):
        self._source = source
        self._config = config
        self.windows = source.validation_samples

    def samples(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the batch of these samples; those past the last are masked."""
        validation = self._source.validation
        if validation is None:
            fix = "Source(tokens, validation, validation_samples)"
            raise ConfigError("data= has validation_samples, but no validation", fix=fix)
        indices = sample_indices(indices)
        last = self._source.validation_samples - 1
        batch = _read(validation, self._config, np.minimum(indices, last))
        batch["mask"] *= (indices <= last)[:, None]
        return batch


Data = Union[CorpusData, MixtureData, SourceData, "StreamData", "RecordedData"]


def check_data(data: Any) -> None:
    """Raises ConfigError if `data` is not the data of a run."""
    if isinstance(data, CorpusData | MixtureData | SourceData):
        return
    from spmdtrain.data.recorded import RecordedData
    from spmdtrain.data.streams.stream_data import StreamData

    kinds = (CorpusData, MixtureData, SourceData, StreamData, RecordedData)
    check_kind(data, kinds, "data", "config, data = st.open_data(config)")


def open_data(config: RunConfig, source: Source | Tokens | None = None) -> tuple[RunConfig, Data]:
    """Returns the config with vocabulary and `train.epochs` resolved, and the data of the run.

    Without a `source`, the data is that of `own.data`, or else the corpus that the config names,
    split into training and validation. Raises DataError or ConfigError if config and data do not
    fit.
    """
    check_config(config)
    source = own_part(config, "data") if source is None else source
    if source is None:
        data = KINDS[MIXTURE if config.data.mix else config.data.corpus](config)
        config = config.with_vocab(config.model.vocab or data.vocab)
    else:
        data = _open_source(config, source)
    if config.train.epochs is None:
        return config, data
    from spmdtrain.data.epochs import counted_in_steps

    return counted_in_steps(config, data), data


def _open_single(config: RunConfig) -> CorpusData:
    corpus = open_corpus(
        config.data,
        config.model.vocab,
        config.train.seed,
        references=config.train.needs_reference,
    )
    data = _with_logits(_cut(corpus, config), config)
    _check_validation(config, [data])
    return data


def _open_stream(config: RunConfig) -> "StreamData":
    from spmdtrain.data.streams.stream_data import open_stream

    settings = config.data
    if config.eval.every and not settings.validation_path:
        what = f"eval.every asks for evaluation, but data.corpus={settings.corpus!r} keeps no data"
        raise ConfigError(what, fix="--set data.validation_path=FILE")
    data = open_stream(settings, validates=True)
    check_vocab(data.vocab, config.model.vocab)
    return data


def _open_mixture(config: RunConfig) -> MixtureData:
    """Opens the sources of `data.mix`. Raises DataError if their tokenizers differ."""
    from spmdtrain.data.mixtures.mixture_phases import phased

    settings = config.data
    weights = [source.weight for source in settings.mix]
    mixture = phased(settings.phases, weights, config.train.sequence_length)
    corpora: list[Corpus] = []
    for source in settings.mix:
        alone = settings.model_copy(update={"mix": (), "phases": (), "path": source.path})
        corpus = open_corpus(alone, config.model.vocab, config.train.seed)
        if corpora and not corpus.has_tokenizer_of(corpora[0]):
            both = f"{settings.mix[0].name} and {source.name}"
            raise DataError(f"data.mix: {both} were made with different tokenizers")
        corpora.append(corpus)
    if settings.validation_fraction:
        from spmdtrain.data.token_files.cut_files import cut_shared_files

        corpora = cut_shared_files(corpora, settings.validation_fraction)
    names = tuple(source.name for source in settings.mix)
    sources = [_cut(corpus, config, name) for corpus, name in zip(corpora, names, strict=True)]
    _check_validation(config, sources)
    return MixtureData(names, tuple(sources), mixture)


MIXTURE = "mix"
# `data.corpus`, or MIXTURE with `data.mix` -> how the data is opened.
KINDS: "Mapping[str, Callable[[RunConfig], CorpusData | MixtureData | StreamData]]" = {
    **dict.fromkeys(CORPORA, _open_single),
    **dict.fromkeys(STREAMED, _open_stream),
    MIXTURE: _open_mixture,
}


def _check_validation(config: RunConfig, sources: Sequence[CorpusData]) -> None:
    """Raises ConfigError if a run evaluates and one of its corpora has no validation split."""
    if config.eval.every and not all(source.validation.size for source in sources):
        fraction = "data.validation_fraction=0 keeps no validation data"
        raise ConfigError(f"eval.every asks for evaluation, but {fraction}")


def progress_of(data: Data) -> dict[str, Any]:
    """Returns what a checkpoint stores about reading: a stream's knowledge of its files."""
    ledger = getattr(data, "ledger", None)
    return {} if ledger is None else {"ledger": ledger.document()}


def recall_progress(data: Data, meta: Mapping[str, Any]) -> None:
    """Gives a stream the knowledge in a checkpoint's meta, so that it need not read it again."""
    ledger = getattr(data, "ledger", None)
    if ledger is not None and "ledger" in meta:
        ledger.recall(meta["ledger"])


def _cut(corpus: Corpus, config: RunConfig, source: str = "") -> CorpusData:
    """Returns a corpus with its split; `source` is its name in a mixture."""
    if config.data.packing != "stream" and not corpus.has_documents:
        packing = f"data.packing={config.data.packing!r}"
        what = f"{packing}: the token file does not say where documents start"
        raise ConfigError(what, fix="--set data.packing=stream")
    _check_pairs(corpus, config)
    fraction = config.data.validation_fraction
    train, validation = split(corpus, fraction, config.train.sequence_length, source)
    packing = config.data.packing
    check_targets(corpus, train, packing, name="training", source=source)
    if config.eval.every and validation.size:
        check_targets(corpus, validation, packing, name="validation", source=source)
    return CorpusData(corpus, train, validation)


def _with_logits(data: CorpusData, config: RunConfig) -> CorpusData:
    """Returns the data with the saved logits of the run beside its tokens, if it has any."""
    if config.beside_tokens is None:
        return data
    from spmdtrain.data.saved_logits.reader import open_logits

    logits = open_logits(config, data.fingerprint, data.tokenizer, data.train.stop)
    return replace(data, beside=logits)


def _check_pairs(corpus: Corpus, config: RunConfig) -> None:
    """Raises UserError if a run would read pairs of answers as texts, or texts as pairs."""
    learns_pairs = config.train.learns_pairs
    if corpus.has_pairs and not learns_pairs:
        path = corpus.files[0][1]
        raise ConfigError(
            f"{path} holds pairs of answers, of which one is to be avoided",
            asked="train.preference='none'",
            fix="--set train.preference=dpo --set data.packing=best_fit",
        )
    if learns_pairs and not corpus.has_pairs:
        raise ConfigError(
            f"{corpus.files[0][1]} holds no pairs of answers",
            asked=f"train.preference={config.train.preference!r}",
            fix="spmdtrain data prepare FILE --chat --pairs --out NAME",
        )
    if config.train.needs_reference and corpus.references is None:
        from spmdtrain.data.token_files.references import no_references

        raise no_references(corpus.files[0][1])


def _open_source(config: RunConfig, source: Source | Tokens) -> SourceData:
    if callable(source):
        source = Source(source)
    if not isinstance(source, Source):
        fix = "a function (seed, sample index) -> tokens, or a Source"
        raise ConfigError(f"data={source!r:.80} is not a source of data", fix=fix)
    if config.data.mix:
        fix = "one of both"
        raise ConfigError("data= gives all samples, and data.mix names sources", fix=fix)
    if config.model.vocab is None:
        what = "data= gives token ids, but nothing states the number of ids"
        raise ConfigError(what, fix="--set model.vocab=N")
    if config.data.packing != "stream":
        what = f"data.packing={config.data.packing!r}: data= does not say where documents start"
        raise ConfigError(what, fix="--set data.packing=stream")
    if config.eval.every and not (source.validation and source.validation_samples > 0):
        fix = "Source(tokens, validation, validation_samples)"
        raise ConfigError("eval.every asks for evaluation, but data= has no validation", fix=fix)
    if beside := config.beside_tokens:
        what = f"{beside} lies beside the tokens of a corpus, and data= makes its own"
        raise ConfigError(what, fix=f"--set {beside.partition('=')[0]}=none")
    digest = hashlib.sha256(str(config.model.vocab).encode())
    digest.update(_read(source.tokens, config, np.arange(FINGERPRINTED))["tokens"].data)
    return SourceData(source, digest.hexdigest())


def _read(tokens: Tokens, config: RunConfig, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the batch of these sample indices, as described in batches.py."""
    indices = sample_indices(indices)
    if not len(indices):
        raise DataError("a batch has at least one sample", found="no sample index")
    rows = np.stack([_row(tokens, config, index) for index in indices.tolist()])
    return {
        "tokens": np.ascontiguousarray(rows[:, :-1]),
        "targets": np.ascontiguousarray(rows[:, 1:]),
        "mask": np.ones((len(rows), rows.shape[1] - 1), np.float32),
        "sample": indices.astype(np.uint32),
    }


def _row(tokens: Tokens, config: RunConfig, index: int) -> np.ndarray:
    """Returns a sample, int32 [sequence_length + 1]. Raises DataError for anything else."""
    row = np.asarray(tokens(config.train.seed, index))
    length = config.train.sequence_length + 1
    vocab = config.vocab
    if row.shape != (length,) or not np.issubdtype(row.dtype, np.integer):
        raise DataError(
            f"data= gives {row.dtype}{list(row.shape)} for sample {index}",
            fix=f"{length} integers: train.sequence_length={length - 1} and the token after it",
        )
    if row.min() < 0 or row.max() >= vocab:
        bad = row[(row < 0) | (row >= vocab)][0]
        what = f"data= gives id {bad} in sample {index}"
        raise DataError(what, asked=f"model.vocab={vocab}", fix=f"ids from 0 to {vocab - 1}")
    return row.astype(np.int32)
