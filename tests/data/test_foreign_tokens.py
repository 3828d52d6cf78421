"""Token files as nanoGPT and Megatron write them, read as they are."""

import struct
from pathlib import Path

import numpy as np
import pytest

from spmdtrain.config import RunConfig
from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.config.schema import DataConfig
from spmdtrain.data.corpus import open_corpus
from spmdtrain.data.prepare.token_writer import write_tokens
from spmdtrain.data.source import open_data
from spmdtrain.data.tokenizers.tokenizer import open_tokenizer

IDS = np.arange(100) % 61
DOCUMENTS = [[20, 30], [], [7], [40, 3]]  # lengths of the sequences of each document


def write_nanogpt(path: Path) -> None:
    IDS.astype(np.uint16).tofile(path)


def write_megatron(path: Path, code: int = 8, dtype: str = "<u2", version: int = 1) -> None:
    """As IndexedDatasetBuilder does, field by field."""
    IDS.astype(dtype).tofile(path)
    lengths = np.array([length for document in DOCUMENTS for length in document], np.int32)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    bounds = np.cumsum([0] + [len(document) for document in DOCUMENTS], dtype=np.int64)
    with path.with_suffix(".idx").open("wb") as file:
        file.write(
            b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(lengths), len(bounds))
        )
        for part in (lengths, pointers, bounds):
            file.write(part.tobytes())


def opened(path: Path, vocab: int | None = 61, **settings):
    return open_corpus(DataConfig(corpus="tokens", path=str(path), **settings), vocab, 0)


def test_nanogpt_files_are_read_as_they_are(tmp_path):
    write_nanogpt(tmp_path / "train.bin")
    corpus = opened(tmp_path / "train.bin")
    assert corpus.read(0, 100).tolist() == IDS.tolist()
    assert corpus.tokens.dtype == np.uint16
    assert (corpus.vocab, corpus.tokenizer, corpus.has_documents) == (61, None, False)
    config = RunConfig.model_validate(
        {
            "model": {"name": "gpt", "vocab": 61},
            "train": {"sequence_length": 8},
            "data": {
                "corpus": "tokens",
                "path": str(tmp_path / "train.bin"),
                "packing": "documents",
            },
        }
    )
    with pytest.raises(
        ConfigError, match="does not say where documents start; try --set data.packing=stream"
    ):
        open_data(config)


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8"), (1, "u1")])
def test_megatron_files_are_read_with_their_documents(code, dtype, tmp_path):
    write_megatron(tmp_path / "a.bin", code, dtype)
    corpus = opened(tmp_path / "a.bin")
    assert corpus.read(0, 100).tolist() == IDS.tolist()
    assert corpus.document_starts.tolist() == [0, 50, 57]  # an empty document has no start
    assert corpus.has_documents


def test_a_negative_id_is_beyond_any_vocabulary(tmp_path):
    write_megatron(tmp_path / "a.bin", 4, "<i4")
    ids = np.fromfile(tmp_path / "a.bin", "<i4")
    ids[3] = -1
    ids.tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match="id 4294967295 at token offset 3 is beyond"):
        opened(tmp_path / "a.bin").read(0, 9)


def test_their_tokenizer_is_the_one_that_the_run_names(tmp_path, tokenizer_json):
    write_nanogpt(tmp_path / "a.bin")
    corpus = opened(tmp_path / "a.bin", vocab=None, tokenizer=str(tokenizer_json))
    tokenizer = open_tokenizer(str(tokenizer_json))
    assert corpus.vocab == tokenizer.size and corpus.tokenizer.decode([40, 41]) == tokenizer.decode(
        [40, 41]
    )
    with pytest.raises(
        DataError, match=r"does not state the number of ids; try --set data\.tokenizer=FILE"
    ):
        opened(tmp_path / "a.bin", vocab=None)
    write_tokens(tmp_path / "ours", ["text"], open_tokenizer("bytes"))
    with pytest.raises(DataError, match="different tokenizers"):
        open_corpus(
            DataConfig(corpus="tokens", path=[str(tmp_path / n) for n in ("a.bin", "ours.bin")]),
            61,
            0,
        )


def test_files_of_their_own_validate(tmp_path):
    write_nanogpt(tmp_path / "train.bin")
    (IDS[:30] + 1).astype(np.uint16).tofile(tmp_path / "val.bin")
    data = {
        "corpus": "tokens",
        "path": str(tmp_path / "train.bin"),
        "validation_path": str(tmp_path / "val.bin"),
    }
    settings = {
        "model": {"name": "gpt", "vocab": 99},
        "train": {"sequence_length": 8},
        "data": data,
    }
    _, opened_data = open_data(RunConfig.model_validate(settings))
    assert (opened_data.train.size, opened_data.validation.size) == (100, 30)
    validation = opened_data.corpus.read(opened_data.validation.start, opened_data.validation.stop)
    assert validation.tolist() == (IDS[:30] + 1).tolist()
    settings["train"] = {"sequence_length": 30}
    with pytest.raises(
        DataError,
        match=r"validation split is too short.*found 30 of 130 tokens \(data.validation_path\)",
    ):
        open_data(RunConfig.model_validate(settings))
    with pytest.raises(ValueError, match="data.validation_path='x' needs data.path, not data.mix"):
        DataConfig(validation_path="x")


def test_their_fingerprint_follows_the_content_at_both_ends_and_between(tmp_path):
    seen = set()
    for changed in (None, 0, 50_000, 99_999):
        ids = np.zeros(100_000, np.uint16)
        if changed is not None:
            ids[changed] = 1
        ids.tofile(tmp_path / f"{changed}.bin")
        seen.add(opened(tmp_path / f"{changed}.bin").fingerprint)
    assert len(seen) == 4


def write_datatrove(path: Path, dtype: str = "<u2") -> None:
    """As datatrove's TokenizedFile does."""
    IDS.astype(dtype).tofile(path)
    ends = np.cumsum([sum(document) for document in DOCUMENTS], dtype="<u8")
    ends.tofile(path.with_name(f"{path.name}.index"))
    text = f"gpt2|{np.dtype(dtype).itemsize}\n{len(IDS)}\n100 tokens"
    path.with_name(f"{path.name}.metadata").write_text(text)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_datatrove_files_are_read_with_their_documents(dtype, tmp_path):
    write_datatrove(tmp_path / "a.ds", dtype)
    corpus = opened(tmp_path / "a.ds")
    assert corpus.read(0, 100).tolist() == IDS.tolist()
    assert corpus.document_starts.tolist() == [0, 50, 57]  # an empty document has no start
    assert corpus.has_documents and corpus.vocab == 61
    with pytest.raises(DataError, match="beyond its vocabulary of 40"):
        opened(tmp_path / "a.ds", vocab=40)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: cut(path, 150), "does not have the size.*asked 100 ids.*found 150 bytes"),
        (lambda path: cut(index_of(path), 0), "its documents do not rise"),
        (lambda path: overwrite(index_of(path), 8, b"\x01"), "its documents do not rise"),
        (lambda path: index_of(path).unlink(), "no .*a.ds.index; try"),
        (
            lambda path: path.with_name("a.ds.loss").write_bytes(bytes(100)),
            "has marks of what is learned",
        ),
    ],
)
def test_a_damaged_file_of_datatrove_is_refused_by_name(damage, said, tmp_path):
    write_datatrove(tmp_path / "a.ds")
    damage(tmp_path / "a.ds")
    with pytest.raises(DataError, match=said):
        opened(tmp_path / "a.ds")


def index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.index")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[:-2]),
            r"a\.bin is truncated; asked 200 bytes .*found 198",
        ),
        (lambda path: path.write_bytes(path.read_bytes() + b"xx"), r"a\.bin is too long"),
        (lambda path: cut(path.with_suffix(".idx"), 20), r"a\.idx is truncated; found 20 bytes"),
        (
            lambda path: cut(path.with_suffix(".idx"), 90),
            r"a\.idx is truncated; asked \d+ bytes; found 90 bytes",
        ),
        (lambda path: write_megatron(path, version=2), "version 2 and type 8"),
        (lambda path: write_megatron(path, code=7), "version 1 and type 7"),
        (
            lambda path: overwrite(path.with_suffix(".idx"), 34, b"\x13"),
            "are not consecutive",
        ),
        (
            lambda path: overwrite(path.with_suffix(".idx"), -8, b"\x63"),
            "a document is beyond its 5 sequences",
        ),
        *(
            (lambda path, bounds=bounds: with_bounds(path, bounds), "leave out sequences.*found")
            for bounds in ([0, 1, 2, 3, 4], [1, 2, 5], [0], [])
        ),
        (
            lambda path: with_bounds(path, [0, 2, 5], bytes(5)),
            "multimodal data set.*a mode of each of its 5 sequences",
        ),
        (
            lambda path: (path.with_suffix(".idx").unlink(), cut(path, 7)),
            "is not a row of uint16; found 7 bytes",
        ),
    ],
)
def test_a_damaged_file_is_refused_by_name(damage, said, tmp_path):
    write_megatron(tmp_path / "a.bin")
    damage(tmp_path / "a.bin")
    with pytest.raises(DataError, match=said):
        opened(tmp_path / "a.bin")


def with_bounds(path: Path, bounds: list[int], after: bytes = b"") -> None:
    """Replaces the document bounds of a Megatron file, and what follows them."""
    index = path.with_suffix(".idx")
    whole = bytearray(index.read_bytes())
    (sequences,) = struct.unpack_from("<Q", whole, 18)
    struct.pack_into("<Q", whole, 26, len(bounds))
    kept = whole[: 34 + 12 * sequences]
    index.write_bytes(kept + np.array(bounds, "<i8").tobytes() + after)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def overwrite(path: Path, at: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    at %= len(whole)
    whole[at : at + len(content)] = content
    path.write_bytes(bytes(whole))
