"""No token of any validation split is in any training range, whatever files sources share."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmdtrain.config import RunConfig
from spmdtrain.config.errors import DataError
from spmdtrain.data.batches import Range, split
from spmdtrain.data.corpus import Corpus, token_corpus
from spmdtrain.data.prepare.encode import Encoded
from spmdtrain.data.prepare.token_writer import TokenWriter
from spmdtrain.data.source import open_data

FILES = "abcde"
VOCAB = 100_000
LENGTH = 4


class Numbers:
    """As many ids as all tokens of all files together, so that each says which one it is."""

    size = VOCAB

    def spec(self):
        return {"kind": "bytes"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of several documents; each by a link of either kind, too, as a copy, and elsewhere."""
    root = tmp_path_factory.mktemp("shared")
    (root / "other").symlink_to(root)
    rng = np.random.default_rng(0)
    at = 0
    for number, name in enumerate(FILES):
        lengths = rng.integers(1, 40, 6)
        total = int(lengths.sum())
        has_loss = name in "bd"
        with TokenWriter(root / name, Numbers(), None, with_loss=has_loss) as writer:
            ids = np.arange(at, at + total, dtype="<u4")
            loss = (ids % 3 > 0).astype(np.uint8) if has_loss else None
            writer.write(Encoded(ids, lengths, lengths, loss))
            writer.finish()
        at += total
        for link, make in (("soft", os.symlink), ("hard", os.link)):
            for path in root.glob(f"{name}.*"):
                make(path, root / f"{link}_{name}{path.suffix}")
        for path in root.glob(f"{name}.*"):
            shutil.copyfile(path, root / f"copy_{name}{path.suffix}")
        assert number < len(FILES)
    return root


NAMES = ("{}.bin", "{}", "soft_{}.bin", "hard_{}.bin", "other/{}.bin", "[{}].bin", "./{}.bin")
SPELLINGS = (*NAMES, "copy_{}.bin")
named = st.tuples(st.sampled_from(FILES), st.sampled_from(SPELLINGS))
sources = st.lists(named, min_size=1, max_size=4, unique_by=lambda each: each[0])


def config_of(folder: Path, mixture: list[list[tuple[str, str]]], fraction: float) -> RunConfig:
    mix = [
        {"name": f"s{number}", "path": [f"{folder}/" + how.format(name) for name, how in each]}
        for number, each in enumerate(mixture)
    ]
    data = {"corpus": "tokens", "mix": mix, "validation_fraction": fraction}
    train = {"sequence_length": LENGTH}
    return RunConfig.model_validate({"model": {"name": "gpt"}, "train": train, "data": data})


def ids_of(corpus: Corpus, span: Range) -> list[int]:
    return corpus.read(span.start, span.stop).tolist()


@example([[("a", "{}.bin"), ("b", "{}.bin")], [("a", "copy_{}.bin")]], 0.3)
@given(st.lists(sources, min_size=1, max_size=4), st.sampled_from([0.0, 0.1, 0.3, 0.5]))
@settings(max_examples=50, deadline=None)
def test_nothing_that_validates_is_trained_on(folder, mixture, fraction):
    try:
        _, data = open_data(config_of(folder, mixture, fraction))
    except DataError as error:
        assert "is too short for a single sequence" in str(error)
        return
    training = [set(ids_of(each.corpus, each.train)) for each in data.sources]
    validating = [set(ids_of(each.corpus, each.validation)) for each in data.sources]
    assert not set().union(*training) & set().union(*validating)
    names = [{name for name, _ in each} for each in mixture]
    for number, (each, source) in enumerate(zip(data.sources, mixture, strict=True)):
        corpus = each.corpus
        plain = token_corpus([f"{folder}/{name}.bin" for name, _ in source])
        whole = Range(0, len(plain.tokens))
        assert sorted(ids_of(corpus, whole)) == sorted(ids_of(plain, whole))  # none is lost
        # What a token is, is the same: whether it counts, and which one comes before it.
        ids = np.array(ids_of(corpus, whole))
        place = {token: at for at, token in enumerate(ids_of(plain, whole))}
        was = np.array([place[token] for token in ids.tolist()])
        assert np.array_equal(corpus.counts(*whole), plain.counts(*whole)[was])
        cut_at = set(corpus.document_starts.tolist())
        assert {at for at, old in enumerate(was) if old in set(plain.document_starts)} <= cut_at
        assert cut_at <= {at for at in range(len(ids)) if at == 0 or was[at] != was[at - 1] + 1} | {
            at for at, old in enumerate(was) if old in set(plain.document_starts)
        } | {each.validation.start}
        # A source that shares no file is cut as it always was.
        others = set().union(*(names[:number] + names[number + 1 :]))
        if not others & names[number] or not fraction:
            assert (each.train, each.validation) == split(plain, fraction, LENGTH)
            assert ids_of(corpus, whole) == ids_of(plain, whole)
            assert each.fingerprint == plain.fingerprint
        else:
            assert each.fingerprint != plain.fingerprint


@pytest.mark.parametrize("again", NAMES)
@pytest.mark.parametrize("setting", ["path", "validation_path", "mix"])
def test_a_file_twice_in_one_source_is_refused_by_any_name(again, setting, folder):
    one, other = f"{folder}/a.bin", f"{folder}/" + again.format("a")
    data = {
        "path": {"path": [one, other]},
        "validation_path": {"path": one, "validation_path": other},
        "mix": {"mix": [{"name": "a", "path": [one, other]}]},
    }[setting]
    settings_ = {"model": {"name": "gpt"}, "data": {"corpus": "tokens", **data}}
    with pytest.raises(DataError, match="is named twice"):
        open_data(RunConfig.model_validate(settings_))


def test_an_id_in_a_tail_is_refused_by_its_place_in_the_file(folder):
    config = config_of(folder, [[("a", "{}.bin"), ("b", "{}.bin")], [("a", "{}.bin")]], 0.5)
    _, data = open_data(config)
    every = data.sources[0]
    last = every.corpus.read(every.validation.stop - 1, every.validation.stop)
    b = token_corpus([f"{folder}/b.bin"])
    object.__setattr__(every.corpus, "vocab", int(last[0]))
    with pytest.raises(
        DataError, match=rf"b\.bin: id {last[0]} at token offset {len(b.tokens) - 1} "
    ):
        every.corpus.read(every.validation.start, every.validation.stop)


def test_a_copy_of_what_trains_does_not_validate(folder):
    files = {
        "path": [f"{folder}/a.bin", f"{folder}/b.bin"],
        "validation_path": f"{folder}/copy_b.bin",
    }
    settings_ = {"model": {"name": "gpt"}, "data": {"corpus": "tokens", **files}}
    with pytest.raises(DataError, match=r"copy_b\.bin is a copy of .*/b\.bin, which trains"):
        open_data(RunConfig.model_validate(settings_))
