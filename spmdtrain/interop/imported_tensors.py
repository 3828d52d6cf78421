"""Remembers how the files of an imported model held its tensors, for the export.

A run has a list of their names and types, by file, beside the imported config.json. By it an export
writes the names and the files that came in, and rounds no tensor that was in float32.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from spmdtrain.interop.safetensors_files import Tensor

LIST = "tensors.json"


@dataclass(frozen=True)
class ImportedTensors:
    """The tensors of an imported model: the type of each by its name, by the name of its file."""

    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @cached_property
    def types(self) -> Mapping[str, str]:
        """The type of each tensor."""
        return {name: kind for names in self.files.values() for name, kind in names.items()}

    @cached_property
    def usual(self) -> str:
        """The type of most tensors; empty if nothing was imported."""
        counts = Counter(self.types.values())
        return counts.most_common(1)[0][0] if counts else ""

    def is_wide(self, name: str) -> bool:
        """Returns True for a tensor in float32 in files of another type."""
        return self.types.get(name) == "float32" != self.usual


def list_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Returns the text of the list for the tensors of a published model, as they are read."""
    files: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        files.setdefault(tensor.path.name, {})[name] = str(tensor.kind)
    return json.dumps(files, indent=1, sort_keys=True)


def imported_tensors(folder: Path | None) -> ImportedTensors:
    """Returns what `list_tensors` wrote into a folder: nothing if it has no list, as an older
    import.
    """
    if folder is None or not (folder / LIST).is_file():
        return ImportedTensors()
    return ImportedTensors(json.loads((folder / LIST).read_text(encoding="utf-8")))
