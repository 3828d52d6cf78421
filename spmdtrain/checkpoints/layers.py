"""Reads the weights of a checkpoint one layer at a time, for models that do not fit in memory.

Several processes may each read some of the layers; together they verify everything that was read.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorstore import open as open_array

from spmdtrain.checkpoints.leaves.fingerprint import Fingerprint, added, host_fingerprint
from spmdtrain.checkpoints.leaves.relayout import cut_to
from spmdtrain.checkpoints.meta import Meta, prefix, unpadded_leaves
from spmdtrain.checkpoints.saved_steps import SavedSteps
from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.config.run_files import steps_in
from spmdtrain.config.schema import IN_STACK
from spmdtrain.pipeline.stage_layout import StageLayout
from spmdtrain.processes.processes import gather_texts

Place = tuple[int, ...]  # of a layer, in the leading dims of a stack


class Layers:
    """The weights of the checkpoint of `step`; with `ema` the averages of those that have one.

    `shapes` are those of whole parameters by path, with layers in order. All processes must create
    it together, and raise DamagedError together.
    """

    def __init__(self, checkpoints: SavedSteps, step: int, *, ema: bool = False):
        self.shapes = checkpoints.weight_shapes(step)
        self._checkpoints = checkpoints
        self._step = step
        self._averaged = checkpoints.averaged(step) if ema else set()
        self._meta: Meta = checkpoints.meta(step)
        self._unpadded = unpadded_leaves(self._meta)
        self._layout = StageLayout(**self._meta["layout"])
        items = ["params", "ema"] if ema else ["params"]
        self._arrays = {item: checkpoints.arrays_of(step, item) for item in items}
        self._sums: dict[str, list[Fingerprint]] = {}
        self._held: tuple[str, Place, np.ndarray] | None = None

    def is_stacked(self, path: str) -> bool:
        """Returns True if the parameter is a stack of layers."""
        shape = self._meta["leaves"][self._name(path)][0]
        of_stack = self._layout.shape
        return path.startswith(IN_STACK) and tuple(shape[: len(of_stack)]) == of_stack

    def read(self, path: str, layer: int | None, *, counts: bool = True) -> np.ndarray:
        """Returns one layer of a parameter, or a parameter without layers, in its saved dtype.

        With `counts`, `verify` will check it: each layer must count exactly once among all
        processes.
        """
        name = self._name(path)
        try:
            if layer is None:
                x, first = self._opened(path)[...].read().result(), 0
            else:
                x, first = self._layer(path, layer), layer
        except (OSError, ValueError, KeyError) as error:  # tensorstore raises only these
            cause = " ".join(str(error).split())[:200]
            raise self._checkpoints.damaged(self._step, f"it cannot be read: {cause}") from error
        if counts:
            sums = self._sums.setdefault(name, [])
            sums.append(host_fingerprint(x, first * x.size))
            if layer is not None and layer == self._layout.layers - 1:
                sums += self._of_padding(path)
        shape = self._unpadded[name][0]
        return cut_to(x, shape if layer is None else shape[len(self._layout.shape) :])

    def _of_padding(self, path: str) -> list[Fingerprint]:
        """Returns the fingerprints of a stack's padding, after its last layer."""
        places = range(self._layout.layers, self._layout.places)
        layers = ((place, self._layer(path, place)) for place in places)
        return [host_fingerprint(x, place * x.size) for place, x in layers]

    def verify(self) -> None:
        """Raises DamagedError if the arrays that all processes have read are not those saved."""
        mine = {name: added(sums) for name, sums in self._sums.items()}
        total: dict[str, list[Fingerprint]] = {}
        for text in gather_texts(json.dumps(mine)):
            for name, sums in json.loads(text).items():
                total.setdefault(name, []).append(sums)
        self._checkpoints.verify(self._step, {name: added(sums) for name, sums in total.items()})
        self._sums = {}

    def _item(self, path: str) -> str:
        return "ema" if path in self._averaged else "params"

    def _name(self, path: str) -> str:
        return prefix(self._item(path)) + path

    def _opened(self, path: str) -> Any:
        folder, _ = self._arrays[self._item(path)]
        return _open(folder, path)

    def _layer(self, path: str, layer: int) -> np.ndarray:
        """Returns the layer at a place of the stack. The whole chunk that holds it is read."""
        stack = self._layout.shape
        place = tuple(map(int, np.unravel_index(layer, stack)))
        chunk = self._chunk(path)[: len(stack)]
        begin = tuple(at - at % size for at, size in zip(place, chunk, strict=True))
        if self._held is None or self._held[:2] != (path, begin):
            self._held = None  # its memory is needed for the next
            block = self._opened(path)[
                tuple(
                    slice(first, min(first + size, whole))
                    for first, size, whole in zip(begin, chunk, stack, strict=True)
                )
            ]
            self._held = path, begin, block.read().result()
        within = tuple(at - first for at, first in zip(place, begin, strict=True))
        return self._held[2][within]

    def _chunk(self, path: str) -> Place:
        """Returns the shape of an array's chunks."""
        _, described = self._arrays[self._item(path)]
        array = described[path]
        return tuple(array.storage.chunk_shape if array.storage else array.shape)


def check_average(run: Path, step: int | None, average: Sequence[int]) -> None:
    """Raises UserError if the checkpoints after these steps cannot be averaged."""
    if not average:
        return
    listed = " ".join(map(str, average))
    if step is not None:
        raise ConfigError(
            f"--step {step} names one checkpoint, --average several", fix="one of them"
        )
    if len(set(average)) < max(len(average), 2):
        raise ConfigError(f"--average {listed} has fewer than two different steps", fix="two steps")
    saved = steps_in(run)
    lacking = [number for number in average if number not in saved]
    if lacking:
        listed_saved = ", ".join(map(str, saved)) or "none"
        raise CheckpointError(f"{run} holds no checkpoint of step {lacking[0]}", found=listed_saved)


def _open(folder: Path, path: str) -> Any:
    """Opens an array that Orbax has written."""
    base = {"driver": "file", "path": f"{folder}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
    return open_array({"driver": "zarr", "kvstore": kvstore}, read=True).result()
