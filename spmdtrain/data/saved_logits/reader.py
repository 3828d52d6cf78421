"""Reads the saved logits of the tokens of a sample.

A batch of n samples of T tokens then also has

    taught_ids  [n, T, top]     int32    the teacher's likeliest tokens after each input
    taught_logs [n, T, top + 1] float32  their log-probabilities, and that of the rest
"""

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.saved_logits.manifest import (
    IDS_FILE,
    LOGS_FILE,
    Manifest,
    read_manifest,
    rows_of,
)
from spmdtrain.data.token_files.blocks import hash_of_blocks
from spmdtrain.data.token_files.rows import StoredRow
from spmdtrain.data.tokenizers.tokenizer import tokenizer_fingerprint

IDS, LOGS = "taught_ids", "taught_logs"  # in a batch


class SavedLogits:
    """An open folder of saved logits, whose files belong to its manifest."""

    def __init__(self, manifest: Manifest, ids: StoredRow, logs: StoredRow):
        self.manifest = manifest
        self._ids = ids
        self._logs = logs

    @property
    def described(self) -> str:
        """A line about them, of the manifest."""
        return self.manifest.described

    def blank(self, shape: tuple[int, int]) -> dict[str, np.ndarray]:
        """Returns the entries of a batch for tokens [n, T] without saved logits."""
        top = self.manifest.top
        ids = np.broadcast_to(np.arange(top, dtype=np.int32), (*shape, top))
        return {IDS: ids.copy(), LOGS: np.zeros((*shape, top + 1), np.float32)}

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns the entries of a sequence whose inputs have the offsets start to stop - 1."""
        top = self.manifest.top
        ids = self._ids[start * top : stop * top].reshape(-1, top)
        logs = self._logs[start * (top + 1) : stop * (top + 1)].reshape(-1, top + 1)
        return {IDS: ids.astype(np.int32), LOGS: logs.astype(np.float32)}

    def of_windows(self, starts: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Returns the entries of windows of `length` inputs that begin at the offsets `starts`."""
        windows = [self.read(start, start + length) for start in starts.tolist()]
        return {name: np.stack([window[name] for window in windows]) for name in (IDS, LOGS)}


def open_logits(
    config: RunConfig, corpus: str, tokenizer: dict | None, tokens: int
) -> SavedLogits | None:
    """Opens the folder that `distill.logits` names, for the first `tokens` of a corpus; None if it
    names none.

    `corpus`: the fingerprint of the data; `tokenizer`: the spec of its tokenizer. Raises DataError
    if the logits are of other data, if the teacher read it otherwise, or if a file is damaged.
    """
    name = config.distill.logits
    if name is None:
        return None
    folder, manifest = read_manifest(name)
    setting = f"distill.logits={name!r}"
    again = f"spmdtrain data teach CONFIG {manifest.teacher} --out {name}"
    matches = {
        "the tokenizer": (tokenizer_fingerprint(tokenizer)[:16], manifest.tokenizer[:16]),
        "the data": (corpus[:16], manifest.corpus[:16]),
        "train.sequence_length": (config.train.sequence_length, manifest.sequence_length),
        "data.packing": (config.data.packing, manifest.packing),
    }
    for what, (ours, theirs) in matches.items():
        if ours != theirs:
            raise DataError(
                f"{setting} was written for other settings or data: {what}",
                asked=f"{ours}",
                found=f"{theirs} there",
                fix=again,
            )
    if tokens > manifest.tokens:
        raise DataError(
            f"{setting} says nothing of the last tokens that train",
            asked=f"{tokens:,} tokens",
            found=f"{manifest.tokens:,} there",
            fix=again,
        )
    rows = rows_of(folder, manifest)
    for file, row, hashed in zip(
        (IDS_FILE, LOGS_FILE), rows, (manifest.ids, manifest.logs), strict=True
    ):
        path = folder / file
        wanted = len(row) * row.dtype.itemsize
        size = path.stat().st_size if path.is_file() else None
        if size != wanted or hash_of_blocks(row.path, wanted) != hashed:
            damage = "no such file" if size is None else f"{size} bytes, {wanted} were written"
            if size == wanted:
                damage = "other contents than were written"
            raise DataError(f"{path} is damaged", found=damage, fix=again)
    return SavedLogits(manifest, *rows)
