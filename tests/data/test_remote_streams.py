"""Streams of files that a store gives: slowly, in parts, after refusals, or not at all."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from object_store import ObjectStore

from spmdtrain.config.errors import DataError, StorageError
from spmdtrain.config.schema import DataConfig, RunConfig, TrainConfig
from spmdtrain.data.source import open_data
from spmdtrain.data.streams import remote
from spmdtrain.data.streams.local_copies import LocalCopies
from spmdtrain.data.streams.shards import find_shards

pytest.importorskip("aiohttp")
FILES = 12


@pytest.fixture(scope="module")
def texts():
    drawn = np.random.default_rng(1)
    return [
        "".join(json.dumps({"text": "ab" * int(size)}) + "\n" for size in drawn.integers(9, 99, 40))
        for _ in range(FILES)
    ]


@pytest.fixture
def store(texts, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    store = ObjectStore()
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
    store.objects = {f"data/{at:02}.jsonl": text.encode() for at, text in enumerate(texts)}
    remote._file_system.cache_clear()
    yield store
    remote._file_system.cache_clear()
    store.close()


def addresses(store, scheme="http"):
    if scheme == "s3":
        pytest.importorskip("s3fs")
        return ("s3://data/*.jsonl",)
    return tuple(f"{store.url}/{key}" for key in sorted(store.objects))


def open_(paths, folder, **data):
    train = TrainConfig(steps=4, global_batch=8, sequence_length=32)
    given = {"shuffle_buffer": 8, "cache": str(folder)} | data
    config = RunConfig(train=train, data=DataConfig(corpus="jsonl", path=paths, **given))
    config, data = open_data(config)
    return data.train_samples(config)


@pytest.fixture(scope="module")
def local(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    for at, text in enumerate(texts):
        (folder / f"{at:02}.jsonl").write_text(text)
    return open_(str(folder / "*.jsonl"), folder)(np.arange(1500))["tokens"]


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("weather", ["fine", "slow", "cut", "refusing", "late"])
def test_a_store_gives_the_batches_of_files_on_disk(store, local, tmp_path, weather, scheme):
    samples = open_(addresses(store, scheme), tmp_path / "copies")
    store.delay = 0.05 * (weather == "slow")
    store.cuts = 3 * (weather == "cut")
    store.refusals = [503, 500, 503] * (weather == "refusing")
    store.unknown = 3 * (weather == "late")
    assert np.array_equal(samples(np.arange(1500))["tokens"], local)
    assert not (store.cuts or store.refusals or store.unknown), "the weather was met"


def taken(folder):
    """Returns the bytes of a folder, from which a thread that copies ahead removes files."""
    sizes = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sum(sizes)


@pytest.mark.seconds
def test_copies_keep_to_their_room_and_are_taken_again(store, local, tmp_path):
    """Ten times as many bytes go through the folder as it may hold."""
    most = 3 * max(map(len, store.objects.values()))
    folder = tmp_path / "copies"
    samples = open_(addresses(store), folder, cache_gb=most / 1e9)
    for first in range(0, 1500, 50):
        found = samples(np.arange(first, first + 50))["tokens"]
        assert np.array_equal(found, local[first : first + 50])
        assert taken(folder) <= most
    before = store.asked.total()
    again = open_(addresses(store), tmp_path / "large")
    again(np.arange(1500))
    once = store.asked.total() - before
    open_(addresses(store), tmp_path / "large")(np.arange(1500))
    assert store.asked.total() - before - once < once, "copies that are there are not taken again"


def test_a_copy_in_use_is_not_removed(store, tmp_path):
    shards = find_shards(addresses(store), "jsonl")
    copies = LocalCopies(tmp_path / "copies", max(shard.size for shard in shards) + 10)
    with copies.held(shards[0]) as path:
        with pytest.raises(StorageError, match="in use"), copies.held(shards[1]):
            pass
        assert Path(path).read_text() == store.objects["data/00.jsonl"].decode()
    with copies.held(shards[1]) as path:
        assert Path(path).read_text() == store.objects["data/01.jsonl"].decode()


def test_what_a_store_does_not_give_is_refused_in_one_line(store, tmp_path):
    with pytest.raises(DataError, match="none.jsonl: there is no such file"):
        open_(f"{store.url}/data/none.jsonl", tmp_path)
    with pytest.raises(DataError, match="none.jsonl: Cannot connect to host localhost:1"):
        open_("http://localhost:1/none.jsonl", tmp_path)
    store.refusals = [403, 403]  # to HEAD, and to GET
    with pytest.raises(DataError, match="answers 403; try the address and its credentials"):
        open_(addresses(store)[0], tmp_path)
    assert not store.refusals, "a refusal for good is not asked again"
    samples = open_(addresses(store), tmp_path, cache_gb=1e-6)
    with pytest.raises(DataError, match="--set data.cache_gb="):
        samples(np.arange(8))


def test_a_file_that_changes_under_the_run_is_refused(store, tmp_path):
    samples = open_(addresses(store)[0], tmp_path)
    key = "data/00.jsonl"
    store.objects[key] = store.objects[key].replace(b"abab", b"cdcd")
    with pytest.raises(DataError, match="has changed since it was listed"):
        samples(np.arange(8))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_line_that_is_wrong_is_named_by_its_address(store, tmp_path):
    damaged = {
        "bad.jsonl": (b'{"text": "a"}\n[1]\n', "bad.jsonl:2 is not a JSON"),
        "cut.jsonl.gz": (b"\x1f\x8b\x08", "cannot read"),
    }
    for name, (content, said) in damaged.items():
        store.objects[f"data/{name}"] = content
        address = f"{store.url}/data/{name}"
        with pytest.raises(DataError, match=said) as error:
            open_(address, tmp_path)(np.arange(8))
        assert address in str(error.value) and str(tmp_path) not in str(error.value)
