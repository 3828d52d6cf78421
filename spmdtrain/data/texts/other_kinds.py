"""Recognises non-UTF-8 files by their first bytes: other kinds of files, other encodings."""

import os
import shlex

from spmdtrain.config.errors import DataError

LOOKED_AT = 4096  # bytes
NUMPY = "an array of numpy (.npy)"
BZIP2 = b"BZh"  # also three letters of a text
BZIP2_BLOCK = b"1AY&SY"  # after a digit
# (first bytes, what has them)
MAGICS = (
    (b"\x93NUMPY", NUMPY),
    (b"\x1f\x8b\x08", "compressed with gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstandard"),
    (b"\xfd7zXZ\x00", "compressed with xz"),
    (b"\x04\x22\x4d\x18", "compressed with lz4"),
    (BZIP2, "compressed with bzip2"),
    (b"PK\x03\x04", "a zip file, as .npz and .pt are"),
    (b"PK\x05\x06", "a zip file, as .npz and .pt are"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1\0\0", "an Arrow file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"MMIDIDX\x00\x00", "the .idx of a Megatron token file"),
    (b"TNTIDX\x00\x00", "the .idx of a fairseq token file"),
    (b"LITPKDS", "a packed data set of lit-gpt"),
    (b"\x80\x02\x8a\x0a", "a file of torch.save"),
    (b"GGUF", "a GGUF model"),
    (b"SQLite format 3\x00", "an SQLite file"),
    (b"\x7fELF", "a program"),
    (b"%PDF-", "a PDF file"),
    (b"\x89PNG\r\n", "a picture"),
)
# The endings of packed files (compressed.py).
PACKED = {
    "compressed with gzip": ".gz",
    "compressed with zstandard": ".zst",
    "compressed with xz": ".xz",
    "compressed with lz4": ".lz4",
    "compressed with bzip2": ".bz2",
}
# (first bytes, what has them, as iconv names it)
MARKS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
# Which of four bytes are 0 in a text of mostly Latin letters, by encoding.
ZEROS = {"x0x0": "UTF-16LE", "0x0x": "UTF-16BE", "x000": "UTF-32LE", "000x": "UTF-32BE"}
SHORTEST = 16  # bytes needed to tell an encoding by its zeros


def refuse_other_kinds(first: bytes, path: str) -> None:
    """Raises DataError if the first bytes show that a file is not text, or not UTF-8.

    UTF-16 without a byte order mark is valid UTF-8 if all letters are Latin: each comes with a NUL.
    """
    for magic, kind in MAGICS:
        is_bzip2 = magic == BZIP2 and first[4:].startswith(BZIP2_BLOCK)
        if first.startswith(magic) and (is_bzip2 or not magic.decode("latin-1").isprintable()):
            raise DataError(f"{path} is not UTF-8 text", found=kind, fix=_ended_in(path, kind))
    name = encoding_of(first[:LOOKED_AT])
    if name is None:
        return
    stem, ending = os.path.splitext(path)
    is_packed = ending.lower() in (".gz", ".zst")
    out = shlex.quote(f"{stem}_utf8{ending}")
    command = f"iconv -f {name} -t UTF-8 {shlex.quote(path)} > {out}"
    raise DataError(f"{path} is not UTF-8 text", found=name, fix="" if is_packed else command)


def _ended_in(path: str, kind: str) -> str:
    """Returns the command that gives a packed file the ending by which it is read or refused."""
    ending = PACKED.get(kind)
    return f"mv {shlex.quote(path)} {shlex.quote(path + ending)}" if ending else ""


def encoding_of(first: bytes) -> str | None:
    """Returns iconv's name of the encoding of a text that is not UTF-8; None: unknown."""
    for mark, name in MARKS:
        if first.startswith(mark):
            return name
    if len(first) < SHORTEST:
        return None
    fours = first[: len(first) // 4 * 4]
    # Three of four bytes in this place. Ids below 512 have zeros in half of such places.
    pattern = ["0" if fours[at::4].count(0) * 16 > 3 * len(fours) else "x" for at in range(4)]
    name = ZEROS.get("".join(pattern))
    if name is None:
        return None
    text = fours.decode(name, "replace")
    shown = sum(letter.isprintable() or letter.isspace() for letter in text)
    return name if shown > 0.98 * len(text) else None
