"""Describes a folder of saved logits: a teacher's prediction at each training token.

ids.bin      [tokens, top] little endian: the ids of the likeliest next tokens, likeliest first;
             uint16 if the vocabulary fits, else uint32
logs.bin     [tokens, top + 1] little endian float16: their log-probabilities, of the softmax of the
             logits over the temperature, and last that of all other tokens together
logits.json  what the other two files hold, and of which teacher and data: a Manifest

Record i is about the token after token i of the corpus. So the records of a sample follow from the
offsets of its tokens, however samples are shuffled. logits.json is written last: without it the
folder is incomplete.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.config.named_file import read_named
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.token_files.rows import StoredRow, reading, require_file
from spmdtrain.data.token_files.tokens import DTYPES, storage_dtype

IDS_FILE, LOGS_FILE, MANIFEST_FILE = "ids.bin", "logs.bin", "logits.json"
LOGS_DTYPE = np.dtype("<f2")
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """The contents of a folder of saved logits."""

    version: int
    tokens: int  # records, from the first token of the corpus
    top: int
    temperature: float
    vocab: int
    corpus: str  # fingerprint of the data
    tokenizer: str  # fingerprint
    sequence_length: int  # of the windows that the teacher read
    packing: str  # of documents in them
    teacher: str  # where its weights were
    weights: str  # their fingerprint
    ids: str  # hash of blocks of ids.bin
    logs: str  # of logs.bin

    @property
    def fingerprint(self) -> str:
        """The hex digits that identify these logits, wherever the folder is."""
        content = asdict(self) | {"teacher": ""}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def token_numbers(self) -> int:
        """The numbers of a token in a batch: ids, their log-probabilities, that of the rest."""
        return 2 * self.top + 1

    @property
    def described(self) -> str:
        """The description in the first lines of a run."""
        return f"the {self.top} likeliest by {self.teacher} ({self.fingerprint})"

    @property
    def ids_dtype(self) -> np.dtype:
        """The type of the stored ids."""
        return DTYPES[storage_dtype(self.vocab)]


def bytes_of_token(top: int, vocab: int) -> int:
    """Returns the bytes on disk for each token of the data."""
    return top * DTYPES[storage_dtype(vocab)].itemsize + (top + 1) * LOGS_DTYPE.itemsize


def rows_of(folder: Path, manifest: Manifest) -> tuple[StoredRow, StoredRow]:
    """Returns the numbers of ids.bin and of logs.bin, each as one row."""
    tokens, top = manifest.tokens, manifest.top
    return (
        StoredRow(str(folder / IDS_FILE), manifest.ids_dtype, tokens * top),
        StoredRow(str(folder / LOGS_FILE), LOGS_DTYPE, tokens * (top + 1)),
    )


def read_manifest(name: str) -> tuple[Path, Manifest]:
    """Returns a folder of saved logits and its manifest. No record is read.

    `name` is the folder as the user writes it. Raises DataError if nothing was saved there, or not
    all of it.
    """
    folder = Path(os.path.expanduser(name))
    file = folder / MANIFEST_FILE
    setting = f"distill.logits={name!r}"
    require_file(file)
    if not file.exists():
        raise DataError(
            f"{setting} holds no saved logits",
            found=f"no {MANIFEST_FILE}, which is written last",
            fix=f"spmdtrain data teach CONFIG TEACHER --out {name}",
        )
    with reading(file):
        content = read_named(file)
    try:
        manifest = _as_manifest(json.loads(content))
    except (ValueError, TypeError, RecursionError):
        raise DataError(f"{file} is damaged", fix="writing the logits again") from None
    if manifest.version != VERSION:
        version = f"{file} has version {manifest.version}"
        raise DataError(f"{version}; this program reads version {VERSION}")
    return folder, manifest


def _as_manifest(document: object) -> Manifest:
    if not isinstance(document, dict):
        raise TypeError("a manifest is a table")
    for field in fields(Manifest):
        if type(document.get(field.name)) is not field.type:
            raise TypeError(f"{field.name} is a {field.type}")
    manifest = Manifest(**document)
    sizes = (manifest.tokens, manifest.top, manifest.sequence_length, manifest.temperature)
    if min(sizes) <= 0 or not manifest.top <= manifest.vocab < 2**32 or manifest.tokens >= 2**48:
        raise ValueError("a size is out of its range")
    return manifest


def saved_for(config: RunConfig) -> Manifest | None:
    """Returns the manifest of `distill.logits`; None without it.

    Raises UserError if nothing was saved there, or for another vocabulary or temperature. `config`
    has its vocabulary resolved.
    """
    name = config.distill.logits
    if name is None:
        return None
    _, manifest = read_manifest(name)
    temperature = config.distill.temperature
    if manifest.temperature != temperature:
        raise ConfigError(
            f"distill.logits={name!r} holds the softmax of logits over another temperature",
            asked=f"distill.temperature={temperature:g}",
            found=f"{manifest.temperature:g} in {MANIFEST_FILE}",
            fix=f"--set distill.temperature={manifest.temperature:g}",
        )
    if manifest.vocab != config.vocab:
        raise ConfigError(
            f"distill.logits={name!r} holds ids of another vocabulary",
            asked=f"model.vocab={config.vocab}",
            found=f"{manifest.vocab} in {MANIFEST_FILE}",
            fix="logits of a teacher with the tokenizer of the run",
        )
    return manifest
