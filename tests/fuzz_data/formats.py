"""Writes the valid files of a case, in every format that the data side reads."""

import gzip
import io
import json
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard

from fuzz_data import tokenizer_files
from fuzz_data.case import Case
from fuzz_data.texts import draw_messages, draw_odd_messages, draw_text

BGZF = b"\x1f\x8b\x08\4\0\0\0\0\0\xff\6\0BC\2\0"  # a member up to its size
JSONL_ENDINGS = (".jsonl", ".ndjson", ".json")
ROLES = pyarrow.struct(
    [("role", pyarrow.string()), ("content", pyarrow.string()), ("weight", pyarrow.int64())]
)
TERMS = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
LLMC = {"llmc": (20240520, 1, "<u2", 50257), "llmc3": (20240801, 7, "<u4", 128256)}
MEGATRON = {1: "<u1", 4: "<i4", 8: "<u2"}
MOST_IDS = 2000  # in a file, of those that are shared
FOREIGN_VOCAB = 251  # of ids in files of other programs, where their format does not say it


@dataclass
class Made:
    """The files of a case."""

    folder: Path
    paths: list[Path] = field(default_factory=list)  # those that a command names, in order
    holders: list[Path] = field(default_factory=list)  # those that hold documents or ids
    field_name: str = "text"
    tokenizer: Path | None = None
    documents: list = field(default_factory=list)  # that were written; None where a row is empty
    is_odd: bool = False  # some documents may be refused
    unreadable: set[Path] = field(default_factory=set)  # those that no reader may take as they are
    vocab: int | None = None  # that a run has to say


def make_documents(case: Case, folder: Path) -> Made:
    """Write the files of documents of a case, and its tokenizer."""
    random = case.random("documents")
    made = Made(folder, field_name="messages" if case.chat else "text")
    if case.format != "text" and random.random() < 0.2:
        made.field_name = random.choice(("body", "Text", "日本", "a b", "x.y"))
    make_tokenizer(case, made)
    for number in range(case.files):
        documents = _documents(case, random, made, is_long=case.huge and number == 0)
        _write(case, random, made, documents, number)
    return made


def make_tokenizer(case: Case, made: Made) -> None:
    """Write the `tokenizer.json` of a case that has one."""
    if case.tokenizer not in tokenizer_files.ENDS:
        return
    made.tokenizer = made.folder / "tokenizer.json"
    tokenizer_files.write(case.tokenizer, made.tokenizer)
    if case.random("tokenizer").random() < 0.5:
        named = {"eos_token": tokenizer_files.ENDS[case.tokenizer]}
        (made.folder / "tokenizer_config.json").write_text(json.dumps(named))


def _documents(case: Case, random: Random, made: Made, *, is_long: bool) -> list:
    """Return the documents of one file."""
    draw = draw_messages if case.chat else draw_text
    documents: list = [draw(random) for _ in range(case.documents)]
    if is_long and documents:
        documents[-1] = draw(random, is_long=True)
    if case.format == "text":
        return documents
    if documents and random.random() < 0.2:
        documents[random.randrange(len(documents))] = None
    if case.format == "jsonl" and documents and random.random() < 0.1:
        made.is_odd = True
        odd = draw_odd_messages(random) if case.chat else random.choice((5, [], {}, "\ud800", True))
        documents[random.randrange(len(documents))] = odd
    return documents


def _write(case: Case, random: Random, made: Made, documents: list, number: int) -> None:
    if case.format == "dataset":
        _write_dataset(random, made, documents)
        return
    if case.format == "text":
        content = _text_file(case, made, documents)
        ending = random.choice((".txt", ".md", ".text", ""))
    elif case.format == "jsonl":
        content = _json_lines(random, made, documents)
        ending = random.choice(JSONL_ENDINGS)
    elif case.format == "parquet":
        content = _parquet(random, made, documents)
        ending = ".parquet"
    else:
        content = _arrow(random, made, documents, is_file=case.format == "arrow_file")
        ending = ".arrow"
    suffix = f".{case.compression}" if case.compression else ""
    if random.random() < 0.05:
        ending, suffix = ending.upper(), suffix.upper()
    path = made.folder / f"in-{number}{ending}{suffix}"
    path.write_bytes(compressed(content, case.compression, random))
    made.paths.append(path)
    made.holders.append(path)


def compressed(content: bytes, how: str, random: Random) -> bytes:
    """Return it compressed, in one member or frame or in several."""
    if not how:
        return content
    parts = [content]
    if random.random() < 0.3:
        cut = random.randint(0, len(content))
        parts = [content[:cut], content[cut:]]
    if how == "gz":
        pack = _bgzf if random.random() < 0.2 else lambda part: gzip.compress(part, mtime=0)
        return b"".join(map(pack, parts))
    options: dict[str, Any] = {"write_checksum": random.random() < 0.5}
    options["write_content_size"] = random.random() < 0.5
    packer = zstandard.ZstdCompressor(level=random.choice((1, 3)), **options)
    return b"".join(packer.compress(part) for part in parts)


def _bgzf(content: bytes) -> bytes:
    """As bgzip: members that name their size, and an empty one at the end."""
    half = len(content) // 2
    members = []
    for part in (content[:half], content[half:], b""):
        packer = zlib.compressobj(wbits=-15)
        packed = packer.compress(part) + packer.flush()
        size = len(packed) + len(BGZF) + 9
        if size >= 2**16:  # its size would not fit
            return gzip.compress(content, mtime=0)
        sums = struct.pack("<II", zlib.crc32(part), len(part))
        members.append(BGZF + struct.pack("<H", size) + packed + sums)
    return b"".join(members)


def _text_file(case: Case, made: Made, documents: list[str]) -> bytes:
    if case.split_on is None:
        whole = "".join(documents)
        made.documents.append(whole)
        return whole.encode()
    whole = case.split_on.join(documents)
    pieces = whole.split(case.split_on)  # a document may spell the separator
    made.documents += [piece if piece.encode().strip() else None for piece in pieces]
    return whole.encode()


def _json_lines(random: Random, made: Made, documents: list) -> bytes:
    lines = []
    for document in documents:
        if document is None and random.random() < 0.5:
            lines.append(random.choice(("", "  ", "\r")))
        else:
            row = {made.field_name: document}
            if random.random() < 0.3:
                row = {"id": len(lines), **row, "more": random.choice((None, 1.5, [{}], "x"))}
            lines.append(
                json.dumps(row, ensure_ascii=not _is_utf8(document) or random.random() < 0.5)
            )
        made.documents.append(document)
    end = random.choice(("\n", "\n", "\r\n"))
    last = random.choice((end, ""))
    return (end.join(lines) + last).encode()


def _is_utf8(document: Any) -> bool:
    return "\\ud800" not in json.dumps(document)


def _table(random: Random, made: Made, documents: list) -> pyarrow.Table:
    made.documents += documents
    kind: Any
    if made.field_name == "messages" or any(isinstance(each, list) for each in documents):
        kind = pyarrow.list_(ROLES)
    else:
        strings = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), TERMS)
        kind = random.choice((pyarrow.string(), *strings))
    if documents and made.field_name != "messages" and random.random() < 0.02:
        made.is_odd = True  # no text, but bytes
        kind = pyarrow.binary()
        documents = [each and each.encode() for each in documents if not isinstance(each, list)]
    columns = {made.field_name: pyarrow.array(documents, kind)}
    if random.random() < 0.1:  # a column that has one of its name within
        kind_within = pyarrow.struct([(made.field_name, pyarrow.string())])
        inner = pyarrow.array([{made.field_name: "within"}] * len(documents), kind_within)
        columns = {"nested": inner, **columns}
    if random.random() < 0.5:
        columns = {"id": pyarrow.array(range(len(documents)), pyarrow.int64()), **columns}
    return pyarrow.table(columns)


def _parquet(random: Random, made: Made, documents: list) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(
        _table(random, made, documents),
        sink,
        row_group_size=random.choice((1, 3, 1000)),
        compression=random.choice(("none", "snappy", "zstd", "gzip", "lz4", "brotli")),
        data_page_version=random.choice(("1.0", "2.0")),
        version=random.choice(("1.0", "2.6")),
        write_page_index=random.random() < 0.2,
        use_dictionary=random.random() < 0.5,
        write_page_checksum=random.random() < 0.5,
    )
    return sink.getvalue()


def _arrow(random: Random, made: Made, documents: list, *, is_file: bool) -> bytes:
    table = _table(random, made, documents)
    is_new = made.field_name != "messages" and random.random() < 0.8
    options = pyarrow.ipc.IpcWriteOptions(
        compression=random.choice((None, None, "lz4", "zstd")) if is_new else None,
        use_legacy_format=not is_new,
    )
    rows = random.choice((1, 2, 1000))
    return _ipc(table, is_file=is_file, rows=rows, options=options)


def _ipc(table: pyarrow.Table, *, is_file: bool, rows: int, options: Any = None) -> bytes:
    sink = io.BytesIO()
    make = pyarrow.ipc.new_file if is_file else pyarrow.ipc.new_stream
    with make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


def _write_dataset(random: Random, made: Made, documents: list) -> None:
    """Write what `datasets.Dataset.save_to_disk` does."""
    folder = made.folder / "saved"
    folder.mkdir()
    cut = random.randint(0, len(documents))
    shards = [documents] if random.random() < 0.5 else [documents[:cut], documents[cut:]]
    state_of = random.getstate()
    names = []
    for number, shard in enumerate(shards):
        random.setstate(state_of)  # one schema for all
        name = f"data-{number:05}-of-{len(shards):05}.arrow"
        (folder / name).write_bytes(_arrow(random, made, shard, is_file=False))
        names.append(name)
        made.holders.append(folder / name)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0" * 16}
    state |= {"_format_columns": None, "_format_type": None, "_split": None}
    if random.random() < 0.15:
        _choose_rows(random, made, state, folder)
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text("{}")
    made.paths.append(folder)


def _choose_rows(random: Random, made: Made, state: dict, folder: Path) -> None:
    """Say which rows there are, as `select` and `shuffle` do without rewriting the data."""
    made.is_odd = True
    chosen = [random.randrange(len(made.documents)) for _ in made.documents]
    table = pyarrow.table({"indices": pyarrow.array(chosen, pyarrow.uint64())})
    (folder / "indices.arrow").write_bytes(_ipc(table, is_file=False, rows=1000))
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    made.documents = [made.documents[index] for index in chosen]


# --- token files of other programs --------------------------------------------------------------


def make_foreign(case: Case, folder: Path) -> Made:
    """Write token files of another program, or plain text for a run."""
    random = case.random("ids")
    made = Made(folder)
    if case.format == "plain":
        make_tokenizer(case, made)
    for number in range(case.files):
        if case.format == "plain":
            path = folder / f"in-{number}.txt"
            path.write_bytes("".join(draw_text(random) for _ in range(case.documents)).encode())
        else:
            path = folder / f"in-{number}.bin"
            made.vocab = _write_ids(case, random, path, number * MOST_IDS)
        made.paths.append(path)
        made.holders.append(path)
    return made


def _write_ids(case: Case, random: Random, path: Path, first: int) -> int:
    """Write ids, and return their vocabulary. Where files are shared no two are equal."""
    lengths = [random.choice((0, 1, 2, 7, 40)) for _ in range(case.documents)]
    is_shared = case.reads == "shared"
    lengths.append(400 if is_shared else 50)
    total = sum(lengths)
    if case.format in LLMC:
        magic, version, dtype, vocab = LLMC[case.format]
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, total
        drawn = range(first, first + total)
        ids = np.array(drawn if is_shared else [random.randrange(vocab) for _ in drawn], dtype)
        path.write_bytes(header.tobytes() + ids.tobytes())
        return vocab
    ids = [random.randrange(1, FOREIGN_VOCAB) for _ in range(total)]
    if case.format == "nanogpt":
        ids = range(first, first + total) if is_shared else ids
        path.write_bytes(np.array(ids, "<u2").tobytes())
        return LLMC["llmc"][3] if is_shared else FOREIGN_VOCAB
    code = case.random("type").choice(list(MEGATRON))
    path.write_bytes(np.array(ids, MEGATRON[code]).tobytes())
    path.with_suffix(".idx").write_bytes(_megatron_index(random, lengths, code))
    return FOREIGN_VOCAB


def _megatron_index(random: Random, lengths: list[int], code: int) -> bytes:
    """As IndexedDatasetBuilder does, field by field; a document has one sequence or several."""
    sizes = np.array(lengths, "<i4")
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(MEGATRON[code]).itemsize
    inner = [i for i in range(1, len(lengths)) if random.random() < 0.7]
    bounds = np.array([0, *inner, len(lengths)], "<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(bounds))
    return head + sizes.tobytes() + pointers.astype("<i8").tobytes() + bounds.tobytes()
