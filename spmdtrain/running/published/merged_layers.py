"""Reads the weights that a run exports, one layer at a time, with its adapters and those of other
runs merged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from spmdtrain.checkpoints.layers import Layers
from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.config.published.read_config import read_published
from spmdtrain.config.schema import FinetuneConfig, TransformerConfig
from spmdtrain.interop.pieces import Shape
from spmdtrain.interop.published_weights import Weights
from spmdtrain.models.adapters.by_path import check_merges, merged, wide
from spmdtrain.models.adapters.quantised import NAMES

# How far a weight held by a run may be from its origin, relative to the weight's rms. NF4 is off by
# 0.1, 8-bit integers by 0.01, a cast to bfloat16 by 0.002; other weights by more than 1.
ROUNDED = {"float": 0.01, "int8": 0.1, "nf4": 0.3}
OF_ADAPTER = ("a", "b", "magnitude")
FEW_BITS = tuple({name for names in NAMES.values() for name in names})


@dataclass(frozen=True)
class OfRun:
    """The weights of a run's checkpoint, and what its adapters are."""

    run: Path
    layers: Layers
    finetune: FinetuneConfig
    model: TransformerConfig

    def adapters(self, path: str) -> list[str]:
        """Returns the paths of the adapters of the weight at `path`."""
        return self._beside(path, OF_ADAPTER)

    def trains(self, path: str) -> bool:
        """Returns True if the run trains the weight at `path` itself."""
        finetune = self.finetune
        trained = any(fnmatchcase(path, pattern) for pattern in finetune.also_train)
        return trained or not finetune.has_adapters

    def held(self, path: str, layer: int | None, *, counts: bool) -> np.ndarray:
        """Returns the weight as the run holds it, dequantised if it is stored in few bits."""
        if path in self.layers.shapes:
            return self.layers.read(path, layer, counts=counts)
        parts = {
            one: self.layers.read(one, layer, counts=counts) for one in self._beside(path, FEW_BITS)
        }
        like = {one: self.layers.read(one, layer, counts=False) for one in self.adapters(path)}
        merged: Any = parts | like
        return np.asarray(wide(merged)[path])

    def _beside(self, path: str, names: Sequence[str]) -> list[str]:
        return [
            one
            for one in self.layers.shapes
            if one.startswith(f"{path}.") and one.rpartition(".")[2] in names
        ]

    def own_shapes(self) -> dict[str, Shape]:
        """Returns the shapes of the weights that the run holds in full, without adapters."""
        shapes = self.layers.shapes
        beside = {adapter for path in shapes for adapter in self.adapters(path)}
        return {path: shape for path, shape in shapes.items() if path not in beside}


class MergedLayers:
    """The weights of `first` with its adapters merged, then those of `others`, in float32.

    `shapes` are those of the plain model's weights. The frozen ones come from `base`, or from the
    run without a base.
    """

    def __init__(
        self,
        first: OfRun,
        others: Sequence[OfRun],
        shapes: Mapping[str, Shape],
        base: Weights | None = None,
    ):
        self.shapes = shapes
        self._runs = (first, *others)
        self._base = base
        self.merged = sum(len(run.adapters(path)) for path in shapes for run in self._runs)

    def read(self, path: str, layer: int | None, *, counts: bool = True) -> np.ndarray:
        """Returns a weight, or one layer of it. See `Layers.read` for `counts`."""
        first, *others = self._runs
        value = first.held(path, layer, counts=counts)
        if self._base is not None and not first.trains(path):
            index = tuple(slice(0, size) for size in value.shape)
            original = self._base.read(path, layer, index)
            self._check_same(original, value, path, first, str(self._base.folder))
            value = original
        for other in others:
            if other.adapters(path):
                theirs = other.held(path, layer, counts=counts)
                self._check_same(value, theirs, path, other, str(first.run))
        for run in self._runs:
            arrays = {one: run.layers.read(one, layer, counts=counts) for one in run.adapters(path)}
            # Adapters are merged into the original weights, not into the quantised ones.
            plain = run.finetune.model_copy(update={"base": "float"})
            value = merged({path: value, **arrays}, plain, run.model)[path]
        return value

    def verify(self) -> None:
        """Raises DamagedError if what the processes have read together is not what was saved."""
        for run in self._runs:
            run.layers.verify()

    def _check_same(
        self, ours: np.ndarray, theirs: np.ndarray, path: str, run: OfRun, named: str
    ) -> None:
        """Refuses to merge adapters with weights that they were not trained on."""
        one, other = ours.astype(np.float32), theirs.astype(np.float32)
        largest = ROUNDED[run.finetune.base] if path not in run.layers.shapes else ROUNDED["float"]
        if np.mean((one - other) ** 2) > largest**2 * np.mean(one**2):
            raise CheckpointError(
                f"the adapters of {run.run} belong to another model than {named}: {path} differs",
                fix="the one in train.init_from of that run",
            )


class MeanOfSteps:
    """The mean of the merged weights of several steps, in float32.

    Adapters are merged first: the product of two means is not the mean of the products. Integers
    are those of the first step.
    """

    def __init__(self, steps: Sequence[MergedLayers]):
        self.shapes = steps[0].shapes
        self.merged = steps[0].merged
        self._steps = steps

    def read(self, path: str, layer: int | None, *, counts: bool = True) -> np.ndarray:
        """Returns the mean of what `MergedLayers.read` returns for each step."""
        first, *others = (step.read(path, layer, counts=counts) for step in self._steps)
        if np.issubdtype(first.dtype, np.integer):
            return first
        total = sum((x.astype(np.float64) for x in others), first.astype(np.float64))
        return (total / len(self._steps)).astype(np.float32)

    def verify(self) -> None:
        """Raises DamagedError if what the processes have read together is not what was saved."""
        for step in self._steps:
            step.verify()


def check_merge(runs: Mapping[Path, FinetuneConfig], base: str | Path | None) -> None:
    """Refuses runs that cannot be merged. The first is exported, the others give their adapters."""
    (run, finetune), *others = runs.items()
    if base is None:
        check_merges(finetune)
    elif not finetune.has_adapters:
        raise ConfigError(f"{run} has no adapters that --base {base} could take", fix="no --base")
    if not others:
        return
    for other, settings in runs.items():
        if other != run and not settings.has_adapters:
            raise ConfigError(f"{other} has no adapters that could be merged", fix="no --with")
        if settings.kind == "dora":
            raise ConfigError(
                f"{other} has adapters of finetune.kind='dora', which cannot be added to others",
                fix="an export of each run",
            )
        if other != run and settings.also_train:
            raise ConfigError(
                f"{other} also trains whole weights, which cannot be added to those of {run}",
                found=f"finetune.also_train={list(settings.also_train)}",
                fix="it as RUN, and the others --with",
            )


def weights_of_base(
    base: str | Path, family: str, model: TransformerConfig, shapes: Mapping[str, Shape]
) -> Weights:
    """Opens the published weights that adapters are merged with.

    `shapes` are those of one layer if there are several. Raises CheckpointError if the published
    shapes differ.
    """
    published = read_published(Path(base))
    if published.family != family:
        raise ConfigError(
            f"--base {base} belongs to another family",
            asked=family,
            found=published.family,
            fix="the folder that train.init_from of the run names",
        )
    return Weights(published, model, shapes)
