"""Does to a file what disks, copies, editors and people do."""

import bz2
import gzip
import io
import json
import lzma
import os
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from fuzz_data.case import BYTES, RETYPED, Case
from fuzz_data.formats import Made, compressed

DEEP = 100_000  # brackets
DIGITS = 5_000
SKIPPABLE = b"\x5e\x2a\x4d\x18\5\0\0\0hello"  # a frame of zstandard that holds no text
# The first bytes of Parquet, Arrow, gzip, zstd, NumPy, zip and pickle.
MAGICS = (
    b"PAR1",
    b"ARROW1\0\0",
    b"\x1f\x8b\x08\0",
    b"\x28\xb5\x2f\xfd",
    b"\x93NUMPY",
    b"PK\3\4",
    b"\x80\4\x95",
    b"",
)
ENDINGS = (
    ".txt",
    ".jsonl",
    ".json",
    ".parquet",
    ".arrow",
    ".gz",
    ".zst",
    ".txt.gz",
    ".bin",
    ".npy",
    ".TXT.GZ",
    ".jsonl.ZST",
    ".bz2",
    ".jsonl.xz",
    ".lz4",
    ".tar.gz",
    ".feather",
)
CODES = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")


def damage(case: Case, made: Made) -> None:
    """Damage the file of a case that it names."""
    random = case.random("damage")
    path = _target(case, made, random)
    if path is None or case.damage in ("none", "shrink"):
        return
    if case.damage in BYTES:
        path.write_bytes(_changed(path.read_bytes(), case.damage, random))
    elif case.damage in RETYPED:
        made.unreadable.add(path)
        path.write_bytes(_retyped(path.read_bytes(), case.damage, random))
    elif case.damage == "link":
        moved = path.rename(path.with_name(f"moved-{path.name}"))
        path.symlink_to(moved)
    elif case.damage == "members":
        _add_members(case, path, random)
    elif case.damage == "ending":
        _rename(made, path, random)
    elif case.damage in ("fifo", "folder", "missing", "socket"):
        _replace(path, case.damage)
    elif case.damage == "other_compression":
        content = path.read_bytes()
        pack = random.choice((gzip.compress, bz2.compress, lzma.compress, _as_zst))
        path.write_bytes(pack(content))
        if case.compression and pack is _of_ending(path):
            made.unreadable.add(path)  # it is packed twice
    else:
        content = _other_content(path, case, made, random)
        path.write_bytes(_packed(content, path, random))


def _target(case: Case, made: Made, random: Random) -> Path | None:
    """Return the file that is damaged; None where the case has none of that kind."""
    if case.target == "tokenizer":
        return made.tokenizer
    holder = random.choice(made.holders) if made.holders else None
    if case.target == "input" or holder is None:
        return holder
    if case.format == "dataset":
        return holder.parent / "state.json"
    beside = {"sidecar": ".json", "index": ".idx", "loss": ".loss"}[case.target]
    path = holder.with_suffix(beside)
    return path if path.exists() else None


def _changed(content: bytes, how: str, random: Random) -> bytes:
    """Return the bytes of a file, some of them other."""
    at = random.randint(0, len(content))
    size = random.choice((1, 2, 4, 100, 5000))
    if how == "cut":
        return content[: random.choice((at, at, max(len(content) - size, 0)))]
    if how == "insert":
        return content[:at] + random.randbytes(size) + content[at:]
    if how == "delete":
        return content[:at] + content[at + size :]
    if how == "zeros":
        return content[:at] + bytes(len(content[at : at + size])) + content[at + size :]
    if how == "tail":
        return content + random.choice((random.randbytes(size), bytes(size), b"\n", b"{", b"\xff"))
    if how == "twice":
        return content + content
    if how == "empty":
        return b""
    flipped = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        if flipped:
            flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
    return bytes(flipped)


def _add_members(case: Case, path: Path, random: Random) -> None:
    """Add what is legal in a compressed file: empty members and frames, zeros after the last."""
    more = b""
    if case.compression == "gz":
        more = random.choice((gzip.compress(b"", mtime=0), bytes(512)))
    elif case.compression == "zst":
        more = random.choice((compressed(b"", "zst", Random(0)), SKIPPABLE))
        if random.random() < 0.5:
            path.write_bytes(SKIPPABLE + path.read_bytes())
    path.write_bytes(path.read_bytes() + more)


def _retyped(content: bytes, how: str, random: Random) -> bytes:
    """Return the ids of a bare file as numbers of another type, or with a header."""
    ids = np.frombuffer(content, "<u2")
    if how == "header":
        header = np.zeros(256, "<i4")
        header[:3] = random.choice((278895051, 20230420, 7)), 1, len(ids)
        return header.tobytes() + content
    if how == "npy":
        file = io.BytesIO()
        rows = random.choice((ids, ids[None]))
        version = random.choice(((1, 0), (2, 0), (3, 0)))
        np.lib.format.write_array(file, rows.astype(random.choice(("<u2", ">u2", "<i8"))), version)
        return file.getvalue()
    return ids.astype(how).tobytes()


def _rename(made: Made, path: Path, random: Random) -> None:
    """Give a file another ending: it is then not what its name says."""
    other = path.with_name("renamed" + random.choice(ENDINGS))
    path.rename(other)
    made.paths = [other if each == path else each for each in made.paths]
    made.holders = [other if each == path else each for each in made.holders]


def _replace(path: Path, by: str) -> None:
    path.unlink()
    if by == "fifo":
        os.mkfifo(path)
    elif by == "folder":
        path.mkdir()
    elif by == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))


def _other_content(path: Path, case: Case, made: Made, random: Random) -> bytes:
    """Return the content of a file of the same name that says something else."""
    name = json.dumps(made.field_name)
    plain = "in clear text, a few words\n"
    if case.damage == "nested":
        opening = random.choice(
            ("[", '{"a":', f"{{{name}:[", "[[]" if random.random() < 0.1 else "[")
        )
        return (opening * DEEP).encode() + random.choice((b"", b"1" + b"]" * DEEP))
    if case.damage == "digits":
        number = "9" * DIGITS
        within = (f"{{{name}: {number}}}", f'{{"n": {number}, {name}: "a"}}', number, "-1e999")
        return random.choice(within).encode()
    if case.damage == "surrogate":
        return f'{{{name}: "a\\ud800"}}\n'.encode()
    if case.damage == "other_encoding":
        made.unreadable.add(path)
        return (f"{{{name}: {json.dumps(plain)}}}\n" * random.randint(1, 3)).encode(
            random.choice(CODES)
        )
    if case.damage == "array":
        return json.dumps([{made.field_name: plain}] * 2, indent=random.choice((None, 1))).encode()
    if case.damage == "other_format":
        return random.choice(MAGICS) + random.randbytes(40)
    original = path.read_bytes()
    if case.damage == "bom":
        return b"\xef\xbb\xbf" + original
    return original.replace(b"\n", b"\r\n" if case.damage == "crlf" else b"\r")


def _as_zst(content: bytes) -> bytes:
    return compressed(content, "zst", Random(0))


def _of_ending(path: Path) -> Callable[[bytes], bytes] | None:
    return {".gz": gzip.compress, ".zst": _as_zst}.get(path.suffix.lower())


def _packed(content: bytes, path: Path, random: Random) -> bytes:
    """Return the content as the ending says, so that what is within is found too."""
    if random.random() < 0.2:
        return content
    ending = path.suffix.lower()
    return compressed(content, ending[1:], random) if ending in (".gz", ".zst") else content
