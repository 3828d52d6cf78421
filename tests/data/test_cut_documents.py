"""Files of documents that end early, are damaged, or are not what they seem: refused in a line."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import shlex
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.cli import main
from spmdtrain.config.errors import DataError
from spmdtrain.data.prepare.prepare_corpus import Job, prepare
from spmdtrain.data.texts import documents
from spmdtrain.data.texts.documents import find_inputs, read_chunks, values_of
from spmdtrain.data.texts.files import read_text

arrow = pytest.importorskip("pyarrow")
zstandard = pytest.importorskip("zstandard")
TEXTS = [f"{number}: {random.Random(number).randbytes(number * 9).hex()}ä" for number in range(20)]


def lines(texts) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def zst(content: bytes, **options) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


def table_bytes(write) -> bytes:
    sink = io.BytesIO()
    write(arrow.table({"text": TEXTS, "number": range(len(TEXTS))}), sink)
    return sink.getvalue()


def parquet(table, sink) -> None:
    from pyarrow import parquet

    parquet.write_table(table, sink, row_group_size=7, write_page_checksum=True)


def stream(table, sink, **options) -> None:
    with arrow.ipc.new_stream(sink, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=5)


def arrow_file(table, sink) -> None:
    with arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


BGZF = b"\x1f\x8b\x08\4"


def bgzf(content: bytes) -> bytes:
    """What bgzip writes of it: members that say how long they are, the last one empty."""
    written = b""
    for part in (content[:1000], content[1000:], b""):
        packer = zlib.compressobj(wbits=-15)
        packed = packer.compress(part) + packer.flush()
        head = BGZF + b"\0\0\0\0\0\xff\6\0BC\2\0" + struct.pack("<H", len(packed) + 25)
        written += head + packed + struct.pack("<II", zlib.crc32(part), len(part))
    return written


HALVES = lines(TEXTS[:9]), lines(TEXTS[9:])
SKIPPABLE = b"\x50\x2a\x4d\x18\x03\0\0\0abc"
WHOLE = {
    "a.jsonl.gz": b"".join(map(gzip.compress, HALVES)),
    "b.jsonl.gz": bgzf(b"".join(HALVES)),
    "a.jsonl.zst": b"".join(map(zst, HALVES)),
    "b.jsonl.zst": SKIPPABLE + zst(HALVES[0], write_checksum=True) + SKIPPABLE + zst(HALVES[1]),
    "c.jsonl.zst": zst(b"".join(HALVES), write_content_size=False, level=1)
    + zst(b"\n" * 400_000, write_checksum=True),  # blocks of one repeated byte
    "a.parquet": table_bytes(parquet),
    "a.arrow": table_bytes(stream),
    "b.arrow": table_bytes(arrow_file),
    "a.jsonl": b"".join(HALVES),
}


def texts_of(path: Path) -> list[str]:
    chunks = read_chunks(str(path), "text")
    return [text for chunk in chunks for text in values_of(chunk, "text") if text is not None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cut")


@pytest.mark.parametrize("name", WHOLE)
def test_a_file_that_ends_early_is_refused_wherever_it_is_cut(name, folder):
    """A cut between two members, frames or lines leaves a whole file of fewer documents."""
    path = folder / name
    path.write_bytes(WHOLE[name])
    assert texts_of(path) == TEXTS
    borders = {"a.jsonl.gz": [9], "a.jsonl.zst": [9], "b.jsonl.zst": [0, 9], "c.jsonl.zst": [20]}
    kept = borders.get(name, range(len(TEXTS) + 1) if name == "a.jsonl" else [])
    size = len(WHOLE[name])
    places = {*range(0, size, max(size // 150, 1)), *range(size - 20, size), *range(1, 20)}
    ends = set()
    for place in sorted(places):
        path.write_bytes(WHOLE[name][:place])
        try:
            found = texts_of(path)
        except DataError:
            continue
        ends.add(len(found))
        assert len(found) in kept and found == TEXTS[: len(found)]
    if name == "a.jsonl":
        assert ends


def test_a_border_of_blocks_or_messages_is_no_end(folder):
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    parts = []
    for text in TEXTS:
        parts.append(compressor.compress(lines([text])))
        parts.append(compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    parts.append(compressor.flush())
    whole = b"".join(parts)
    (path := folder / "a.jsonl.zst").write_bytes(whole)
    assert texts_of(path) == TEXTS
    for number in range(len(parts)):
        path.write_bytes(b"".join(parts[:number]))
        with pytest.raises(DataError, match="the compressed file"):
            texts_of(path)
    members = WHOLE["b.jsonl.gz"]
    begins = [place for place in range(len(members)) if members.startswith(BGZF, place)]
    assert len(begins) == 3
    for place in begins:
        (folder / "b.jsonl.gz").write_bytes(members[:place])
        with pytest.raises(DataError, match="the compressed file"):
            texts_of(folder / "b.jsonl.gz")
    whole = WHOLE["a.arrow"]
    for place in range(0, len(whole), 8):  # messages are aligned so
        (folder / "a.arrow").write_bytes(whole[:place])
        with pytest.raises(DataError, match="cannot read"):
            texts_of(folder / "a.arrow")
    (folder / "a.arrow").write_bytes(whole * 2)
    with pytest.raises(DataError, match="bytes follow the end of the stream"):
        texts_of(folder / "a.arrow")
    legacy = arrow.ipc.IpcWriteOptions(use_legacy_format=True)  # ends in four zeros
    older = table_bytes(lambda table, sink: stream(table, sink, options=legacy))
    (folder / "a.arrow").write_bytes(older)
    assert texts_of(folder / "a.arrow") == TEXTS
    for more in (b"x", bytes(4), bytes(5)):
        (folder / "a.arrow").write_bytes(older + more)
        with pytest.raises(DataError, match="bytes follow the end of the stream"):
            texts_of(folder / "a.arrow")


@settings(max_examples=60)
@given(st.data())
def test_a_flipped_byte_is_a_line_or_another_text(folder, data):
    """Formats without a checksum cannot tell; none ends in a traceback."""
    name = data.draw(st.sampled_from(sorted(WHOLE)))
    content = bytearray(WHOLE[name])
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    (folder / name).write_bytes(content)
    try:
        found = texts_of(folder / name)
    except DataError:
        return
    assert (
        not name.endswith(".gz") or found == TEXTS
    )  # of gzip every byte of text is under a checksum


@pytest.mark.parametrize("name", ["a.parquet", "b.arrow"])
def test_two_tables_in_one_file_are_refused(name, folder):
    """Their readers begin at the end, and would take one of them alone."""
    small = table_bytes(
        lambda table, sink: (parquet if "parq" in name else arrow_file)(table[:3], sink)
    )
    whole = WHOLE[name]
    for content in (whole + whole, small + whole, whole + small):
        (folder / name).write_bytes(content)
        with pytest.raises(DataError, match="cannot read"):
            texts_of(folder / name)


def test_a_table_that_says_another_number_of_rows_is_refused(folder):
    path = folder / "a.parquet"
    path.write_bytes(WHOLE["a.parquet"])
    rows = len(TEXTS)
    assert texts_of(path) == TEXTS
    length = int.from_bytes(WHOLE["a.parquet"][-8:-4], "little")
    head, footer = WHOLE["a.parquet"][: -8 - length], WHOLE["a.parquet"][-8 - length :]
    # Thrift: field 3 of the footer, int64, in zigzag.
    assert footer.count(bytes([0x16, 2 * rows])) > 0
    at = footer.index(bytes([0x16, 2 * rows]))
    path.write_bytes(head + footer[: at + 1] + bytes([2 * rows - 4]) + footer[at + 2 :])
    with pytest.raises(DataError, match=f"it has {rows} rows, but states {rows - 2}"):
        texts_of(path)


def test_a_column_whose_name_is_the_path_of_another_is_read_itself(folder):
    from pyarrow import parquet

    held = {"text": [{"text": "within"}] * 2, "text.text": ["a", "b"]}
    parquet.write_table(arrow.table(held), folder / "dots.parquet")
    (chunk,) = read_chunks(str(folder / "dots.parquet"), "text.text")
    assert chunk.rows == ["a", "b"]


def test_a_frame_of_the_longest_window_is_read(folder):
    """As `zstd --long=31` writes it."""
    options = {"window_log": 31, "enable_ldm": True, "write_content_size": False}
    parameters = zstandard.ZstdCompressionParameters(**options)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (folder / "a.jsonl.zst").write_bytes(packer.compress(lines(TEXTS)) + packer.flush())
    assert texts_of(folder / "a.jsonl.zst") == TEXTS


@pytest.mark.parametrize("name", ["A.JSONL", "A.JSONL.GZ", "a.jsonl.Zst", "A.PARQUET"])
def test_an_ending_in_capitals_is_the_same_ending(name, folder):
    (folder / name).write_bytes(WHOLE[name.lower()])
    assert texts_of(folder / name) == TEXTS


CODES = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".txt.gz"])
def test_a_text_in_another_encoding_is_refused_with_the_command_that_turns_it(
    code, ending, tmp_path
):
    content = lines(["plain Latin letters, each of them with a NUL", "and more"])
    (path := tmp_path / f"it's{ending}").write_bytes(
        (gzip.compress if ending.endswith("gz") else bytes)(content.decode().encode(code))
    )
    for read in (texts_of, lambda path: read_text(str(path))):
        with pytest.raises(DataError, match="is not UTF-8 text.*UTF-") as error:
            read(path)
        if ending.endswith("gz"):
            return
    subprocess.run(["bash", "-c", str(error.value).partition("; try ")[2]], check=True)
    (turned,) = tmp_path.glob("*_utf8*")
    assert turned.read_bytes() == content


@pytest.mark.parametrize("code", CODES)
def test_a_text_in_another_encoding_is_refused_also_where_zeros_separate(code, tmp_path):
    (path := tmp_path / "a.txt").write_bytes("plain Latin letters, each with a NUL".encode(code))
    with pytest.raises(DataError, match="is not UTF-8 text.*UTF-"):
        list(read_chunks(str(path), "text", "\0"))


# --- one line for each --------------------------------------------------------------------------

DEEP = b"[" * 100_000
HOSTILE = {
    "deep.jsonl": (b'{"text": ' + DEEP, "deep.jsonl:1 is not a line of JSON: it is nested"),
    "in_lines.jsonl": (b'{"text": "a"}\n' + DEEP, "lines.jsonl:2 is not a line of JSON: it is nes"),
    "digits.jsonl": (b'{"text": ' + b"9" * 5000 + b"}", "an integer has too many digits"),
    "utf.jsonl": (b'{"text": "\xff"}', "is not a line of JSON: not UTF-8"),
    "a.tar.gz": (gzip.compress(b"x"), "is packed as .tar.gz, which cannot be read; try tar -xzf"),
    "a.jsonl.bz2": (b"BZh", "is packed as .bz2, which cannot be read; try bunzip2"),
    "a.txt.Z": (b"\x1f\x9d", "is packed as .Z, which cannot be read; try uncompress"),
    "a.feather": (WHOLE["b.arrow"], "is not UTF-8 text; found an Arrow file"),
    "a.tbz2": (bz2.compress(b"x"), "is packed as .tbz2, which cannot be read; try tar -xjf"),
    "a.txt": (gzip.compress(b"x"), "is not UTF-8 text; found compressed with gzip; try mv "),
    "bzip2.txt": (bz2.compress(b"x"), "found compressed with bzip2; try mv "),
    "xz.txt": (lzma.compress(b"x"), "found compressed with xz; try mv "),
    "empty.txt.gz": (b"", "the compressed file is empty"),
    "a" * 60 + "/": (b"", "no file matches"),
}


def refusal(arguments: list[str], capsys) -> str:
    assert main(["data", "prepare", *arguments]) in (5, 10)
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_read_costs_a_line(name, tmp_path, capsys):
    content, said = HOSTILE[name]
    if not name.endswith("/"):
        (tmp_path / name).write_bytes(content)
    assert said in refusal([str(tmp_path / name), "--out", str(tmp_path / "out")], capsys)
    assert len(list(tmp_path.iterdir())) <= 1


@pytest.mark.parametrize("almost", range(920, 1000, 5))
def test_a_value_nested_as_deep_as_python_reads_costs_a_line(almost, tmp_path):
    (path := tmp_path / "a.jsonl").write_bytes(
        b'{"text": ' + b"[" * almost + b"]" * almost + b"}\n"
    )
    with pytest.raises(DataError, match="nested too deeply|is not a text"):
        prepare(Job([str(path)], str(tmp_path / "out")))


@pytest.mark.parametrize("name", ["n" * 300, "f" * 300 + "/x", "n" * 250])
@pytest.mark.parametrize("more", [[], ["--shard-tokens", "5"]])
def test_names_of_300_characters_cost_a_line(name, more, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text")
    given = str(tmp_path / "a.txt")
    out = str(tmp_path / "out")
    assert "cannot write" in refusal([given, "--out", str(tmp_path / name), *more], capsys)
    assert "no file matches" in refusal([str(tmp_path / name), "--out", out, *more], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("compressed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("break_", ["", "\n"])
def test_the_cure_of_a_json_array_works_when_typed(compressed, break_, tmp_path):
    content = b"\xef\xbb\xbf" * (not compressed)
    content += f"[{break_}".encode() + json.dumps([{"text": "ä"}, {"text": "b"}])[1:].encode()
    content = {"": bytes, ".gz": gzip.compress, ".zst": zst}[compressed](content)
    (path := tmp_path / f"it's.json{compressed}").write_bytes(content)
    with pytest.raises(DataError, match="is one JSON array") as error:
        texts_of(path)
    command = str(error.value).partition("; try ")[2].replace("python", sys.executable, 1)
    subprocess.run(["bash", "-c", command], check=True)
    (written,) = tmp_path.glob("*.lines.jsonl")
    assert texts_of(written) == ["ä", "b"]


def saved(folder: Path, **state) -> None:
    folder.mkdir()
    (folder / "data-0.arrow").write_bytes(WHOLE["a.arrow"])
    state = {"_data_files": [{"filename": "data-0.arrow"}]} | state
    (folder / "state.json").write_text(json.dumps(state))


def test_a_saved_dataset_reads_the_files_of_its_folder_and_all_of_their_rows(tmp_path):
    saved(tmp_path / "whole", _indices_data_files=None)
    (found,) = find_inputs([str(tmp_path / "whole")])
    assert texts_of(Path(found)) == TEXTS
    saved(tmp_path / "chosen", _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match="chooses rows by _indices_data_files") as error:
        find_inputs([str(tmp_path / "chosen")])
    python, flag, code = shlex.split(str(error.value).partition("; try ")[2])
    assert (python, flag) == ("python", "-c") and compile(code, "code", "exec")
    away = {
        "up": "../whole/data-0.arrow",
        "absolute": str(tmp_path / "whole" / "data-0.arrow"),
        "number": 3,
        "inside": "x/../../whole/data-0.arrow",
    }
    for number, name in away.items():
        saved(tmp_path / number, _data_files=[{"filename": name}])
        with pytest.raises(DataError, match="names a file outside its folder"):
            find_inputs([str(tmp_path / number)])
    for number, name in enumerate(["data-1.arrow", "*.arrow", "data-[0].arrow", ""]):
        saved(tmp_path / str(number), _data_files=[{"filename": name}])
        with pytest.raises(DataError, match="names a missing file"):
            find_inputs([str(tmp_path / str(number))])
    for number, content in enumerate(["[" * 100_000, "[]", "{", '{"_data_files": 3}', "\xff"], 10):
        saved(tmp_path / str(number))
        (tmp_path / str(number) / "state.json").write_text(content, "latin-1")
        with pytest.raises(DataError, match=r"state\.json is not"):
            find_inputs([str(tmp_path / str(number))])


# --- what separates documents -------------------------------------------------------------------


@given(st.text("ab", max_size=60), st.text("ab", min_size=1, max_size=4), st.integers(1, 9))
def test_documents_are_what_str_split_gives_whatever_the_blocks(folder, text, separator, block):
    (path := folder / "split.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "CHUNK_BYTES", block)
        found = [
            row or "" for chunk in read_chunks(str(path), "text", separator) for row in chunk.rows
        ]
    assert found == text.split(separator)


def test_a_separator_that_does_not_occur_is_searched_for_once():
    """Every byte is searched once, and those that a separator may have begun in."""
    searched = 0

    class Counted(bytearray):
        def find(self, separator, start):  # pyright: ignore[reportIncompatibleMethodOverride]
            nonlocal searched
            searched += len(self) - start
            return super().find(separator, start)

    content = b"x" * 10 * documents.CHUNK_BYTES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "bytearray", Counted, raising=False)
        pieces = list(documents._pieces(io.BytesIO(content), b"<|end|>"))
    assert pieces == [(0, content)] and len(content) <= searched <= len(content) + 10 * 7


def test_an_empty_separator_costs_a_line(folder):
    (folder / "split.txt").write_text("a")
    for separator, said in {"": "--split-on is empty", "\ud800": "is not UTF-8"}.items():
        with pytest.raises(DataError, match=said):
            list(read_chunks(str(folder / "split.txt"), "text", separator))


# --- what lies where the output is to be --------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "pipe", "link to nothing", "folder", "other content"])
@pytest.mark.parametrize(
    "name", ["out.bin", "out.json", "out.idx", "out.loss", "out-00000.bin", "out-00002.idx"]
)
def test_nothing_that_lies_there_is_replaced(kind, name, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("a|b|c|d")
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to nothing":
        path.symlink_to(tmp_path / "nothing")
    else:
        path.write_text(kind)
    more = ["--shard-tokens", "2"] if "-" in name else []
    given = ["--split-on", "|", "--out", str(tmp_path / "out"), *more]
    given = [str(tmp_path / "in.txt"), *given]
    assert main(["data", "prepare", *given]) == 5
    assert f"{name} exists already" in capsys.readouterr().err
    assert os.path.lexists(path) and (kind != "file" or path.read_text() == kind)


def test_what_lies_where_the_journal_is_costs_a_line(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("text")
    given = [str(tmp_path / "in.txt"), "--out", str(tmp_path / "out"), "--shard-tokens", "2"]
    journal = tmp_path / "out.prepare.json"
    os.mkfifo(journal)
    assert "is not a journal" in refusal(given, capsys)
    journal.unlink()
    for content in ("", "[" * 100_000, "[]", '{"version": 1}'):
        journal.write_text(content)
        assert "is not a journal" in refusal(given, capsys)


def test_a_tokenizer_beside_the_shards_is_not_replaced_by_another(tmp_path, tokenizer_json, capsys):
    (tmp_path / "in.txt").write_text("text")
    (other := tmp_path / "out.tokenizer.json").write_text("somebody's")
    given = [str(tmp_path / "in.txt"), "--out", str(tmp_path / "out"), "--shard-tokens", "2"]
    said = refusal([*given, "--tokenizer", str(tokenizer_json)], capsys)
    assert "out.tokenizer.json exists already" in said and other.read_text() == "somebody's"
