"""Maps the parameters of a run to the published tensors of an export."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import FinetuneConfig, TransformerConfig
from spmdtrain.interop.names.entry import Entry
from spmdtrain.interop.names.model_table import table_of
from spmdtrain.interop.pieces import AnyMapped, Shape
from spmdtrain.interop.published_weights import sizes_of


@dataclass(frozen=True)
class Target:
    """The target of an export: its config.json, and the tensors that parameters become."""

    model: TransformerConfig
    family: str
    keys: Mapping[str, Any]
    dtype: str
    finetune: FinetuneConfig  # says how adapters are merged

    def mapped(self, path: str, shape: Shape) -> tuple[Entry, AnyMapped, Sequence[int | None]]:
        """Returns the tensors of a parameter of this shape, and the numbers of its layers."""
        stacked = path.startswith("blocks.")
        entry = table_of(self.family, self.model).get(path)
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
