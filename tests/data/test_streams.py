"""Documents that are tokenized while a run reads them: the batches of prepared data, in any order
of questions, from any place on.
"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.config.schema import DataConfig, RunConfig, TrainConfig
from spmdtrain.data.prepare.prepare_corpus import Job, prepare
from spmdtrain.data.source import open_data, progress_of, recall_progress
from spmdtrain.data.streams import ledger, shard_reader
from spmdtrain.data.streams.shard_reader import ShardReader
from spmdtrain.data.texts import documents

FILES = 5
LENGTH = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """JSON lines and the same documents as Parquet; some are empty, and so is a whole file."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("documents")
    drawn = np.random.default_rng(0)
    for number in range(FILES):
        lengths = drawn.integers(0, 40, 30) if number != 2 else []
        texts = ["".join(map(chr, drawn.integers(97, 123, length))) for length in lengths]
        lines = [json.dumps({"text": text, "id": row}) for row, text in enumerate(texts)]
        (folder / f"{number}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        table = arrow.table({"text": arrow.array(texts, arrow.string())})
        parquet.write_table(table, folder / f"{number}.parquet")
    return folder


def config_of(folder, corpus="jsonl", *, seed=3, **data):
    train = TrainConfig(steps=4, global_batch=8, sequence_length=LENGTH, seed=seed)
    given = {"path": str(folder / f"*.{corpus}"), "shuffle_buffer": 7} | data
    settings = DataConfig(corpus=corpus, **given)
    return RunConfig(train=train, data=settings)


def samples_of(config, ledger=None):
    config, data = open_data(config)
    if ledger:
        recall_progress(data, ledger)
    return data.train_samples(config), data


def prepared(folder, out, patterns):
    prepare(Job([str(folder / pattern) for pattern in patterns], str(out)))
    data = {"corpus": "tokens", "path": f"{out}.bin", "validation_fraction": 0.0}
    return data


def same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype and np.array_equal(one[key], other[key]), key


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("corpus", ["jsonl", "parquet"])
def test_a_stream_gives_the_batches_of_prepared_data(folder, tmp_path, corpus, packing, capsys):
    stream, _ = samples_of(config_of(folder, corpus, shuffle=False, packing=packing))
    kept = prepared(folder, tmp_path / "all", [f"*.{corpus}"])
    config = config_of(folder)
    config = config.model_copy(update={"data": DataConfig(**kept, shuffle=False, packing=packing)})
    config, data = open_data(config)
    tokens = data.train_samples(config)
    for first in range(0, 3 * data.samples_per_epoch(config), 8):  # across the ends of epochs
        same(stream(first + np.arange(8)), tokens(first + np.arange(8)))
    capsys.readouterr()


def test_a_stream_begins_documents_as_prepared_data_does(
    folder, tmp_path, tokenizer_json, put_before_texts
):
    put_before_texts("he")
    name = {"tokenizer": str(tokenizer_json)}
    prepare(Job([str(folder / "*.jsonl")], str(tmp_path / "all"), **name))
    config = config_of(folder)
    kept = DataConfig(corpus="tokens", path=f"{tmp_path / 'all'}.bin", shuffle=False)
    config = config.model_copy(update={"data": kept})
    config, data = open_data(config)
    stream, opened = samples_of(config_of(folder, shuffle=False, **name))
    assert opened.begin_of_text == data.begin_of_text is not None
    same(stream(np.arange(8)), data.train_samples(config)(np.arange(8)))
    bare, other = samples_of(config_of(folder, shuffle=False, begin_of_text="none", **name))
    assert other.begin_of_text is None and other.fingerprint != opened.fingerprint
    assert not np.array_equal(bare(np.arange(8))["tokens"], stream(np.arange(8))["tokens"])


def test_shuffled_windows_are_those_of_the_shards_in_another_order(folder, tmp_path):
    """Each block of seven windows holds those that the shards, in the order of the epoch, have."""
    config = config_of(folder)
    config, data = open_data(config)
    samples = data.train_samples(config)
    found = samples(np.arange(400))["tokens"]
    reader = ShardReader(data.shards, data.recipe, data.copies, data.ledger, 1, config.train.seed)
    assert reader.order(0) != reader.order(1)
    for epoch in range(2):
        order = reader.order(epoch)
        names = [data.shards[shard].address.rpartition("/")[2] for shard in order]
        kept = prepared(folder, tmp_path / f"epoch{epoch}", names)
        ids = np.fromfile(kept["path"], np.uint16)
        windows = (len(ids) - LENGTH) // LENGTH
        mine = found[epoch * windows : (epoch + 1) * windows]
        (phase,) = {
            phase
            for phase in range(LENGTH)
            if sorted(map(tuple, _cut(ids, phase, windows))) == sorted(map(tuple, mine))
        }
        straight = _cut(ids, phase, windows)
        assert not np.array_equal(mine, straight)
        for first in range(0, windows, 7):
            block = slice(first, min(first + 7, windows))
            assert sorted(map(tuple, mine[block])) == sorted(map(tuple, straight[block]))


def _cut(ids, phase, windows):
    return ids[phase : phase + windows * LENGTH].reshape(windows, LENGTH).astype(np.int32)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=12),
    st.booleans(),
    st.sampled_from(["stream", "documents"]),
    st.integers(0, 300),
)
def test_a_sample_is_the_same_whenever_it_is_asked_for(folder, asked, shuffle, packing, read):
    """Also by a run that resumes with what another one has learned of the files."""
    config = config_of(folder, shuffle=shuffle, packing=packing)
    whole = samples_of(config)[0](np.arange(401))
    first, data = samples_of(config)
    first(np.arange(read, read + 2))
    ledger = json.loads(json.dumps(progress_of(data)))
    again, _ = samples_of(config, ledger)
    wanted = np.array(asked)
    same(again(wanted), {key: value[wanted] for key, value in whole.items()})


def test_a_shard_that_was_read_is_passed_over(folder, monkeypatch):
    """A run that resumes reads from the shard that holds its next block on, not from the first."""
    config = config_of(folder, shuffle=False)
    samples, data = samples_of(config)
    samples(np.arange(80))
    read = []
    whole = shard_reader.read_chunks

    def watched(path, *options, **named):
        read.append(path.rpartition("/")[2])
        return whole(path, *options, **named)

    monkeypatch.setattr(shard_reader, "read_chunks", watched)
    samples_of(config, progress_of(data))[0](np.arange(80, 82))
    assert read and "0.jsonl" not in read


def test_places_within_a_shard_are_remembered(folder, monkeypatch):
    monkeypatch.setattr(ledger, "MARK_TOKENS", 100)
    monkeypatch.setattr(documents, "CHUNK_BYTES", 200)
    config = config_of(folder, shuffle=False)
    samples, data = samples_of(config)
    whole = samples(np.arange(150))
    skipped = []
    read = shard_reader.read_chunks

    def watched(path, field, skip):
        skipped.append(skip)
        return read(path, field, skip=skip)

    monkeypatch.setattr(shard_reader, "read_chunks", watched)
    again, _ = samples_of(config, json.loads(json.dumps(progress_of(data))))
    same(again(np.arange(140, 150)), {key: value[140:150] for key, value in whole.items()})
    assert skipped[0] > 0


def test_workers_make_the_tokens_of_one_process(folder):
    wanted = np.arange(40)
    one, _ = samples_of(config_of(folder))
    two, _ = samples_of(config_of(folder, workers=2))
    same(one(wanted), two(wanted))


def test_validation_files_are_evaluated_whole(folder, tmp_path, capsys):
    config = config_of(folder, validation_path=str(folder / "4.jsonl"), shuffle=False)
    data = config.data.model_copy(update={"path": str(folder / "[0-3].jsonl")})
    config, opened = open_data(config.model_copy(update={"data": data}))
    kept = prepared(folder, tmp_path / "held", ["4.jsonl"])
    ids = np.fromfile(kept["path"], np.uint16)
    (held,) = opened.eval_sets(config)
    found = held.windows.samples(np.arange(held.windows.windows))
    assert (
        np.array_equal(found["targets"][found["mask"] > 0], ids[1:]) and held.tokens == len(ids) - 1
    )
    capsys.readouterr()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"validation_fraction": 0.1}, "the end of .* is not known"),
        ({"packing": "best_fit"}, "is streamed"),
        ({"tokenizer": "characters"}, "is built from a whole corpus"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(folder, settings, said):
    with pytest.raises(ConfigError, match=said):
        config_of(folder, **settings)


def test_settings_of_streams_are_refused_elsewhere():
    with pytest.raises(ConfigError, match="data.workers=2 is for"):
        DataConfig(workers=2)


def test_files_that_cannot_be_streamed_are_refused_in_one_line(folder, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"words": "none"}\n')
    (tmp_path / "short.jsonl").write_text('{"text": "no"}\n')
    (tmp_path / "none.jsonl").write_text("\n")
    for name, said in {
        "bad.jsonl": "bad.jsonl:2 has no field 'text'",
        "short.jsonl": "too short for a single sequence",
        "none.jsonl": "too short for a single sequence",
    }.items():
        samples, _ = samples_of(config_of(folder, path=str(tmp_path / name)))
        with pytest.raises(DataError, match=said):
            samples(np.arange(8))
    with pytest.raises(DataError, match="--set data.corpus=parquet"):
        samples_of(config_of(folder, path=str(folder / "0.parquet")))
    with pytest.raises(DataError, match="0.jsonl is .*0.jsonl, which trains"):
        samples_of(config_of(folder, validation_path=str(folder / "0.jsonl")))
    with pytest.raises(ConfigError, match="whose end is not known"):
        config = config_of(folder)
        train = TrainConfig(epochs=1, global_batch=8, sequence_length=LENGTH)
        samples_of(config.model_copy(update={"train": train}))
