"""Refuses the tokenizer files of other libraries by name, with the way to a `tokenizer.json`."""

import re
from pathlib import Path

from spmdtrain.config.errors import DataError

# The names that such files have in the folder of a published model.
NAMES = ("tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model")
MOST_READ = 1 << 16  # bytes that tell a format
RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+")  # a line of tiktoken
CONVERTED = (
    "the tokenizer.json of the same model, as transformers' "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OUT) writes it"
)


def refuse_other_library(path: Path) -> None:
    """Raises DataError if a file is a tokenizer of sentencepiece, tiktoken or mistral-common."""
    library = _library_of(path)
    if library:
        raise DataError(
            f"{path} is a tokenizer of {library}, and not a tokenizer.json", fix=CONVERTED
        )


def _library_of(path: Path) -> str:
    """Returns the name of the library whose format a file has; "" if it has none of them."""
    with path.open("rb") as file:
        begin = file.read(MOST_READ)
    if begin[:1] == b"\n" and path.suffix == ".model":  # the first field of a protobuf
        return "sentencepiece"
    if RANK.fullmatch(begin.partition(b"\n")[0].rstrip()):
        return "tiktoken"
    if begin.lstrip()[:1] == b"{" and b'"token_bytes"' in begin and b'"rank"' in begin:
        return "mistral-common (tekken)"
    return ""
