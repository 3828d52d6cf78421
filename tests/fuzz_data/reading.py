"""Reads token files as a run does, and counts every token.

A *pair* is a token and the one after it, which a run predicts from it. The pairs of an epoch with
mask 1 are compared with those that the files hold, however they are cut into windows and ordered.
"""

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz_data import tokenizer_files
from fuzz_data.case import LEGAL, Case
from fuzz_data.expected import Ids
from fuzz_data.formats import LLMC, Made
from fuzz_data.wrong import Wrong
from spmdtrain.config import RunConfig
from spmdtrain.config.errors import UserError
from spmdtrain.data.packing import pack_documents
from spmdtrain.data.source import CorpusData, MixtureData, open_data

if TYPE_CHECKING:
    from fuzz_data.check import Outcome

PADDING = 3  # windows behind the last that are asked for
LLMC_HEADER = 1024  # bytes
MANY = 20_000  # tokens: more are read in windows that are LONGER times as long
LONGER = 128


def plain_ids(case: Case, made: Made) -> list[Ids | None]:
    """Return what text files hold for a run; None where one of them is not a text."""
    try:
        texts = [path.read_bytes().decode("utf-8") for path in made.paths if path.is_file()]
    except UnicodeDecodeError:
        return [None]
    if len(texts) < len(made.paths) or not any(texts):
        return [None]
    if case.tokenizer == "bytes":
        encoded: list[Sequence[int]] = [text.encode() for text in texts]
    elif case.tokenizer == "characters":
        alphabet = sorted(set("".join(texts)))
        encoded = [[alphabet.index(letter) for letter in text] for text in texts]
    else:
        package = tokenizer_files.taking_text_for_text(case.tokenizer)
        encoded = [package.encode(text, add_special_tokens=False).ids for text in texts]
    rows = [np.array(list(ids), np.int64) for ids in encoded]
    return [
        Ids(ids, np.zeros(1, np.int64), np.ones(len(ids), np.uint8)) for ids in rows if len(ids)
    ]


def examine(case: Case, made: Made, paths: list[Path], files: list[Ids | None]) -> "Outcome":
    """Open token files as a run does and read an epoch. `files` is what they hold, if they can."""
    from fuzz_data.check import Outcome, _refused

    sources = _sources(case, paths)
    if sum(len(file.ids) for file in files if file is not None) > MANY:
        case = replace(case, length=case.length * LONGER)
    held = _joined(case, files, sources)
    must_take = case.may_be_read and held is not None and _is_ample(case, held)
    try:
        asked = _config(case, made, sources)
        config, data = open_data(asked)
        if case.damage == "shrink":
            os.truncate(made.holders[0], made.holders[0].stat().st_size // 2)
        epochs = _epochs(case, config, data)
    except UserError as refusal:
        return _refused(case, str(refusal), must_take=must_take)
    if held is None:
        raise Wrong(f"{case.format} that does not fit is read", f"{case.damage} of {case.target}")
    if case.reads == "shared" and case.fraction:
        _compare_shared(epochs, held, are_unique=case.damage in LEGAL)
    else:
        for (corpus, train, validation), whole in zip(epochs, held, strict=True):
            _compare(case, corpus, train, validation, whole)
    if case.damage != "shrink":
        _see_other_content(case, asked, data.fingerprint, paths)
    return Outcome("passed", "")


def _sources(case: Case, paths: list[Path]) -> list[list[Path]]:
    """Return the files of each source of a mixture, or those that train and those that validate."""
    if case.reads in ("mix", "validation_path") and len(paths) > 1:
        return [paths[:1], paths[1:]]
    if case.reads == "shared":
        first = _again(case, paths[0])
        return [paths, [first]] if case.shuffle else [paths, paths[:1], [first, paths[2]]]
    return [paths]


def _again(case: Case, path: Path) -> Path:
    """Return another name of a file, or another file of the same content."""
    other = path.with_name(f"again-{path.name}")
    how = case.random("again").choice((os.symlink, os.link, shutil.copyfile))
    try:
        how(path, other)
    except (OSError, shutil.Error):  # it is damaged, and no file
        return path
    return other


class Whole:
    """The tokens of several files, one behind the other."""

    def __init__(self, files: list[Ids], cut: int | None):
        self.ids = np.concatenate([file.ids for file in files])
        self.loss = np.concatenate([file.loss for file in files])
        self.has_documents = all(file.starts is not None for file in files)
        offset = 0
        starts = []
        for file in files:
            starts.append(offset + (np.zeros(1, np.int64) if file.starts is None else file.starts))
            offset += len(file.ids)
        self.starts = np.concatenate(starts)
        self.cut = cut  # where the tokens that validate begin, if files say it

    def pairs(self, start: int, stop: int, packing: str) -> dict[tuple[int, int], int]:
        """Return how often each pair occurs between two offsets."""
        counts = self.loss[start + 1 : stop] > 0
        if packing != "stream":
            counts &= ~np.isin(np.arange(start + 1, stop), self.starts)
        before, after = self.ids[start : stop - 1][counts], self.ids[start + 1 : stop][counts]
        return _counted(before, after)


def _counted(before: np.ndarray, after: np.ndarray) -> dict[tuple[int, int], int]:
    both = before.astype(np.int64) << 32 | after.astype(np.int64)  # sorts ten times as fast as two
    pairs, counts = np.unique(both, return_counts=True)
    first, second = (pairs >> 32).tolist(), (pairs & 0xFFFFFFFF).tolist()
    return dict(zip(zip(first, second, strict=True), counts.tolist(), strict=True))


def _joined(case: Case, files: list[Ids | None], sources: list[list[Path]]) -> list[Whole] | None:
    known = [file for file in files if file is not None]
    if not known or len(known) < len(files):
        return None
    if len(sources) == 1:
        return [Whole(known, None)]
    if case.reads == "shared":
        parts = [known, known[:1], [known[0], known[2]]][: len(sources)]
        return [Whole(part, None) for part in parts]
    if case.reads == "validation_path":
        return [Whole(known, len(known[0].ids))]
    return [Whole(known[:1], None), Whole(known[1:], None)]


def _is_ample(case: Case, held: list[Whole]) -> bool:
    """Return whether each part of each source has something to learn."""
    if case.reads == "shared" and case.fraction:
        return False  # a file may be too short to be cut
    for whole in held:
        cut = whole.cut
        if cut is None:
            cut = int(len(whole.ids) * (1 - case.fraction))
        for start, stop in ((0, cut), (cut, len(whole.ids))):
            if start == stop and not case.fraction:
                continue
            if stop - start <= case.length or not whole.pairs(start, stop, case.packing):
                return False
        if case.packing != "stream" and not whole.has_documents:
            return False
    return True


def _config(case: Case, made: Made, sources: list[list[Path]]) -> RunConfig:
    names = [[str(path) for path in paths] for paths in sources]
    if case.reads_glob:
        folder = names[0][0].rpartition("/")[0]
        ending = "*.txt" if case.format == "plain" else "*.bin"
        names = [[f"{folder}/{'out' if case.is_prepared else 'in-'}{ending}"]]
    data: dict[str, Any] = {"packing": case.packing, "shuffle": case.shuffle}
    data |= {"validation_fraction": case.fraction}
    if len(names) > 1 and case.reads in ("mix", "shared"):
        data["mix"] = [{"name": f"s{i}", "path": path} for i, path in enumerate(names)]
    else:
        data |= {"corpus": "tokens", "path": names[0]}
        if len(names) > 1:
            data["validation_path"] = names[1]
    if case.format == "plain":
        data |= {"corpus": "text", "tokenizer": str(made.tokenizer or case.tokenizer)}
    model = {"name": "gpt"} | ({"vocab": made.vocab} if made.vocab else {})
    return RunConfig.model_validate(
        {"model": model, "train": {"sequence_length": case.length}, "data": data}
    )


def _epochs(case: Case, config: RunConfig, data: Any) -> list[tuple]:
    """Return, for each source, its data and the batches of an epoch of both of its parts."""
    sources = data.sources if isinstance(data, MixtureData) else (data,)
    epochs = []
    for source in sources:
        assert isinstance(source, CorpusData)
        train = source.train_samples(config)(np.arange(_windows(case, source)))
        validation = None
        if source.validation.size:
            (only,) = source.eval_sets(config)
            windows = only.windows.windows
            validation = only.windows.samples(np.arange(windows + PADDING))
            if validation["mask"][windows:].any():
                raise Wrong("a window behind the last has a loss")
        epochs.append((source, train, validation))
    if isinstance(data, MixtureData):
        _compare_mixture(config, data, [train for _, train, _ in epochs])
    return epochs


def _windows(case: Case, source: CorpusData) -> int:
    """Return how many windows an epoch has."""
    if case.packing == "best_fit":
        return pack_documents(source.corpus.document_starts, source.train, case.length).windows
    reserve = case.length if case.shuffle else 1
    return max(1, (source.train.size - reserve) // case.length)


def _compare_mixture(config: RunConfig, data: MixtureData, trains: list) -> None:
    """See that the first samples of a mixture are those of its sources, in turn."""
    each = min(len(train["tokens"]) for train in trains)
    batch = data.train_samples(config)(np.arange(each * len(trains)))
    if np.bincount(batch["source"], minlength=len(trains)).tolist() != [each] * len(trains):
        raise Wrong("a mixture of equal weights is unequal")


def _compare(case: Case, source: CorpusData, train: dict, validation: dict | None, whole: Whole):
    total = len(whole.ids)
    ranges = [*source.train, *source.validation]
    cut = source.train.stop
    if ranges != [0, cut, cut, total] or (whole.cut is not None and cut != whole.cut):
        raise Wrong("the parts of a corpus are not the corpus", f"{ranges} of {total}")
    vocab = source.corpus.vocab
    for batch in (train, validation):
        if batch and max(batch["tokens"].max(), batch["targets"].max()) >= vocab:
            raise Wrong("a run reads ids beyond its vocabulary", f"of {vocab}")
    found = _pairs_of(train)
    wanted = whole.pairs(0, cut, case.packing)
    extra = [pair for pair, count in found.items() if count > wanted.get(pair, 0)]
    missing = sum(wanted.values()) - sum(found.values())
    most = 0 if case.packing == "best_fit" else 2 * case.length - 1
    if extra or missing > most:
        said = f"{missing} of {sum(wanted.values())} pairs missing, {extra[:3]} too often"
        raise Wrong(f"an epoch is not what was written ({case.packing})", said)
    if validation is not None and _pairs_of(validation) != whole.pairs(cut, total, case.packing):
        raise Wrong(f"an evaluation is not what was written ({case.packing})")


def _compare_shared(epochs: list[tuple], held: list[Whole], *, are_unique: bool) -> None:
    """See that sources which share files agree on what validates.

    Of ids that are unique none may be in both parts.
    """
    trained: set[int] = set()
    validated: set[int] = set()
    for (source, train, validation), whole in zip(epochs, held, strict=True):
        parts = [source.corpus.read(*span) for span in (source.train, source.validation)]
        if sorted(np.concatenate(parts)) != sorted(whole.ids):
            raise Wrong("a source that shares files loses tokens")
        trained.update(parts[0].tolist(), *_pairs_of(train))
        if validation is not None:
            validated.update(parts[1].tolist(), *_pairs_of(validation))
    if are_unique and trained & validated:
        raise Wrong("tokens that validate are trained on", str(sorted(trained & validated)[:9]))


def _see_other_content(case: Case, config: RunConfig, known: str, paths: list[Path]) -> None:
    """See that another byte in a file of the same size and times gives another fingerprint."""
    random = case.random("fingerprint")
    path = random.choice(paths)
    beside = [path.with_suffix(ending) for ending in (".idx", ".loss")]
    if case.is_prepared or case.format.startswith("ours"):
        path = random.choice([path, *(each for each in beside if each.exists())])
    first = LLMC_HEADER if case.format in LLMC else 0
    content = path.read_bytes()
    if len(content) <= first:
        return
    changed = bytearray(content)
    changed[random.randrange(first, len(content))] ^= 1 << random.randrange(8)
    times = path.stat()
    path.write_bytes(changed)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with contextlib.suppress(UserError):
        if open_data(config)[1].fingerprint == known:
            raise Wrong("other content has the same fingerprint", path.suffix)
    path.write_bytes(content)
    if open_data(config)[1].fingerprint != known:
        raise Wrong("the same content has another fingerprint", path.suffix)


def _pairs_of(batch: dict[str, np.ndarray]) -> dict[tuple[int, int], int]:
    counts = batch["mask"] > 0
    if (batch["mask"][counts] != 1).any():
        raise Wrong("a token counts more than once", str(batch["mask"][counts].max()))
    return _counted(batch["tokens"][counts], batch["targets"][counts])
