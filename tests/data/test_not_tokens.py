"""Files that another program has written, or that hold no token ids at all, under the name .bin.

Each is read as what it is, or refused in one line: none is taken for ids that it does not hold.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import shlex
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmdtrain.config.errors import DataError
from spmdtrain.config.schema import DataConfig
from spmdtrain.data.corpus import Corpus, open_corpus
from spmdtrain.data.token_files.blocks import BLOCK_BYTES, COVERED

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 50257, 3000)
WIDE = RNG.integers(0, 128000, 3000)
TEXT = "It was the best of times, it was the worst of times – so they say.\n" * 40


def opened(path: Path, vocab: int = 50304, **more) -> Corpus:
    return open_corpus(DataConfig(corpus="tokens", path=str(path), **more), vocab, 0)


def written(folder: Path, content: bytes) -> Path:
    (folder / "a.bin").write_bytes(content)
    return folder / "a.bin"


def llmc(magic: int, version: int, ids: np.ndarray, dtype: str, count: int | None = None) -> bytes:
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(ids) if count is None else count
    return head.tobytes() + ids.astype(dtype).tobytes()


@pytest.mark.parametrize(
    ("magic", "version", "ids", "dtype", "vocab"),
    [(20240520, 1, IDS, "<u2", 50304), (20240801, 7, WIDE, "<u4", 128256)],
    ids=["GPT-2", "Llama 3"],
)
def test_the_tokens_of_llmc_stand_after_its_header(magic, version, ids, dtype, vocab, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.bin").write_bytes(llmc(magic, version, ids, dtype))
    corpus = opened(tmp_path / "*.bin", vocab)
    assert corpus.read(0, len(corpus.tokens)).tolist() == [*ids, *ids]
    corpus.will_need(0, len(corpus.tokens))
    (tmp_path / "b.bin").write_bytes(llmc(magic, version, ids + 1, dtype))
    assert opened(tmp_path / "*.bin", vocab).fingerprint != corpus.fingerprint


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (llmc(20240520, 1, IDS, "<u2")[:-2], "is truncated; asked 7024 bytes for the 3000 uint16"),
        (llmc(20240520, 1, IDS, "<u2") + b"xx", "is too long"),
        (llmc(20240520, 1, IDS, "<u4"), "is too long"),
        (llmc(20240520, 9, IDS, "<u2"), "does not read; asked version 1 or 7; found version 9"),
        (llmc(20240520, 1, IDS, "<u2", -1), "is too long"),
        (llmc(20240520, 1, IDS[:0], "<u2"), "has a header of llm.c and no tokens"),
        (llmc(20240522, 1, IDS, "<u2"), "found 20240522, version 1"),  # its HellaSwag
        (llmc(20240326, 3, IDS, "<u2"), "found 20240326, version 3"),  # its weights
    ],
)
def test_a_header_of_llmc_that_does_not_fit_is_refused(content, said, tmp_path):
    for settings_ in ({}, {"dtype": "uint16"}):
        with pytest.raises(DataError, match=said):
            opened(written(tmp_path, content), **settings_)


def numpy_file(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def archive(kind: str) -> bytes:
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as made:
            made.writestr("a", IDS.tobytes())
    else:
        with tarfile.open(fileobj=file, mode="w") as made:
            made.addfile(tarfile.TarInfo("a"))
    return file.getvalue()


def safetensors() -> bytes:
    header = json.dumps({"a": {"dtype": "U16", "shape": [3000], "data_offsets": [0, 6000]}})
    return struct.pack("<Q", len(header)) + header.encode() + IDS.astype("<u2").tobytes()


def litdata() -> bytes:
    offsets = 4 * 5 + np.array([0, 400, 800, 1600])
    return np.array([3, *offsets], "<u4").tobytes() + bytes(1600)


def swapped_header() -> bytes:
    content = llmc(20240520, 1, IDS, "<u2")
    return np.frombuffer(content[:1024], "<u4").astype(">u4").tobytes() + content[1024:]


OTHERS = {
    "numpy": (numpy_file(IDS.astype("<u2")), r"an array of numpy \(.npy\)"),
    "gzip": (gzip.compress(IDS.tobytes()), "compressed with gzip"),
    "bzip2": (bz2.compress(IDS.tobytes()), "compressed with bzip2"),
    "xz": (lzma.compress(IDS.tobytes()), "compressed with xz"),
    "zstandard": (b"\x28\xb5\x2f\xfd" + bytes(100), "compressed with zstandard"),
    "zip": (archive("zip"), "a zip file"),
    "tar": (archive("tar"), "a tar file"),
    "parquet": (b"PAR1" + IDS.tobytes() + b"PAR1", "a Parquet file"),
    "pickle": (pickle.dumps(IDS.tolist()), "a pickle of Python"),
    "safetensors": (safetensors(), "a file of safetensors"),
    "litdata": (litdata(), "a chunk of samples"),
    "index": (b"MMIDIDX\x00\x00" + bytes(100), "the .idx of a Megatron token file"),
    "another header": (llmc(278895051, 1, IDS, "<u2"), "ids with a header"),
    "swapped header": (swapped_header(), "ids with a header"),
    "text": (TEXT.encode(), "plain text"),
    "UTF-16": (TEXT.encode("utf-16-le"), "text in UTF-16LE"),
    "UTF-16, swapped": (TEXT.encode("utf-16-be"), "text in UTF-16BE"),
    "one line": (b"12 words", "plain text"),
    "json lines": ((json.dumps({"text": TEXT}) + "\n").encode() * 3, "plain text"),
    "cut character": (("x" * 4095 + "é" * 3000).encode(), "plain text"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_kind_is_refused_by_what_it_is(name, tmp_path):
    content, kind = OTHERS[name]
    content += b"\n" * (len(content) % 2) if "text" in kind else b""
    with pytest.raises(DataError, match=f"a.bin holds no bare token ids: it is {kind}"):
        opened(written(tmp_path, content), 65536)


def test_who_says_the_type_of_the_ids_is_believed(tmp_path):
    path = written(tmp_path, OTHERS["gzip"][0][:1000])
    assert len(opened(path, 65536, dtype="uint16").tokens) == 500


@pytest.mark.parametrize(
    ("ids", "dtype", "vocab", "said"),
    [
        (IDS, "<u4", 50304, r"every second uint16 is about 0.*try --set data\.dtype=uint32"),
        (IDS, "<i8", 50304, "every second uint16 is about 0.*; try python -c"),
        (WIDE, "<i8", 128256, "every second uint32 is about 0.*; try python -c"),
        (IDS, ">u4", 65536, "every second uint16 is about 0.*; try python -c"),
        (WIDE, ">u4", 128256, "is beyond its vocabulary of 128256; try python -c"),
        (IDS, "<u2", 128256, r"is beyond its vocabulary of 128256; try --set data\.dtype=uint16"),
        (IDS[:2999], "<u2", 128256, r"is not a row of uint32.*try --set data\.dtype=uint16"),
        (WIDE, "<u4", 50304, "is beyond its vocabulary of 50304"),
        (IDS, ">u2", 50304, "is beyond its vocabulary of 50304; try python -c"),
        (IDS % 251, "u1", 251, "is beyond its vocabulary of 251; try python -c"),
        (IDS, "<f4", 50304, "is beyond its vocabulary of 50304$"),
    ],
)
def test_ids_of_another_type_than_the_vocabulary_asks_for_are_refused(
    ids, dtype, vocab, said, tmp_path
):
    path = written(tmp_path, ids.astype(dtype).tobytes())
    with pytest.raises(DataError, match=said) as error:
        opened(path, vocab)
    if said.endswith("python -c"):
        assert ids_of_cure(error.value, tmp_path, vocab) == ids.tolist()


def ids_of_cure(error: DataError, folder: Path, vocab: int) -> list[int]:
    """The ids of the file that the command of an error writes."""
    *_, code = shlex.split(str(error).partition("; try ")[2])
    exec(code)
    (made,) = folder.glob("*_uint*.bin")
    corpus = opened(made, vocab)
    return corpus.read(0, len(corpus.tokens)).tolist()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i8"])
def test_an_array_of_numpy_is_refused_with_the_command_that_takes_its_ids(version, dtype, tmp_path):
    file = io.BytesIO()
    np.lib.format.write_array(file, IDS.astype(dtype), version=version)
    path = written(tmp_path, file.getvalue())
    for said in ({}, {"dtype": "uint16"}):
        with pytest.raises(DataError, match="it is an array of numpy") as error:
            opened(path, 50304, **said)
    assert ids_of_cure(error.value, tmp_path, 50304) == IDS.tolist()


def test_bare_files_of_both_types_are_read(tmp_path):
    for ids, dtype, vocab, more in (
        (IDS, "<u2", 50304, {}),
        (IDS, "<u2", 128256, {"dtype": "uint16"}),
        (WIDE, "<u4", 128256, {}),
        (IDS, "<u4", 50304, {"dtype": "uint32"}),
        (IDS % 4, "<u2", 4, {}),
        (IDS % 17, "<u2", 17, {}),
        (np.frombuffer(TEXT.encode(), np.uint8), "<u2", 256, {}),  # ids that are bytes
        (np.r_[IDS[:90], np.zeros(3000), IDS], "<u2", 50304, {}),
    ):
        corpus = opened(written(tmp_path, ids.astype(dtype).tobytes()), vocab, **more)
        assert corpus.read(0, len(corpus.tokens)).tolist() == ids.tolist()


@given(st.integers(2, 50304), st.integers(1, 400), st.integers(0, 2**32))
@example(543, 24, 611)
@settings(max_examples=150, deadline=None)
def test_no_row_of_ids_is_taken_for_another_kind(tmp_path_factory, vocab, size, seed):
    ids = np.random.default_rng(seed).integers(0, vocab, size)
    path = written(tmp_path_factory.mktemp("ids"), ids.astype("<u2").tobytes())
    if size >= 24:  # fewer may be anything
        assert opened(path, vocab).read(0, size).tolist() == ids.tolist()


@pytest.mark.parametrize("place", [0, COVERED // 2 + 1000, COVERED * 2 - 2])
def test_an_id_beyond_the_vocabulary_is_found_in_the_blocks_of_a_large_file(place, tmp_path):
    ids = np.zeros(COVERED, "<u2")  # twice as many bytes as are covered
    step = (COVERED * 2 - BLOCK_BYTES) / 63
    near = round(place // step * step) // 2  # in the block that begins before it
    ids[near] = 50304
    with pytest.raises(DataError, match=f"id 50304 at token offset {near} is beyond"):
        opened(written(tmp_path, ids.tobytes()))


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json", ".loss"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "empty", "unreadable"])
def test_what_is_no_file_of_its_kind_is_refused_in_a_line(suffix, kind, tmp_path):
    path = written(tmp_path, IDS.astype("<u2").tobytes())
    other = path.with_suffix(suffix)
    other.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(other)  # to open it would wait for ever
    elif kind == "folder":
        other.mkdir()
    elif kind == "empty":
        other.write_bytes(b"")
    else:
        other.symlink_to("/proc/self/mem")  # opens, and cannot be read
    with pytest.raises(DataError) as error:
        opened(path)
    assert "\n" not in str(error.value) and "a." in str(error.value)
