"""Opens the safetensors files of a directory: checks header and offsets, and reads nothing yet.

The package `safetensors` checks each file against the format. Slices are then mapped at the checked
offsets, with a mapping for each tensor: it is dropped with the tensor, whereas `safe_open` would
keep every page that was read resident.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from spmdtrain.config.errors import CheckpointError, UserError
from spmdtrain.config.named_file import AGAIN

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: dict[str, Any] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# For tensors with these endings, which hold four-bit numbers (mxfp4.py).
PACKED = {"U8": np.dtype(np.uint8)}
PACKED_NAMES = ("_blocks", "_scales")
POINTER = b"version https://git-lfs"
LARGEST_INDEX = 256 * 2**20  # bytes


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file, at `offset` bytes from its start.

    `kind` is the type of its numbers, or the file's name for a type that cannot hold weights here.
    """

    name: str
    path: Path
    offset: int
    shape: tuple[int, ...]
    kind: np.dtype | str

    @property
    def dtype(self) -> np.dtype:
        """The type of its numbers. Raises CheckpointError if it cannot hold weights."""
        if isinstance(self.kind, str):
            raise CheckpointError(
                f"{self.name} of {self.path} has dtype {self.kind}",
                found="quantised weights, or no weights",
                fix=f"the model it was made from, in {', '.join(DTYPES)}",
            )
        return self.kind

    @property
    def size(self) -> int:
        """The bytes of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def map(self) -> np.ndarray:
        """Returns the tensor as an array whose pages are read on first use."""
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


def open_tensors(folder: Path, kinds: Mapping[str, Any] = DTYPES) -> dict[str, Tensor]:
    """Returns the tensors of all weight files of a directory, by name.

    `kinds`: the types of numbers that can hold weights here, by the name in a file.

    Raises CheckpointError if a file is missing or damaged, or is a git-lfs pointer, if there are
    two models, and if there are only pickles. Types that cannot hold weights are refused later, by
    `Tensor.dtype`.
    """
    index = folder / INDEX
    if index.exists():
        file_of = _read_index(index)
        _refuse_two_models(folder, file_of)
        return _by_index(folder, file_of, kinds)
    files = [folder / SINGLE]
    if not files[0].exists():
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _without_files(folder)
    tensors: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in open_file(path, kinds).items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder} holds {name} twice",
                    found=f"{tensors[name].path.name} and {path.name}",
                    fix=f"a folder with one model in it, or its {INDEX}",
                )
            tensors[name] = tensor
    return tensors


def _refuse_two_models(folder: Path, file_of: Mapping[str, str]) -> None:
    """Refuses a single file beside shards: transformers reads the file, others read the shards."""
    if (folder / SINGLE).exists() and SINGLE not in file_of.values():
        raise CheckpointError(
            f"{folder} holds two models: {SINGLE}, which transformers reads, and those in {INDEX}",
            fix=f"without {SINGLE}, or without {INDEX} and its files",
        )


def _by_index(
    folder: Path, file_of: Mapping[str, str], kinds: Mapping[str, Any]
) -> dict[str, Tensor]:
    files = sorted(set(file_of.values()))
    in_folder = sorted(path.name for path in folder.glob("*.safetensors"))
    for file in files:
        if file not in in_folder:
            raise CheckpointError(
                f"{folder / INDEX} names {file}",
                found=", ".join(in_folder) or "no *.safetensors",
                fix=AGAIN,
            )
    tensors = {}
    for file in files:
        for name, tensor in open_file(folder / file, kinds).items():
            if file_of.get(name) != file:
                raise CheckpointError(
                    f"{folder / file} holds {name}, which {INDEX} does not name there", fix=AGAIN
                )
            tensors[name] = tensor
    for name, file in file_of.items():
        if name not in tensors:
            raise CheckpointError(f"{folder / file} lacks {name}, which {INDEX} names", fix=AGAIN)
    return tensors


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        if path.stat().st_size > LARGEST_INDEX:
            raise ValueError("it is larger than 256 MiB")
        file_of = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(file_of, dict) or not file_of:
            raise ValueError("its weight_map is not a table")
        for name, file in file_of.items():
            if not isinstance(file, str) or Path(file).name != file or file in (".", ".."):
                raise ValueError(
                    f"it puts {name!r:.80} into {file!r:.80}, which is not a file name"
                )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{path} is damaged: {_reason(error)}"
        raise CheckpointError(what, fix=AGAIN) from None
    return file_of


def open_file(path: Path, kinds: Mapping[str, Any] = DTYPES) -> dict[str, Tensor]:
    """Returns the tensors of one file by name. Raises CheckpointError as `open_tensors`."""
    size = 0
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file", fix=AGAIN)
        with path.open("rb") as file:
            start = file.read(len(POINTER))
        if start == POINTER:
            raise CheckpointError(
                f"{path} is only a git-lfs pointer, {size} bytes",
                fix=f"git lfs pull in {path.parent}",
            )
        with safe_open(path, framework="np"):  # refuses what the format does not allow
            pass
        header, first = _header(path)
    except UserError:
        raise
    except OSError as error:
        what = f"{path} cannot be read: {_reason(error)}"
        raise CheckpointError(what, fix=f"a file that you may read, or {AGAIN}") from None
    except (SafetensorError, ValueError) as error:
        raise _damaged(path, size, error) from None
    return {name: _tensor(path, name, entry, first, kinds) for name, entry in header.items()}


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header's entry for each tensor, and the offset at which the data begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size:
            raise ValueError("it is shorter than its header")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def _tensor(
    path: Path, name: str, entry: Mapping[str, Any], first: int, kinds: Mapping[str, Any]
) -> Tensor:
    if not name.isprintable() or len(name) > 1000:
        raise CheckpointError(f"{path} is damaged: a tensor is named {name!r:.80}", fix=AGAIN)
    packed = PACKED if name.endswith(PACKED_NAMES) else {}
    kind = {**kinds, **packed}.get(entry["dtype"], str(entry["dtype"]))
    return Tensor(name, path, first + entry["data_offsets"][0], tuple(entry["shape"]), kind)


def _damaged(path: Path, size: int, error: Exception) -> CheckpointError:
    try:
        header, first = _header(path)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        whole = first + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        whole = size
    if whole == size:
        return CheckpointError(f"{path} is damaged: {_reason(error)}", fix=AGAIN)
    return CheckpointError(
        f"{path} is damaged: its header says {whole:,} bytes", found=f"{size:,}", fix=AGAIN
    )


def _without_files(folder: Path) -> CheckpointError:
    pickles = [*folder.glob("pytorch_model*.bin"), *folder.glob("*.pth"), *folder.glob("*.pt")]
    if pickles:
        return CheckpointError(
            f"{folder} holds {sorted(pickles)[0].name}, whose reading would run code",
            found="no *.safetensors",
            fix="saving it again with save_pretrained(DIR, safe_serialization=True)",
        )
    return CheckpointError(f"{folder} holds no *.safetensors", fix="the folder of a whole model")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return getattr(error, "strerror", None) or str(error)
