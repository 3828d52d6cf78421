"""Decides how weights and gradients cross the mesh in a step, for each parameter by dotted path.

`by_layers` are the axes over which layers gather a weight for their own use, as they do without a
pipeline. Layers that gather also scatter the gradients, in each microbatch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import CompressionConfig, RunConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.parallel.axes import Rules, owning_axes
from spmdtrain.parallel.copies import Copies, copies_of
from spmdtrain.parallel.gather import gathered_axes
from spmdtrain.parallel.reduce import Reduction, reduction
from spmdtrain.parallel.regions import MANUAL_AXES
from spmdtrain.train.items.item import Specs

if TYPE_CHECKING:
    from spmdtrain.parallel.compress import Codec

Gathered = Mapping[str, tuple[str, ...]]  # mesh axes, by dotted parameter path


def gathered_weights(model: AbstractModel, specs: Specs) -> Gathered:
    """Returns the axes over which each weight is gathered before it is used."""
    return {path: gathered_axes(spec, model.parameters[path].axes) for path, spec in specs.items()}


def reductions_of(
    config: RunConfig, model: AbstractModel, mesh: Mesh, specs: Specs, by_layers: Gathered
) -> dict[str, Reduction]:
    """Returns how accumulated gradients are summed, over the axes that no layer has summed over.

    Raises ConfigError if `compression.within` does not divide `data`.
    """
    settings, shards = config.compression, mesh.shape["data"]
    _check_within(settings, shards)
    reduced = [axis for axis in MANUAL_AXES if mesh.shape[axis] > 1]

    def reduction_of(path: str) -> Reduction:
        scattered = by_layers.get(path, ())
        axes = [axis for axis in reduced if axis not in scattered]
        parameter = model.parameters[path]
        shape = parameter.shape[parameter.apart :]
        codec = _codec_of(settings, shape, shards)
        owning = owning_axes(parameter.axes)
        return reduction(specs[path], axes, owning, codec, settings.within or 1)

    return {path: reduction_of(path) for path in specs}


def _codec_of(settings: CompressionConfig, shape: Sequence[int], shards: int) -> "Codec | None":
    if settings.codec == "none":
        return None
    from spmdtrain.parallel.compress import codec_of

    return codec_of(settings, shape, shards)


def _check_within(settings: CompressionConfig, shards: int) -> None:
    within = settings.within or 1
    if shards > 1 and shards % within:
        raise ConfigError(
            f"compression.within={within} does not divide the {shards} devices of mesh.data",
            fix=f"--set compression.within={math.gcd(within, shards)}",
        )


def copies_of_weights(
    model: AbstractModel, rules: Rules, specs: Specs, by_layers: Gathered
) -> dict[str, Copies]:
    """Returns the copies of the weights of matmuls, if several devices share one sequence.

    A weight that layers gather has none: its gradient is also scattered over the axes of the
    tokens.
    """

    def copies(path: str) -> Copies:
        parameter = model.parameters[path]
        if by_layers.get(path) or not parameter.is_of_matmuls:
            return Copies()
        return copies_of(rules, specs[path], parameter.stacked)

    return {path: copies(path) for path in specs}
