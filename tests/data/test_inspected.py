"""What `data inspect` shows is what a step is fed: no target is lost, none of another document."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain import cli
from spmdtrain.config import RunConfig
from spmdtrain.data.batches import Range
from spmdtrain.data.corpus import Corpus
from spmdtrain.data.inspected.counts import count_corpus
from spmdtrain.data.inspected.passages import END_OF_TEXT, harmless, windows_of
from spmdtrain.data.inspected.printed import window_text
from spmdtrain.data.source import CorpusData
from spmdtrain.data.tokenizers.tokenizer import from_spec

LENGTHS = st.lists(st.integers(2, 12), min_size=4, max_size=12)
T = 6


def corpus_of(lengths: list[int], loss: np.ndarray | None = None, **fields) -> Corpus:
    """Documents of these lengths; each token's id is its offset."""
    total = sum(lengths)
    starts = np.cumsum([0, *lengths[:-1]])
    return Corpus(np.arange(total, dtype=np.uint32), starts, total, None, "", loss=loss, **fields)


def seen(corpus: Corpus, packing: str, count: int = 8):
    """The batch of the first samples, and what is shown of it."""
    data = CorpusData(corpus, Range(0, len(corpus.tokens)), Range(0, 0))
    config = RunConfig(
        data={"corpus": "synthetic", "packing": packing, "shuffle": False},
        train={"sequence_length": T},
    )
    batch = data.train_samples(config)(np.arange(count))
    return batch, windows_of(data, batch, packing)


@given(LENGTHS, st.sampled_from(["stream", "documents", "best_fit"]), st.data())
@settings(max_examples=80, deadline=None)
def test_what_counts_is_shown_as_such_and_all_else_is_not(lengths, packing, data):
    marks = data.draw(st.lists(st.integers(0, 1), min_size=sum(lengths), max_size=sum(lengths)))
    corpus = corpus_of(lengths, np.array(marks, np.uint8))
    batch, windows = seen(corpus, packing)
    for row, window in enumerate(windows):
        documents: dict[int, list[tuple[int, bool]]] = {}
        for passage in window.passages:
            ids = [int(word) for word in passage.text.split()]
            assert len(ids) == (0 if passage.kind == "padding" else passage.tokens)
            documents.setdefault(passage.document, []).extend(
                (i, passage.kind == "counts") for i in ids
            )
        counted = [i for pairs in documents.values() for i, counts in pairs[1:] if counts]
        assert sorted(counted) == sorted(batch["targets"][row][batch["mask"][row] == 1])
        for pairs in documents.values():
            ids = [i for i, _ in pairs]
            assert ids == list(range(ids[0], ids[0] + len(ids))) if ids else True
            if packing != "stream" and ids:
                of = np.searchsorted(corpus.document_starts, ids, side="right")
                assert len(set(of)) == 1
        padded = (batch["tokens"][row] + batch["targets"][row] == 0).sum()
        assert window.tokens_of("padding") in {0, padded}


def test_a_text_is_shown_with_its_marks_its_borders_and_no_escape():
    text = b"ask:yes\xffask:\x1b[2Jno\xff"
    ids = np.frombuffer(text, np.uint8)
    loss = np.frombuffer(b"\0\0\0\0\1\1\1\1" + b"\0" * 4 + b"\1" * 7, np.uint8)
    corpus = replace(
        corpus_of([len(text)], loss),
        tokens=ids,
        vocab=256,
        tokenizer=from_spec({"kind": "bytes"}),
        end_of_text=255,
    )
    data = CorpusData(corpus, Range(0, len(text)), Range(0, 0))
    batch = {
        "tokens": ids[None, :-1],
        "targets": ids[None, 1:],
        "mask": loss[None, 1:] * 1.0,
        "sample": np.array([3]),
    }
    (window,) = windows_of(data, batch, "stream")
    plain = window_text(window, colours=False)
    assert plain == (
        "=== sample 3\n--- document 1\n[-ask:-]yes"
        + END_OF_TEXT
        + "\n--- document 2\n[-ask:-]\\x1b[2Jno"
        + END_OF_TEXT
    )
    assert "\x1b[32myes" in window_text(window, colours=True)
    assert harmless("a\x1b\u202eb\n") == "a\\x1b\\u202eb\n"


def test_a_corpus_is_counted():
    tokens = np.array([1, 2, 3, 1, 2, 3, 5, 5, 1, 2, 3, 4], np.uint16)
    loss = np.array([0, 1, 1] * 4, np.uint8)
    corpus = Corpus(tokens, np.array([0, 3, 6, 8, 11]), 8, None, "", loss=loss)
    counts = count_corpus(corpus)
    assert (counts.tokens, counts.counted, counts.masked) == (12, 12, 4)
    assert (counts.documents, counts.longest, counts.median) == (5, 3, 3)
    assert (counts.repeated, counts.repeated_tokens) == (2, 6)
    assert (counts.unused, counts.rare, counts.unknown) == (3, 5, None)
    assert count_corpus(corpus, limit=7).repeated == 1
    blind = count_corpus(replace(corpus, has_documents=False))
    assert (blind.documents, blind.repeated) == (None, None)


def test_the_command_shows_a_config(tmp_path, capsys):
    config = tmp_path / "c.toml"
    config.write_text('[data]\ncorpus = "synthetic"\n[train]\nsteps = 4\nsequence_length = 8\n')
    assert cli.main(["data", "inspect", str(config), "--step", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    size = found["samples"][1] - found["samples"][0] + 1
    assert found["samples"][0] == 2 * size and found["corpora"][0]["repeated"] == 0
    assert found["tokens"] == {"counts": 9 * size, "masked": 0, "padding": 0}
    assert len(found["windows"]) == min(2, size)
    assert cli.main(["data", "inspect", str(config), "--windows", "1"]) == 0
    assert capsys.readouterr().out.count("=== sample") == 1


@pytest.mark.parametrize("step", ["0", "x"])
def test_a_step_that_is_none_is_refused(step, tmp_path, capsys):
    assert cli.main(["data", "inspect", str(tmp_path), "--step", step]) == 4
    assert "--step" in capsys.readouterr().err
