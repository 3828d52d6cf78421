"""Splits, file by file, the sources of a mixture that share files.

The validation split of a corpus is the tail of all its tokens. If a mixture names a file, or a copy
of it, in two sources, the tail of one could be in the middle of the other, which trains on it. Such
sources are split file by file, so that the same part of a file validates in each of them.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spmdtrain.data.corpus import Corpus
from spmdtrain.data.texts.files import identity_of
from spmdtrain.data.token_files.blocks import contents
from spmdtrain.data.token_files.rows import Concatenated, StoredRow


def cut_shared_files(corpora: Sequence[Corpus], fraction: float) -> list[Corpus]:
    """Returns the corpora; if some share a file, they are split file by file.

    `fraction` is the tail of each file that validates.
    """
    files = [[identity_of(path) for _, path in corpus.files] for corpus in corpora]
    path_of = {
        identity: path
        for corpus, own in zip(corpora, files, strict=True)
        for identity, (_, path) in zip(own, corpus.files, strict=True)
    }
    content = contents(path_of)
    named = Counter(content[file] for own in files for file in own)
    return [
        _cut_each_file(corpus, fraction)
        if any(named[content[file]] > 1 for file in own)
        else corpus
        for corpus, own in zip(corpora, files, strict=True)
    ]


def _cut_each_file(corpus: Corpus, fraction: float) -> Corpus:
    """Returns the corpus with the heads of all files first, then the tails, which validate."""
    begins = [first for first, _ in corpus.files]
    ends = [*begins[1:], len(corpus.tokens)]
    cuts = [
        begin + int((end - begin) * (1 - fraction)) for begin, end in zip(begins, ends, strict=True)
    ]
    numbers = range(len(begins))
    training = [(number, begins[number], cuts[number]) for number in numbers]
    validating = [(number, cuts[number], ends[number]) for number in numbers]
    parts = [part for part in (*training, *validating) if part[1] < part[2]]
    firsts = np.cumsum([0, *(stop - start for _, start, stop in parts)]).tolist()
    rows = [
        tuple(
            row.part(start - begins[number], stop - begins[number])
            for row in corpus.rows[number][1]
        )
        for number, start, stop in parts
    ]
    starts = [
        _starts_inside(corpus.document_starts, start, stop) + first
        for (_, start, stop), first in zip(parts, firsts, strict=False)
    ]
    return replace(
        corpus,
        tokens=Concatenated([row for row, *_ in rows]),
        document_starts=np.concatenate(starts),
        fingerprint=hashlib.sha256(f"{corpus.fingerprint} each file".encode()).hexdigest(),
        files=tuple(
            (first, corpus.files[number][1])
            for (number, _, _), first in zip(parts, firsts, strict=False)
        ),
        file_offsets=tuple(start - begins[number] for number, start, _ in parts),
        rows=tuple(zip(firsts, rows, strict=False)),
        loss=None if corpus.loss is None else Concatenated([_loss_of(row) for row in rows]),
        validation_start=sum(stop - start for _, start, stop in training),
    )


def _starts_inside(document_starts: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Returns the document starts among the tokens start to stop - 1, counted from `start`."""
    first, last = np.searchsorted(document_starts, [start + 1, stop])
    return np.append(0, document_starts[first:last] - start)


def _loss_of(rows: tuple[StoredRow, ...]) -> "np.ndarray | StoredRow":
    tokens, *loss = rows
    return loss[0] if loss else np.broadcast_to(np.uint8(1), len(tokens))
