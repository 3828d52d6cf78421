"""Saved logits: each sample has those of its own tokens, and a folder fits only its data."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from helpers import TINY, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.config import from_resolved
from spmdtrain.config.errors import ConfigError, DataError, StorageError
from spmdtrain.data.batches import Range, TrainStream
from spmdtrain.data.corpus import Corpus
from spmdtrain.data.cut_samples import in_pieces, sequences_of
from spmdtrain.data.packing import PackedStream
from spmdtrain.data.saved_logits.logits_writer import LogitsWriter
from spmdtrain.data.saved_logits.manifest import MANIFEST_FILE, Manifest, read_manifest, saved_for
from spmdtrain.data.saved_logits.reader import IDS, LOGS, SavedLogits, open_logits
from spmdtrain.data.saved_logits.taught_windows import passes
from spmdtrain.data.tokenizers.tokenizer import tokenizer_fingerprint

TOKENS, TOP, LENGTH = 500, 3, 12
MANIFEST = Manifest(
    version=1,
    tokens=TOKENS,
    top=TOP,
    temperature=1.0,
    vocab=TOKENS,
    corpus="c" * 64,
    tokenizer=tokenizer_fingerprint(None),
    sequence_length=LENGTH,
    packing="stream",
    teacher="runs/teacher",
    weights="w" * 16,
    ids="",
    logs="",
)


def record(offset: int) -> tuple[np.ndarray, np.ndarray]:
    """What the teacher of these tests says of a token: it names the token's offset."""
    ids = (offset + np.arange(TOP)) % TOKENS
    return ids, -1 - (offset + np.arange(TOP + 1)) / TOKENS


def written(folder, manifest=MANIFEST, stretch=7):
    """A folder with all records but the last, in stretches from the end to the start."""
    with LogitsWriter(folder, manifest) as writer:
        for start in reversed(range(0, TOKENS - 1, stretch)):
            records = [record(at) for at in range(start, min(start + stretch, TOKENS - 1))]
            writer.write(start, *(np.stack(each) for each in zip(*records, strict=True)))
        writer.finish()
    return folder


def opened(folder, **changed) -> SavedLogits | None:
    given = {"corpus": "c" * 64, "tokenizer": None, "tokens": TOKENS} | changed
    config = tiny(f"train.sequence_length={LENGTH}", f"distill.logits={folder}", "model.vocab=500")
    return open_logits(config, **given)


def corpus_of(lengths: list[int]) -> Corpus:
    """Documents of these lengths; each token's id is its offset."""
    starts = np.cumsum([0, *lengths[:-1]])
    return Corpus(np.arange(sum(lengths), dtype=np.uint32), starts, TOKENS, None, "")


def assert_own(batch: dict[str, np.ndarray]) -> None:
    """Every input that counts, whose id is its offset, has the record of that offset."""
    counted = batch["mask"] == 1
    offsets = batch["tokens"][counted]
    want = [np.stack(each) for each in zip(*map(record, offsets.tolist()), strict=True)]
    np.testing.assert_array_equal(batch[IDS][counted], want[0])
    np.testing.assert_allclose(batch[LOGS][counted], want[1], rtol=2**-11)


@pytest.mark.parametrize("packing", ["stream", "documents", "best_fit"])
def test_each_sample_has_what_was_said_of_its_own_tokens(tmp_path, packing):
    taught = opened(written(tmp_path / "logits"))
    corpus, span = corpus_of([70, 5, 150, 40, 235]), Range(0, TOKENS)
    options = {"seed": 3, "shuffle": True, "beside": taught}
    if packing == "best_fit":
        stream = PackedStream(corpus, span, LENGTH, **options)
    else:
        stream = TrainStream(corpus, span, LENGTH, packing=packing, **options)
    several = 2 * stream.windows + 5  # of three epochs
    batch = stream.samples(np.arange(several))
    assert_own(batch)
    with pytest.raises(AssertionError):
        assert_own(batch | {IDS: np.roll(batch[IDS], 1, 0)})
    with pytest.raises(AssertionError):
        assert_own(batch | {LOGS: np.roll(batch[LOGS], 1, 1)})
    # After a resume, and on one of two shards, a process asks for some of the samples alone.
    for some in (np.arange(7, several), np.arange(several)[1::2]):
        alone = stream.samples(some)
        for name in (IDS, LOGS):
            np.testing.assert_array_equal(alone[name], batch[name][some])
    halves = in_pieces(stream.samples, 2)(sequences_of(np.arange(4), 2))
    assert halves[IDS].shape == (8, LENGTH // 2, TOP)
    assert_own(halves)


@given(st.integers(1, 12), st.integers(2, 60), st.sampled_from(["stream", "documents", "best_fit"]))
@settings(max_examples=60, deadline=None)
def test_a_teacher_says_once_of_each_token_what_it_read_with_enough_context(length, more, packing):
    """Where a student shuffles: with half a window before it, if there is so much."""
    size = length + more
    corpus = corpus_of([size])
    for shuffle in ("true", "false"):
        how = (f"train.sequence_length={length}", f"data.shuffle={shuffle}")
        config = tiny(*how, f"data.packing={packing}")
        context = {}
        for each in passes(corpus, Range(0, size), config):
            tokens = each.windows.samples(np.arange(each.windows.windows))["tokens"]
            for window, row in enumerate(tokens):
                for place, start, inputs in each.saved(window):
                    inside = row[place : place + inputs].tolist()
                    assert inside == [*range(start, start + inputs)] and not context.keys() & inside
                    context |= {at: place + number for number, at in enumerate(inside)}
        assert sorted(context) == [*range(size - 1)]
        if shuffle == "false" or packing == "best_fit":
            assert context == {at: at % length for at in range(size - 1)}, "that of the student"
        else:
            assert all(before >= min(at, length // 2) for at, before in context.items())


def test_padding_has_no_two_of_one_id(tmp_path):
    """A scatter of two numbers to one place is undefined."""
    taught = opened(written(tmp_path / "logits"))
    assert taught is not None
    stream = PackedStream(
        corpus_of([8, 8, 484]), Range(0, 16), 12, seed=0, shuffle=False, beside=taught
    )
    batch = stream.samples(np.arange(2))
    assert batch["mask"].min() == 0
    assert all(len(set(ids)) == TOP for ids in batch[IDS].reshape(-1, TOP).tolist())


def test_an_interrupted_writing_leaves_nothing_that_looks_whole(tmp_path):
    folder = written(tmp_path / "logits")
    with pytest.raises(RuntimeError), LogitsWriter(folder, MANIFEST) as writer:
        writer.write(0, *(each[None] for each in record(0)))
        raise RuntimeError("killed")
    with pytest.raises(DataError, match="no logits.json, which is written last") as refused:
        opened(folder)
    assert "spmdtrain data teach" in str(refused.value) and "\n" not in str(refused.value)
    assert opened(written(folder)) is not None, "it begins anew"


def test_it_says_before_it_writes_that_the_disk_is_too_small(tmp_path):
    large = replace(MANIFEST, tokens=10**15)
    with pytest.raises(StorageError, match="asked 14000000.0 GB"):
        LogitsWriter(tmp_path, large)
    assert not list(tmp_path.iterdir())
    whole = opened(written(tmp_path))
    with pytest.raises(StorageError, match="asked 14000000.0 GB"):
        LogitsWriter(tmp_path, large)
    assert whole and opened(tmp_path), "what was there stays"


OTHER = {
    "the data": {"corpus": "d" * 64},
    "the tokenizer": {"tokenizer": {"kind": "bytes", "json": "{}", "sha256": "0"}},
    "says nothing of the last tokens": {"tokens": TOKENS + 1},
}


@pytest.mark.parametrize(("says", "changed"), OTHER.items(), ids=OTHER)
def test_other_data_are_refused(tmp_path, says, changed):
    with pytest.raises(DataError, match=says) as refused:
        opened(written(tmp_path / "logits"), **changed)
    assert "try spmdtrain data teach CONFIG runs/teacher --out" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"sequence_length": 8}, "train.sequence_length; asked 12; found 8 there"),
        ({"packing": "documents"}, "data.packing; asked stream; found documents there"),
    ],
)
def test_another_way_of_reading_is_refused(tmp_path, changed, says):
    with pytest.raises(DataError, match=says):
        opened(written(tmp_path / "logits", replace(MANIFEST, **changed)))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"temperature": 2.0}, "another temperature; .*try --set distill.temperature=2"),
        ({"vocab": 400}, "another vocabulary; asked model.vocab=500; found 400"),
    ],
)
def test_another_temperature_or_vocabulary_is_refused(tmp_path, changed, says):
    folder = written(tmp_path / "logits", replace(MANIFEST, **changed))
    config = tiny(f"distill.logits={folder}", "model.vocab=500")
    with pytest.raises(ConfigError, match=says):
        saved_for(config)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "ids.bin is damaged; found other contents": lambda folder: flip(folder / "ids.bin"),
    "logs.bin is damaged; found 3000 bytes": lambda folder: (folder / "logs.bin").write_bytes(
        bytes(3000)
    ),
    "ids.bin is damaged; found no such file": lambda folder: (folder / "ids.bin").unlink(),
    "logits.json is damaged": lambda folder: (folder / MANIFEST_FILE).write_text("{}"),
    "this program reads version 1": lambda folder: (folder / MANIFEST_FILE).write_text(
        json.dumps(asdict(MANIFEST) | {"version": 2})
    ),
}


@pytest.mark.parametrize(("says", "damage"), DAMAGE.items(), ids=DAMAGE)
def test_a_damaged_folder_is_refused(tmp_path, says, damage):
    folder = written(tmp_path / "logits")
    damage(folder)
    with pytest.raises(DataError, match=says) as refused:
        opened(folder)
    assert "\n" not in str(refused.value)


def test_the_fingerprint_is_of_the_contents_and_not_of_the_place(tmp_path):
    _, one = read_manifest(str(written(tmp_path / "one")))
    _, other = read_manifest(str(written(tmp_path / "other", replace(MANIFEST, teacher="moved"))))
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != replace(one, weights="other").fingerprint


REFUSED = {
    "distill.teacher=runs/teacher": "are two teachers",
    "own.data=mine.py:samples": "own.data='mine.py:samples' makes its own samples",
    "train.z_loss=0.1": "shapes a loss without a teacher",
}


@pytest.mark.parametrize(("setting", "says"), REFUSED.items(), ids=REFUSED)
def test_what_does_not_go_with_saved_logits_is_refused_by_name(setting, says):
    with pytest.raises(ConfigError, match=says) as refused:
        tiny("distill.logits=logits", setting)
    assert "distill.logits='logits'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_mixture_is_refused_by_name():
    mixed = {"data": {"mix": [{"name": "a", "path": "a.bin"}]}, "distill": {"logits": "logits"}}
    with pytest.raises(ConfigError, match="one corpus, and data.mix draws from several"):
        from_resolved({"config": TINY | mixed, "origin": {}})


def test_a_stream_is_refused_by_name():
    of_stream = ("data.corpus=jsonl", "data.path=a.jsonl", "data.validation_fraction=0")
    with pytest.raises(ConfigError, match="data.corpus='jsonl' is a stream"):
        tiny("distill.logits=logits", *of_stream)
