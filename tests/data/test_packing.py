"""Documents packed whole: no token is lost, no document that fits is cut, little is padding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.config.errors import DataError
from spmdtrain.data.batches import Range
from spmdtrain.data.corpus import Corpus
from spmdtrain.data.packing import PackedStream, PackedWindows, pack_documents

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60).filter(
    lambda lengths: max(lengths) > 1
)


def corpus_of(lengths: list[int], **fields) -> Corpus:
    """Documents of these lengths; each token's id is its offset."""
    total = sum(lengths)
    starts = np.cumsum([0, *lengths[:-1]])
    return Corpus(np.arange(total, dtype=np.uint32), starts, total, None, "", **fields)


@pytest.mark.core
@given(LENGTHS, st.integers(1, 17))
@settings(max_examples=200, deadline=None)
def test_every_token_but_a_documents_first_is_a_target_once_given_what_stands_before_it(
    lengths, length
):
    corpus = corpus_of(lengths)
    windows = PackedWindows(corpus, Range(0, sum(lengths)), length)
    batch = windows.samples(np.arange(windows.windows + 2))
    counted = batch["mask"] == 1
    assert sorted(batch["targets"][counted]) == sorted(
        set(range(sum(lengths))) - set(corpus.document_starts.tolist())
    )
    assert (batch["tokens"][counted] + 1 == batch["targets"][counted]).all()
    assert not counted[windows.windows :].any() and counted[: windows.windows].any(1).all()
    document = np.searchsorted(corpus.document_starts, batch["tokens"], side="right")
    for row in range(windows.windows):
        segments = batch["segment_ids"][row]
        assert (np.diff(segments) >= 0).all() and segments[0] == 0
        for segment in np.unique(segments):
            inside = segments == segment
            assert batch["positions"][row][inside].tolist() == list(range(inside.sum()))
            mine = inside & counted[row]
            assert len(set(document[row][mine])) <= 1  # attention stays in one document
            if mine.any():
                assert (
                    np.diff(batch["tokens"][row][mine]) == 1
                ).all() and mine.sum() == inside.sum()
    whole = {number: size - 1 for number, size in enumerate(lengths, 1) if 1 < size <= length + 1}
    for number, size in whole.items():
        rows = np.flatnonzero(((document == number) & counted).any(1))
        assert len(rows) == 1 and ((document[rows[0]] == number) & counted[rows[0]]).sum() == size


@given(LENGTHS, st.integers(4, 30))
@settings(max_examples=200, deadline=None)
def test_it_packs_as_well_as_first_fit_decreasing(lengths, length):
    packing = pack_documents(corpus_of(lengths).document_starts, Range(0, sum(lengths)), length)
    rooms: list[int] = []
    for size in sorted(packing.sizes.tolist(), reverse=True):
        fits = [window for window, room in enumerate(rooms) if room >= size]
        if fits:
            rooms[fits[0]] -= size
        else:
            rooms.append(length - size)
    # Both keep within 11/9 of the best (Johnson, 1974).
    assert packing.windows <= len(rooms) * 11 // 9 + 1
    assert packing.sizes.sum() > (packing.windows - 1) * length / 2  # no two windows could be one


def test_a_window_that_is_not_full_takes_what_fits():
    """Two fives in one window of twelve, the third with the four and the three in another."""
    corpus = corpus_of([6, 6, 6, 5, 4])
    packing = pack_documents(corpus.document_starts, Range(0, 27), 12)
    found = [
        packing.sizes[begin:end].tolist()
        for begin, end in zip(packing.bounds[:-1], packing.bounds[1:], strict=True)
    ]
    assert found == [[5, 5], [5, 4, 3]]


def test_a_million_documents_are_packed_with_little_padding():
    """Lengths as of web pages, windows as of a small model: less than 1 % is padding."""
    lengths = np.random.default_rng(0).lognormal(6, 1, 1_000_000).astype(np.int64) + 2
    starts = np.cumsum(lengths) - lengths
    packing = pack_documents(starts, Range(0, int(lengths.sum())), 2048)
    assert packing.sizes.sum() > 0.99 * packing.windows * 2048


def test_a_part_of_a_corpus_has_its_own_documents():
    """A document that the split cuts is one in each part."""
    corpus = corpus_of([5, 6, 7])
    for span, targets in (
        (Range(0, 8), {1, 2, 3, 4, 6, 7}),
        (Range(8, 18), {9, 10, 12, 13, 14, 15, 16, 17}),
    ):
        windows = PackedWindows(corpus, span, 6)
        batch = windows.samples(np.arange(windows.windows))
        assert set(batch["targets"][batch["mask"] == 1]) == targets
    with pytest.raises(
        DataError, match="no document has two tokens; try --set data.packing=stream"
    ):
        PackedWindows(corpus, Range(4, 6), 6)


def test_the_loss_is_on_what_counts_alone():
    loss = np.array([0, 1, 0, 1, 1, 0], np.uint8)
    windows = PackedWindows(corpus_of([3, 3], loss=loss), Range(0, 6), 4)
    batch = windows.samples(np.arange(1))
    assert batch["targets"][batch["mask"] == 1].tolist() == [1, 4]


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_window_once_in_an_order_of_its_own(shuffle):
    corpus = corpus_of([9, 3, 12, 5, 8, 30, 2, 7])
    span = Range(0, len(corpus.tokens))
    stream = PackedStream(corpus, span, 12, seed=0, shuffle=shuffle)
    windows = PackedWindows(corpus, span, 12)
    count = windows.windows
    in_order = windows.samples(np.arange(count))["tokens"].tolist()
    assert [row[0] for row in in_order] == sorted(row[0] for row in in_order)
    drawn = stream.samples(np.arange(3 * count))
    epochs = [drawn["tokens"][epoch * count :][:count].tolist() for epoch in range(3)]
    assert all(sorted(epoch) == sorted(in_order) for epoch in epochs)
    assert (epochs == 3 * [in_order]) != shuffle and (epochs[1] != epochs[2]) == shuffle
    rows = np.array([7, 2, 2 * count])
    for name, values in stream.samples(rows).items():
        assert np.array_equal(values, drawn[name][rows]), name
