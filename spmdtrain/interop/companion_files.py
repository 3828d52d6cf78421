"""Copies the files that accompany a published model's weights, byte for byte."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from spmdtrain.config.published.read_config import read_published
from spmdtrain.config.run_files import ORIGINAL as ORIGINAL
from spmdtrain.config.writing import replacing, writing
from spmdtrain.interop.imported_tensors import LIST, list_tensors
from spmdtrain.interop.packings import open_published

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
COPIED = (
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
LICENSES = "LICENSE*"
LARGEST = 256 * 2**20  # bytes of a file that is copied


def files_to_keep(folder: Path) -> list[Path]:
    """Returns the files of a published model that an export includes, except config.json."""
    named = [folder / name for name in COPIED]
    candidates = [*named, *sorted(folder.glob(LICENSES))]
    return [path for path in candidates if path.is_file() and path.stat().st_size <= LARGEST]


def keep_files(source: Path, run: Path) -> None:
    """Copies config.json and its companions into a run, with a list of the tensors.

    `source`: a published model, or what was kept of one. Raises StorageError if it cannot write.
    """
    target = run / ORIGINAL
    is_kept = (source / LIST).is_file()
    copy_files([source / CONFIG, *files_to_keep(source), *[source / LIST] * is_kept], target)
    if not is_kept and any(source.glob("*.safetensors")):
        with replacing(target / LIST, target / f"{LIST}.tmp") as spare:
            tensors = open_published(read_published(source))
            spare.write_text(list_tensors(tensors), encoding="utf-8")


def copy_files(files: Sequence[Path], target: Path) -> None:
    """Copies files byte for byte into a folder, which is created."""
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
    for path in files:
        with replacing(target / path.name, target / f"{path.name}.tmp") as spare:
            shutil.copyfile(path, spare)


def original_folder(run: Path) -> Path | None:
    """Returns the folder with the files of a run's original model, if it was imported."""
    folder = run / ORIGINAL
    return folder if (folder / CONFIG).is_file() else None
