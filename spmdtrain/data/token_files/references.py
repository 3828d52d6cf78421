"""Reads and writes a reference model's log-probabilities of pairs of answers: `NAME.ref`.

NAME.ref       [documents, 2] float32, little endian: of the chosen and of the rejected answer
               of each pair, the sum over its learned tokens
NAME.ref.json  the run and the step that gave them, and the sha256 of NAME.ref, NAME.bin and
               NAME.loss
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.config.named_file import read_named
from spmdtrain.config.writing import replacing, writing
from spmdtrain.data.token_files.rows import reading, require_file
from spmdtrain.data.token_files.tokens import TokenSource, token_paths

DTYPE = np.dtype("<f4")


def reference_paths(path: str | Path) -> tuple[Path, Path]:
    """Returns the .ref and the .ref.json of a token file."""
    reference = token_paths(path)[0].with_suffix(".ref")
    return reference, reference.with_name(f"{reference.name}.json")


def read_references(source: TokenSource) -> np.ndarray | None:
    """Returns the log-probabilities [documents, 2], float32; None if there are none.

    Raises DataError if they are damaged, or belong to other tokens.
    """
    reference, described = reference_paths(source.path)
    if not described.exists():
        return None
    for file in (reference, described):
        require_file(file)
    with reading(described):
        content = read_named(described)
    with reading(reference):
        numbers = np.fromfile(reference, DTYPE)
    try:
        record = json.loads(content)
        is_whole = record["sha256"] == hashlib.sha256(numbers.data).hexdigest()
        is_of_these = record["tokens"] == _tokens_of(source)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = is_of_these = False
    count = source.sidecar["documents"]
    if not is_whole or numbers.size != 2 * count or not np.isfinite(numbers).all():
        raise DataError(f"{reference} is damaged", fix=_command(source))
    if not is_of_these:
        what = f"{reference} belongs to other tokens than {source.path}"
        raise DataError(what, fix=_command(source))
    return numbers.reshape(count, 2)


def no_references(path: str) -> DataError:
    """Returns the error for pairs without log-probabilities of a reference model."""
    return DataError(
        f"{path} holds no log-probabilities of a reference model",
        fix=f"spmdtrain data reference {path} RUN, with the run that training starts from",
    )


def write_references(source: TokenSource, numbers: np.ndarray, run: str, step: int) -> None:
    """Writes log-probabilities [documents, 2] next to a token file, replacing earlier ones.

    Raises StorageError if they cannot be written.
    """
    reference, described = reference_paths(source.path)
    content = numbers.astype(DTYPE).tobytes()
    record = {
        "run": run,
        "step": step,
        "sha256": hashlib.sha256(content).hexdigest(),
        "tokens": _tokens_of(source),
    }
    text = json.dumps(record, indent=1) + "\n"
    with writing(reference):
        described.unlink(missing_ok=True)  # an interruption leaves no pair of old and new
    for path, written in ((reference, content), (described, text.encode())):
        with replacing(path) as spare:
            spare.write_bytes(written)


def _tokens_of(source: TokenSource) -> list[str]:
    """Returns the hashes that identify the tokens and marks of a file."""
    return [source.sidecar["sha256"], source.sidecar["loss_sha256"]]


def _command(source: TokenSource) -> str:
    return f"spmdtrain data reference {source.path} RUN"
