"""Maps the parameters of a run to the published tensors of an export."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import FinetuneConfig, TransformerConfig
from spmdtrain.interop.imported_tensors import ImportedTensors
from spmdtrain.interop.names.entry import OURS, Entry, Table
from spmdtrain.interop.names.family_names import NAMES
from spmdtrain.interop.names.model_sizes import sizes_of
from spmdtrain.interop.names.model_table import layout_of, table_of
from spmdtrain.interop.names.spellings import name_in, respelled, spelled, spelling_of
from spmdtrain.interop.pieces import AnyMapped, Shape

CHOOSES = "router.load_bias_x"  # the ending of our paths of such a bias


@dataclass(frozen=True)
class Target:
    """The target of an export: its config.json, and the tensors that parameters become."""

    model: TransformerConfig
    family: str
    keys: Mapping[str, Any]
    dtype: str
    finetune: FinetuneConfig  # says how adapters are merged
    imported: ImportedTensors = ImportedTensors()

    @cached_property
    def table(self) -> Table:
        """The names of tensors, in the layout that was imported, and in its spelling where
        transformers keeps it.
        """
        layout = layout_of(self.family, self.model, self.imported.types)
        table = table_of(self.family, self.model, layout)
        if not self._keeps_spelling:
            return table
        return {path: respelled(entry, self._spelling) for path, entry in table.items()}

    @cached_property
    def _spelling(self) -> tuple[str, str]:
        return spelling_of(self.family, self.imported.types)

    @property
    def _keeps_spelling(self) -> bool:
        return self._spelling in NAMES[self.family].kept_spellings

    def dtypes(self, ours: Mapping[str, Shape]) -> dict[str, str]:
        """Returns the dtype of each tensor that parameters of these shapes become.

        It is that of the export, but for those that were in float32 among others, and for the
        biases by which routers choose: rounded to 16 bits, they would choose otherwise.
        """
        dtypes = {}
        for path, shape in ours.items():
            entry, _, layers = self.mapped(path, shape)
            for name in (name for layer in layers for name in entry.of_layer(layer)):
                imported = self._imported_name(name)
                is_narrow = self.imported.types.get(imported, "float32") != "float32"
                chooses = path.endswith(CHOOSES) and not is_narrow
                is_wide = chooses or self.imported.is_wide(imported)
                dtypes[name] = "float32" if is_wide else self.dtype
        return dtypes

    def files(self, names: Collection[str]) -> list[list[str]] | None:
        """Returns the tensors of each file, as they were imported; None if they were others.

        Tensors that were left out, such as those of a vision tower, take nothing along.
        """
        imported = {name: self._imported_name(name) for name in sorted(names)}
        if not set(imported.values()) <= self.imported.types.keys():
            return None
        place = {name: file for file, in_file in self.imported.files.items() for name in in_file}
        files: dict[str, list[str]] = {}
        for name, in_file in imported.items():
            files.setdefault(place[in_file], []).append(name)
        return [files[file] for file in sorted(files)]

    def _imported_name(self, name: str) -> str:
        """Returns the name by which the imported files had a tensor of the export."""
        in_files = name if self._keeps_spelling else spelled(name, self._spelling)
        return name_in(self.imported.types, in_files, self.family)

    def mapped(self, path: str, shape: Shape) -> tuple[Entry, AnyMapped, Sequence[int | None]]:
        """Returns the tensors of a parameter of this shape, and the numbers of its layers."""
        stacked = path.startswith(OURS)
        entry = self.table.get(path)
        if entry is None:
            raise ConfigError(
                f"no tensor of {self.family} holds {path}", fix="spmdtrain.weights(RUN) in Python"
            )
        of_layer = shape[1:] if stacked else shape
        layers = range(shape[0]) if stacked else (None,)
        return entry, entry.rule(sizes_of(self.model), of_layer), layers

    def shapes(self, ours: Mapping[str, Shape]) -> dict[str, Shape]:
        """Returns the shapes of all tensors, sorted by name."""
        shapes: dict[str, Shape] = {}
        for path, shape in ours.items():
            entry, mapped, layers = self.mapped(path, shape)
            for layer in layers:
                shapes |= dict(zip(entry.of_layer(layer), mapped.shapes, strict=True))
        return dict(sorted(shapes.items()))
