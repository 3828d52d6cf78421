from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.config.errors import DataError
from spmdtrain.data.batches import EvalWindows, Range, TrainStream, batch_ids, split
from spmdtrain.data.corpus import Corpus

FAST = settings(max_examples=60)


def counting(tokens, starts=(0,)):
    """A corpus whose id at each offset is the offset, so that a batch tells where it was read."""
    return Corpus(np.arange(tokens, dtype=np.uint32), np.array(starts, np.int64), tokens, None, "")


def same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype and np.array_equal(one[key], other[key]), key


spans = st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(1, 200)).map(
    lambda drawn: (Range(drawn[0], drawn[0] + drawn[1] + drawn[2]), drawn[1])  # at least one window
)


@FAST
@given(spans, st.integers(0, 2**64), st.sampled_from(["stream", "documents"]), st.data())
def test_a_sample_is_the_same_in_any_batch_in_any_order(drawn, seed, packing, data):
    span, length = drawn
    corpus = counting(span.stop + 3, starts=range(0, span.stop, 7))
    whole = TrainStream(corpus, span, length, seed=seed, shuffle=True, packing=packing).samples(
        np.arange(40)
    )
    order = np.array(data.draw(st.lists(st.integers(0, 39), min_size=1)))
    again = TrainStream(corpus, span, length, seed=seed, shuffle=True, packing=packing).samples(
        order
    )
    same(again, {key: value[order] for key, value in whole.items()})


@FAST
@given(spans, st.integers(0, 2**32), st.booleans())
def test_every_token_is_predicted_once_per_epoch_up_to_the_phase(drawn, seed, shuffle):
    span, length = drawn
    stream = TrainStream(counting(span.stop + 3), span, length, seed=seed, shuffle=shuffle)
    for epoch in (0, 1, 5):
        batch = stream.samples(epoch * stream.windows + np.arange(stream.windows))
        targets = np.sort(batch["targets"].ravel())
        first = targets[0]  # then without a gap or a repetition:
        assert np.array_equal(targets, np.arange(first, first + stream.windows * length))
        assert span.start < first and targets[-1] < span.stop
        missed = span.size - 1 - len(targets)
        assert missed < (2 * length if shuffle else length)
        assert np.array_equal(batch["tokens"] + 1, batch["targets"]) and batch["mask"].all()
        if not shuffle:
            assert np.array_equal(
                batch["targets"].ravel(), span.start + 1 + np.arange(len(targets))
            )


def test_epochs_and_seeds_differ_in_order_and_in_cuts():
    stream = TrainStream(counting(1005), Range(0, 1005), 10, seed=0, shuffle=True)
    epochs = [
        stream.starts(epoch * stream.windows + np.arange(stream.windows)) for epoch in range(30)
    ]
    assert len({tuple(np.argsort(starts)) for starts in epochs}) == 30
    assert {int(starts.min()) for starts in epochs} == set(range(10))
    other = TrainStream(counting(1005), Range(0, 1005), 10, seed=1, shuffle=True)
    others = [other.starts(epoch * other.windows + np.arange(other.windows)) for epoch in range(30)]
    assert len({tuple(np.argsort(starts)) for starts in epochs + others}) == 60
    assert [starts.min() for starts in epochs] != [starts.min() for starts in others]


def test_rows_fed_by_two_processes_are_the_rows_of_one():
    stream = TrainStream(counting(500), Range(0, 450), 16, seed=5, shuffle=True)
    for step in (0, 3, 1000):
        ids = batch_ids(step, 8)
        one, even, odd = (stream.samples(part) for part in (ids, ids[0::2], ids[1::2]))
        united = {
            key: np.stack([even[key], odd[key]], axis=1).reshape(one[key].shape) for key in one
        }
        same(united, one)


def test_steps_take_up_where_the_one_before_ended_whatever_their_size():
    assert np.array_equal(np.concatenate([batch_ids(step, 6) for step in range(4)]), np.arange(24))
    assert np.array_equal(batch_ids(3, 8), np.concatenate([batch_ids(6, 4), batch_ids(7, 4)]))


def test_keys_and_dtypes_are_what_the_module_says():
    for packing, extra in (
        ("stream", {}),
        ("documents", {"segment_ids": "int32", "positions": "int32"}),
    ):
        stream = TrainStream(counting(100), Range(0, 90), 8, seed=0, shuffle=True, packing=packing)
        windows = EvalWindows(counting(100), Range(90, 100), 8, packing=packing)
        for batch in stream.samples(batch_ids(0, 4)), windows.samples(np.arange(4)):
            kinds = {key: str(value.dtype) for key, value in batch.items()}
            plain = {"tokens": "int32", "targets": "int32", "mask": "float32", "sample": "uint32"}
            assert kinds == plain | extra
            assert all(
                value.shape == ((4,) if key == "sample" else (4, 8)) for key, value in batch.items()
            )
    assert stream.samples(np.array([2**32 + 5]))["sample"].tolist() == [5]


@FAST
@given(
    st.integers(0, 20), st.integers(2, 200), st.integers(1, 12), st.integers(1, 9), st.booleans()
)
def test_evaluation_predicts_every_token_but_the_first_exactly_once(
    start, size, length, batch_size, documents
):
    packing = "documents" if documents else "stream"
    windows = EvalWindows(
        counting(start + size), Range(start, start + size), length, packing=packing
    )
    count = -(-windows.windows // batch_size)
    batches = [windows.samples(batch_ids(step, batch_size)) for step in range(count)]
    assert all(batch["tokens"].shape == (batch_size, length) for batch in batches)
    counted = [batch["targets"][batch["mask"] == 1] for batch in batches]
    assert all(len(targets) for targets in counted)
    assert np.array_equal(np.concatenate(counted), start + 1 + np.arange(size - 1))
    inputs = [batch["tokens"][batch["mask"] == 1] for batch in batches]
    assert np.array_equal(np.concatenate(inputs) + 1, np.concatenate(counted))
    padding = windows.samples(np.full(batch_size, windows.windows))
    assert not padding["mask"].any()


def slow_documents(window_start, length, starts):
    """Token by token: (segment of each, position of each, whether its target is in the same
    document).
    """
    segments, positions, counts = [], [], []
    segment = position = 0
    for offset in range(window_start, window_start + length):
        if offset in starts and offset != window_start:
            segment, position = segment + 1, 0
        segments.append(segment)
        positions.append(position)
        counts.append(offset + 1 not in starts)
        position += 1
    return segments, positions, counts


@FAST
@given(
    st.sets(st.integers(1, 120), max_size=60),
    st.integers(1, 20),
    st.integers(0, 1000),
    st.booleans(),
)
def test_document_segments_equal_a_slow_walk(later_starts, length, seed, evaluate):
    starts = {0} | later_starts
    corpus = counting(130, sorted(starts))
    if evaluate:
        batch = EvalWindows(corpus, Range(50, 130), length, packing="documents").samples(
            np.arange(4)
        )
    else:
        stream = TrainStream(
            corpus, Range(0, 130), length, seed=seed, shuffle=True, packing="documents"
        )
        batch = stream.samples(np.arange(12))
    for row in range(len(batch["tokens"])):
        real = 130 - 50 - 1 - row * length if evaluate else length  # targets before the range ends
        if real < length:
            continue
        segments, positions, counts = slow_documents(int(batch["tokens"][row, 0]), length, starts)
        assert batch["segment_ids"][row].tolist() == segments
        assert batch["positions"][row].tolist() == positions
        assert batch["mask"][row].tolist() == counts


def test_the_split_is_the_first_part_and_the_tail():
    # nanoGPT's numbers.
    assert split(counting(1115394), 0.1, 64) == (Range(0, 1003854), Range(1003854, 1115394))
    assert split(counting(100), 0.0, 64) == (Range(0, 100), Range(100, 100))
    assert split(counting(11), 0.0, 10)[0].size == 11


@pytest.mark.parametrize(
    ("tokens", "fraction", "length", "message"),
    [
        (
            10,
            0.0,
            10,
            r"the training split is too short.*asked train.sequence_length=10.*"
            r"found 10 of 10 tokens",
        ),
        (100, 0.1, 10, r"the validation split is too short.*found 10 of 100 tokens"),
        (100, 0.95, 10, r"the training split"),
    ],
)
def test_a_split_too_short_for_one_window_is_refused(tokens, fraction, length, message):
    with pytest.raises(DataError, match=message):
        split(counting(tokens), fraction, length)


def test_evaluating_without_validation_tokens_is_refused():
    with pytest.raises(DataError, match="data.validation_fraction"):
        EvalWindows(counting(100), Range(100, 100), 8)


def test_an_id_beyond_the_vocabulary_never_gets_into_a_batch():
    corpus = replace(counting(100), vocab=50, files=((0, "some.bin"),))
    stream = TrainStream(corpus, Range(0, 100), 10, seed=0, shuffle=True)
    with pytest.raises(DataError, match=r"some.bin: id ([5-9][0-9]) at token offset \1 "):
        stream.samples(np.arange(stream.windows))
    with pytest.raises(DataError, match="some.bin"):
        EvalWindows(corpus, Range(40, 100), 10).samples(np.arange(4))
