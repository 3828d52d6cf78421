"""The windows of token files equal those of the same tokens in memory, with every call real."""

import mmap
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.data.batches import EvalWindows, Range, TrainStream
from spmdtrain.data.corpus import Corpus, token_corpus
from spmdtrain.data.packing import PackedStream, PackedWindows
from spmdtrain.data.prepare.encode import Encoded
from spmdtrain.data.prepare.token_writer import TokenWriter
from spmdtrain.data.tokenizers.tokenizer import open_tokenizer

PAGE = mmap.PAGESIZE // 2  # tokens of uint16 in a page of memory
# At a page's end, one token off it, and anywhere.
SIZES = st.one_of(
    st.integers(2, 40),
    st.tuples(st.integers(1, 3), st.integers(-2, 2)).map(lambda at: at[0] * PAGE + at[1]),
    st.integers(2, 3 * PAGE),
)


def write_file(path: Path, lengths: list[int], ids: np.ndarray, loss: np.ndarray | None) -> None:
    """Writes a token file of documents of these lengths."""
    with TokenWriter(path, open_tokenizer("bytes"), None, with_loss=loss is not None) as writer:
        counts = np.array(lengths)
        writer.write(Encoded(ids.astype("<u2"), counts, counts, loss))
        writer.finish()


def documents(total: int, rng: np.random.Generator) -> list[int]:
    cuts = np.unique(rng.integers(1, total, rng.integers(1, 6)))
    return np.diff([0, *cuts, total]).tolist()


@pytest.mark.seconds
@given(
    st.lists(SIZES, min_size=1, max_size=3),
    st.integers(1, 64),
    st.integers(1, 200),
    st.booleans(),
    st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_windows_of_files_equal_those_of_memory(sizes, length, batch, with_loss, seed):
    """Any sizes of files, both ends, full last batches or not, and rows that only fill one up."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 256, sum(sizes)).astype(np.uint16)
    loss = rng.integers(0, 2, sum(sizes)).astype(np.uint8) if with_loss else None
    parts = np.cumsum([0, *sizes])
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (begin, end) in enumerate(zip(parts[:-1], parts[1:], strict=True)):
            lengths = documents(end - begin, rng)
            starts += [int(begin + at) for at in np.cumsum([0, *lengths[:-1]])]
            counted = None if loss is None else loss[begin:end]
            write_file(Path(folder, f"{number}"), lengths, ids[begin:end], counted)
        files = token_corpus([f"{folder}/*.bin"])
        memory = Corpus(ids, np.array(starts), 256, None, "", loss=loss)
        cut = int(rng.integers(0, sum(sizes) - 1))
        for span in (Range(0, sum(sizes)), Range(cut, sum(sizes)), Range(0, max(cut, 2))):
            for one, other in zip(
                readers(files, span, length), readers(memory, span, length), strict=True
            ):
                is_endless = isinstance(one, TrainStream | PackedStream)
                last = 7 if is_endless else -(-one.windows // batch) - 1
                for step in (0, last):
                    rows = step * batch + np.arange(batch)
                    got, want = one.samples(rows), other.samples(rows)
                    for name, values in want.items():
                        assert np.array_equal(got[name], values), (type(one), name)


def readers(corpus: Corpus, span: Range, length: int) -> list:
    """All that reads a range of tokens, where it has enough of them."""
    found: list = [
        EvalWindows(corpus, span, length, packing=packing) for packing in ("stream", "documents")
    ]
    order = {"seed": 3, "shuffle": True}
    if span.size > length:
        found.append(TrainStream(corpus, span, length, **order))
    in_pairs = np.diff([*corpus.document_starts, len(corpus.tokens)])
    if span.size == len(corpus.tokens) and in_pairs.max() > 1:
        found.append(PackedWindows(corpus, span, length))
        found.append(PackedStream(corpus, span, length, **order))
    return found
