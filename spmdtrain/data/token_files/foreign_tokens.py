"""Reads token files of other programs without conversion: nanoGPT, llm.c, Megatron, datatrove.

None of them states its vocabulary; a run must, by `model.vocab` or `data.tokenizer`. A file is
accepted only if everything known about it fits.

    nanoGPT    NAME.bin alone: ids, little endian. Their type is not recorded: it is `data.dtype`,
               or else the smallest that holds the vocabulary
    llm.c      NAME.bin alone: 256 int32, of which the first three are a magic number, a version
               and the number of ids, then ids: uint16 of GPT-2, uint32 of Llama 3
               (dev/data/data_common.py). The shards of modded-nanogpt are the same
    Megatron   NAME.bin and NAME.idx: megatron_index.py
    datatrove  NAME.ds and NAME.ds.index: datatrove_file.py
"""

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.texts.other_kinds import NUMPY
from spmdtrain.data.token_files.blocks import read_blocks
from spmdtrain.data.token_files.known_formats import kind_of_file
from spmdtrain.data.token_files.megatron_index import MAGIC, read_index
from spmdtrain.data.token_files.rows import StoredRow, reading, require_file
from spmdtrain.data.token_files.tokens import DTYPES, beyond_vocabulary, loss_path, storage_dtype

LLMC_HEADER = 1024  # bytes
# The magic number (first int32): which files have it, and the type of their ids.
LLMC_MAGICS = {20240520: "uint16", 20240801: "uint32"}
LLMC_VERSIONS = (1, 7)  # of GPT-2's files and Llama 3's
# Possible id types of a bare file, those least likely to fit by chance first.
TYPES = {
    "int64": np.dtype("<u8"),
    "int64, big endian": np.dtype(">u8"),
    "uint32, big endian": np.dtype(">u4"),
    "uint32": DTYPES["uint32"],
    "uint16": DTYPES["uint16"],
    "uint16, big endian": np.dtype(">u2"),
    "uint8": np.dtype("u1"),
}
FEW_IDS = 16  # a sample with fewer distinct ids does not reveal their width


@dataclass(frozen=True)
class ForeignTokens:
    """A token file written by another program. It has the properties of a TokenSource."""

    path: str  # of the ids
    dtype: np.dtype
    size: int  # tokens
    starts: np.ndarray | None  # offsets of documents, int64; None: unknown
    skip: int = 0  # bytes of its header

    vocab = None
    tokenizer_spec = None
    begin_of_text = None
    end_of_text = None
    template = None
    has_pairs = False
    has_loss = False
    loss_row = None

    @property
    def has_documents(self) -> bool:
        return self.starts is not None

    @property
    def document_starts(self) -> np.ndarray:
        return np.zeros(1, np.int64) if self.starts is None else self.starts

    @cached_property
    def row(self) -> StoredRow:
        """The ids [size], read a slice at a time."""
        return StoredRow(self.path, self.dtype, self.size, self.skip)

    @cached_property
    def fingerprint(self) -> str:
        """A hex hash of sizes, documents and blocks of the content."""
        digest = hashlib.sha256(f"{self.dtype.str} {self.size}".encode())
        digest.update(self.document_starts.data)
        for _, content in self._blocks():
            digest.update(content)
        return digest.hexdigest()

    def check(self, vocab: int, *, is_bare: bool) -> None:
        """Raises DataError if sampled ids do not fit the vocabulary.

        The id type of a bare file is guessed: ids of another type may all be below the vocabulary,
        but their zeros give them away.
        """
        looks_wider = is_bare
        sample = []
        for at, ids in self._sampled(self.dtype):
            outside = ids >= vocab
            if outside.any():
                first = int(outside.argmax())
                fix = self._other_type(vocab) if is_bare else ""
                raise beyond_vocabulary(self.path, int(ids[first]), at + first, vocab, fix)
            looks_wider = looks_wider and _is_wider(ids)
            sample.append(ids)
        if looks_wider and len(np.unique(np.concatenate(sample))) >= FEW_IDS:
            raise DataError(
                f"{self.path}: every second {self.dtype.name} is about 0, as of wider ids",
                fix=self._other_type(vocab),
            )

    def _other_type(self, vocab: int) -> str:
        """Returns the remedy if the ids of a bare file are of another type; "": none fits."""
        size = self.size * self.dtype.itemsize
        for name, dtype in TYPES.items():
            if size % dtype.itemsize or dtype == self.dtype:
                continue
            if dtype.itemsize == 1 and vocab > 256:  # any byte would fit
                continue
            samples = [ids for _, ids in self._sampled(dtype)]
            if any((ids >= vocab).any() for ids in samples) or all(map(_is_wider, samples)):
                continue
            read = f"fromfile({{}}, {json.dumps(dtype.str)})"
            command = _converting(self.path, read, vocab)
            return f"--set data.dtype={name}" if name in DTYPES else command
        return ""

    def _sampled(self, dtype: np.dtype) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (offset of the first, ids) of blocks, read as ids of this type."""
        width = dtype.itemsize
        for at, content in self._blocks():
            begin = -at % width
            whole = content[begin : len(content) - (len(content) - begin) % width]
            yield (at + begin) // width, np.frombuffer(whole, dtype)

    def _blocks(self) -> Iterator[tuple[int, bytes]]:
        return read_blocks(self.path, self.size * self.dtype.itemsize, self.skip)


def _converting(path: str, read: str, vocab: int) -> str:
    """Returns the command that rewrites ids that numpy can read as a bare file."""
    fits = storage_dtype(vocab)
    out = path.removesuffix(".bin") + f"_{fits}.bin"
    ids = f"numpy.{read.format(json.dumps(path))}"
    write = f"astype({json.dumps(DTYPES[fits].str)}).tofile({json.dumps(out)})"
    return f"python -c {shlex.quote(f'import numpy; {ids}.{write}')}"


def _is_wider(ids: np.ndarray) -> bool:
    """Returns True if every second id is the upper half of a wider one.

    Upper halves are barely above 0, and the others are not.
    """
    return any(_is_above(ids[begin::2], ids[1 - begin :: 2]) for begin in (0, 1))


def _is_above(lower: np.ndarray, upper: np.ndarray) -> bool:
    if not len(upper) or not len(lower):
        return False
    highest = int(upper.max())
    return highest < FEW_IDS and int((lower > highest).sum()) * 4 > len(lower)


def is_foreign(bin_path: Path, idx_path: Path, json_path: Path) -> bool:
    """Returns True if a token file is another program's, i.e. without our sidecar."""
    if json_path.exists() or loss_path(bin_path).exists():
        return False
    if not idx_path.exists():
        return bin_path.is_file()
    require_file(idx_path)
    with reading(idx_path), idx_path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_foreign(bin_path: Path, idx_path: Path, vocab: int, dtype: str | None) -> ForeignTokens:
    """Opens a token file of another program whose ids are below `vocab`.

    `dtype` is the id type of a bare file, if the user gave it. Raises DataError if something does
    not fit.
    """
    with reading(bin_path):
        size = bin_path.stat().st_size
    source = (
        _of_megatron(bin_path, idx_path, size) if idx_path.exists() else _of_llmc(bin_path, size)
    )
    is_bare = source is None
    if source is None:
        source = _bare(bin_path, size, vocab, dtype)
    if dtype and source.dtype != DTYPES[dtype]:
        raise DataError(
            f"{bin_path} itself states the type of its ids",
            asked=f"data.dtype={dtype}",
            found=source.dtype.name,
            fix="leaving data.dtype out",
        )
    source.check(vocab, is_bare=is_bare and dtype is None)
    return source


def _of_megatron(bin_path: Path, idx_path: Path, size: int) -> ForeignTokens:
    index = read_index(idx_path)
    expected = index.size * index.dtype.itemsize
    _check_size(bin_path, size, expected, f"{expected} bytes ({idx_path})")
    return ForeignTokens(str(bin_path), index.dtype, index.size, index.starts)


def _check_size(path: Path, size: int, expected: int, expectation: str) -> None:
    if size != expected:
        wrong = "truncated" if size < expected else "too long"
        raise DataError(f"{path} is {wrong}", asked=expectation, found=f"{size} bytes")


def _of_llmc(path: Path, size: int) -> ForeignTokens | None:
    """Returns the tokens after an llm.c header; None if there is no header."""
    with reading(path), path.open("rb") as file:
        header = np.frombuffer(file.read(LLMC_HEADER)[: LLMC_HEADER // 4 * 4], np.uint8)
    if len(header) < LLMC_HEADER:
        return None
    numbers = header.view("<i4")
    magic, version, count = numbers[:3].tolist()
    if magic not in LLMC_MAGICS:
        # All their magic numbers are dates.
        if 20230000 <= magic < 20400000 and 0 <= version < 100 and np.mean(numbers == 0) > 0.5:
            raise DataError(
                f"{path} has a header like those of llm.c, but not that of its token files",
                asked=f"magic number {' or '.join(map(str, LLMC_MAGICS))}",
                found=f"{magic}, version {version}",
                fix="the training tokens",
            )
        return None
    dtype = DTYPES[LLMC_MAGICS[magic]]
    if version not in LLMC_VERSIONS:
        versions = f"version {' or '.join(map(str, LLMC_VERSIONS))}"
        raise DataError(
            f"{path} has a header of llm.c that this program does not read",
            asked=versions,
            found=f"version {version}",
        )
    expected = LLMC_HEADER + count * dtype.itemsize
    what = f"{expected} bytes for the {count} {dtype.name} that its header states"
    _check_size(path, size, expected, what)
    if count < 1:
        raise DataError(f"{path} has a header of llm.c and no tokens", found=f"{count} tokens")
    return ForeignTokens(str(path), dtype, count, None, LLMC_HEADER)


def _bare(path: Path, size: int, vocab: int, dtype: str | None) -> ForeignTokens:
    """Returns the ids of a file that has no header."""
    kind = kind_of_file(path, size, vocab, certain=dtype is not None)
    if kind:
        fixes = {
            "plain text": f"spmdtrain data prepare {shlex.quote(str(path))} --out NAME",
            NUMPY: _converting(str(path), "load({})", vocab),
        }
        raise DataError(
            f"{path} holds no bare token ids: it is {kind}",
            fix=fixes.get(kind, "a token file, or --set data.dtype=uint16 if it is one"),
        )
    name = dtype or storage_dtype(vocab)
    number_type = DTYPES[name]
    if size == 0 or size % number_type.itemsize:
        raise DataError(
            f"{path} has neither sidecar nor .idx, and is not a row of {name}",
            found=f"{size} bytes",
            fix=_other_width(size, name) or "spmdtrain data prepare FILE --out NAME",
        )
    return ForeignTokens(str(path), number_type, size // number_type.itemsize, None)


def _other_width(size: int, name: str) -> str:
    """Returns the setting to type if the file can only be of the narrower type."""
    fits: Sequence[str] = [other for other in DTYPES if size and size % DTYPES[other].itemsize == 0]
    return f"--set data.dtype={fits[0]}" if fits and fits[0] != name else ""
