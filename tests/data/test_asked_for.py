"""Readers are asked for what they have, and a split has tokens that count in the loss."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.config import load
from spmdtrain.config.errors import DataError
from spmdtrain.data.batches import EvalWindows, Range, TrainStream
from spmdtrain.data.corpus import Corpus
from spmdtrain.data.mixtures.mixture import mix
from spmdtrain.data.packing import PackedStream, PackedWindows
from spmdtrain.data.prepare.encode import Encoded
from spmdtrain.data.prepare.token_writer import TokenWriter
from spmdtrain.data.source import Source, SourceWindows, open_data
from spmdtrain.data.targets import has_target
from spmdtrain.data.tokenizers.tokenizer import open_tokenizer

LENGTH = 6
CORPUS = Corpus(np.arange(90, dtype=np.uint32), np.arange(0, 90, 9), 90, None, "")
ORDER = {"seed": 0, "shuffle": True}
CONFIG = """
[model]
name = "gpt"
layers = 1
embed = 16
heads = 2
vocab = 256
[train]
sequence_length = 6
"""


def own_samples(tmp_path):
    """Readers of a caller's own source."""
    (tmp_path / "c.toml").write_text(CONFIG)
    config = load(tmp_path / "c.toml")
    source = Source(lambda _, index: np.arange(7) + index % 3, lambda *_: np.arange(7), 5)
    _, data = open_data(config, source)
    return {"own": data.train_samples(config), "own windows": SourceWindows(source, config).samples}


def readers(tmp_path):
    span = Range(0, 90)
    return own_samples(tmp_path) | {
        "train": TrainStream(CORPUS, span, LENGTH, **ORDER).samples,
        "in order": TrainStream(CORPUS, span, LENGTH, seed=0, shuffle=False).samples,
        "eval": EvalWindows(CORPUS, span, LENGTH).samples,
        "eval of documents": EvalWindows(CORPUS, span, LENGTH, packing="documents").samples,
        "packed": PackedWindows(CORPUS, span, LENGTH).samples,
        "packed stream": PackedStream(CORPUS, span, LENGTH, **ORDER).samples,
        "mixture": mix([0.5, 0.5]).locate,
    }


NONE = {
    "negative": [0, -1],
    "beyond 64 bits": [2**63],
    "fractions": [0.5],
    "truths": [True],
    "a table": [[0, 1]],
    "one": 3,
    "words": ["a"],
}


@pytest.mark.parametrize("asked", NONE)
def test_what_is_no_sample_index_is_refused_by_every_reader(asked, tmp_path):
    indices = np.array(NONE[asked])
    for name, samples in readers(tmp_path).items():
        with pytest.raises(DataError) as error:
            samples(indices)
        assert "sample ind" in str(error.value), name


def test_the_largest_index_is_a_sample_or_padding(tmp_path):
    for name, samples in readers(tmp_path).items():
        batch = samples(np.array([2**63 - 1, 0]))
        if "eval" in name or "windows" in name or name == "packed":
            assert not batch["mask"][0].any() and batch["mask"][1].any()


@pytest.mark.parametrize("span", [Range(-3, 20), Range(20, 10), Range(0, 91), Range(95, 99)])
@pytest.mark.parametrize("kind", [TrainStream, EvalWindows, PackedWindows, PackedStream])
def test_a_range_that_the_corpus_does_not_have_is_refused(kind, span):
    order = ORDER if "Stream" in kind.__name__ else {}
    with pytest.raises(DataError, match="are not a range of the corpus; found 90 tokens"):
        kind(CORPUS, span, LENGTH, **order)


@pytest.mark.parametrize("kind", [TrainStream, EvalWindows, PackedWindows, PackedStream])
@pytest.mark.parametrize("length", [0, -1])
def test_a_window_of_nothing_is_refused(kind, length):
    order = ORDER if "Stream" in kind.__name__ else {}
    with pytest.raises(DataError, match="a window has at least one token"):
        kind(CORPUS, Range(0, 90), length, **order)


def test_a_range_shorter_than_a_sequence_and_an_offset_below_0_are_refused():
    with pytest.raises(DataError, match="too short for a single sequence"):
        TrainStream(CORPUS, Range(0, 6), 6, **ORDER)
    with pytest.raises(DataError, match="not below 0"):
        CORPUS.read(-5, 3)


# --- tokens that count --------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=12),
    st.data(),
    st.sampled_from(["stream", "documents", "best_fit"]),
)
@settings(max_examples=200, deadline=None)
def test_a_range_has_a_target_where_its_evaluation_counts_one(lengths, data, packing):
    total = sum(lengths)
    loss = data.draw(
        st.none() | st.lists(st.sampled_from([0, 0, 0, 1]), min_size=total, max_size=total)
    )
    marks = None if loss is None else np.array(loss, np.uint8)
    starts = np.cumsum([0, *lengths[:-1]])
    corpus = Corpus(np.zeros(total, np.uint16), starts, 9, None, "", loss=marks)
    begin = data.draw(st.integers(0, total - 1))
    span = Range(begin, data.draw(st.integers(begin, total)))
    try:
        if packing == "best_fit":
            windows = PackedWindows(corpus, span, 3)
        else:
            windows = EvalWindows(corpus, span, 3, packing=packing)
        counted = windows.samples(np.arange(windows.windows))["mask"].any()
    except DataError:  # there is no window at all
        counted = False
    assert has_target(corpus, span, packing) == counted


def write(path, lengths, loss) -> None:
    total = sum(lengths)
    with TokenWriter(path, open_tokenizer("bytes"), None, with_loss=loss is not None) as writer:
        sizes = np.array(lengths)
        writer.write(Encoded(np.full(total, 97, "<u2"), sizes, sizes, loss))
        writer.finish()


FIRST = np.arange(200) < 150
NOT_TRAINED = "the training split has no token that counts in the loss; found 180 tokens, of which"
NOT_VALID = "the validation split has no token that counts in the loss; found 20 tokens, of which"


@pytest.mark.parametrize(
    ("lengths", "loss", "packing", "said"),
    [
        ([200], ~FIRST, "stream", None),
        ([200], np.arange(200) >= 185, "stream", NOT_TRAINED),
        ([200], FIRST, "stream", NOT_VALID),
        ([200], np.zeros(200), "best_fit", NOT_TRAINED),
        ([1] * 200, None, "stream", None),
        ([1] * 200, None, "documents", "found no document with two tokens; try --set data.packing"),
        ([1] * 200, None, "best_fit", "found no document with two tokens; try --set data.packing"),
        ([100] + [1] * 100, None, "best_fit", "validation split has no.*no document with two"),
        ([2] * 100, np.arange(200) % 2 == 0, "documents", "found marks on nothing but the first"),
    ],
)
def test_a_split_without_a_token_that_counts_is_refused_at_the_start(
    lengths, loss, packing, said, tmp_path
):
    marks = None if loss is None else loss.astype(np.uint8)
    write(tmp_path / "a", lengths, marks)
    write(tmp_path / "b", [200], None)
    alone = f'corpus = "tokens"\npath = "{tmp_path}/a.bin"\n'
    mixed = "".join(f'[[data.mix]]\nname = "{n}"\npath = "{tmp_path}/{n}.bin"\n' for n in "ba")
    for text, whose in ((alone, ""), (mixed, " of a")):
        data = f'[data]\npacking = "{packing}"\n{text}'
        (tmp_path / "c.toml").write_text(CONFIG + "[eval]\nevery = 2\n" + data)
        if said is None:
            open_data(load(tmp_path / "c.toml"))
            continue
        with pytest.raises(DataError, match=said.replace(" split has", f" split{whose} has")):
            open_data(load(tmp_path / "c.toml"))
        if "validation" in said:  # which nobody asks for
            open_data(load(tmp_path / "c.toml", ["eval.every=0"]))
