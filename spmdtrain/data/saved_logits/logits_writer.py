"""Writes a folder of saved logits, its records in any order."""

import contextlib
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from spmdtrain.config.errors import StorageError
from spmdtrain.config.writing import replacing, writing
from spmdtrain.data.saved_logits.manifest import (
    IDS_FILE,
    LOGS_DTYPE,
    LOGS_FILE,
    MANIFEST_FILE,
    Manifest,
    bytes_of_token,
)
from spmdtrain.data.token_files.blocks import hash_of_blocks


class LogitsWriter:
    """A folder of saved logits being written. Use it as a context, and call `finish` at the end.

    Until then the folder has no manifest, and so does not count as complete. Files of earlier or
    interrupted writing are replaced.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        """Opens the files of `manifest`, whose hashes are still missing.

        Raises StorageError if they cannot be written, or if the disk has no room for them.
        """
        self._folder = folder
        self._manifest = manifest
        self._files = contextlib.ExitStack()
        widths = {
            IDS_FILE: manifest.top * manifest.ids_dtype.itemsize,
            LOGS_FILE: (manifest.top + 1) * LOGS_DTYPE.itemsize,
        }
        self._widths = widths  # bytes of a record
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            earlier = [folder / name for name in (MANIFEST_FILE, *widths)]
            self._refuse_full_disk(sum(file.stat().st_size for file in earlier if file.is_file()))
            for file in earlier:
                file.unlink(missing_ok=True)
            self._open = {
                name: self._files.enter_context((folder / name).open("wb")) for name in widths
            }

    def __enter__(self) -> "LogitsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def write(self, start: int, ids: np.ndarray, logs: np.ndarray) -> None:
        """Writes the records from token `start` on: ids [n, top] and logs [n, top + 1]."""
        with writing(self._folder):
            for name, x, dtype in (
                (IDS_FILE, ids, self._manifest.ids_dtype),
                (LOGS_FILE, logs, LOGS_DTYPE),
            ):
                self._open[name].seek(start * self._widths[name])
                self._open[name].write(np.ascontiguousarray(x, dtype).data)

    def finish(self) -> Manifest:
        """Puts the manifest in place, and returns it."""
        hashes = {}
        with writing(self._folder):
            for name, width in self._widths.items():
                size = width * self._manifest.tokens
                self._open[name].truncate(size)  # the last token of the data has no record
                self._open[name].flush()
                hashes[name] = hash_of_blocks(str(self._folder / name), size)
        whole = replace(self._manifest, ids=hashes[IDS_FILE], logs=hashes[LOGS_FILE])
        with replacing(self._folder / MANIFEST_FILE) as spare:
            spare.write_text(json.dumps(asdict(whole), indent=1) + "\n", encoding="utf-8")
        return whole

    def _refuse_full_disk(self, replaced: int) -> None:
        """Raises StorageError if there is no room, even without the bytes that are replaced."""
        manifest = self._manifest
        wanted = manifest.tokens * bytes_of_token(manifest.top, manifest.vocab)
        free = shutil.disk_usage(self._folder).free + replaced
        if free < wanted:
            raise StorageError(
                f"{self._folder} has no room for the logits",
                asked=f"{wanted / 1e9:.1f} GB",
                found=f"{free / 1e9:.1f} GB free",
                fix="a smaller --top, or another disk",
            )
