"""Decides how weights and gradients cross the mesh in a step, for each parameter by dotted path.

`by_layers` are the axes over which layers gather a weight for their own use, as they do without a
pipeline. Layers that gather also scatter the gradients, in each microbatch.
"""

import math
from collections.abc import Mapping

from jax.sharding import Mesh

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.parallel.axes import Rules, owning_axes
from spmdtrain.parallel.copies import Copies, copies_of
from spmdtrain.parallel.feedback.largest import Largest
from spmdtrain.parallel.feedback.low_rank import LowRank, pays
from spmdtrain.parallel.feedback.sums import FeedbackCodec
from spmdtrain.parallel.gather import gathered_axes
from spmdtrain.parallel.reduce import Reduction, codec_of, reduction
from spmdtrain.parallel.regions import MANUAL_AXES
from spmdtrain.train.items.item import Specs
from spmdtrain.train.updates.kinds import is_matrix, stream_dim

Gathered = Mapping[str, tuple[str, ...]]  # mesh axes, by dotted parameter path


def gathered_weights(model: AbstractModel, specs: Specs) -> Gathered:
    """Returns the axes over which each weight is gathered before it is used."""
    return {path: gathered_axes(spec, model.parameters[path].axes) for path, spec in specs.items()}


def reductions_of(
    config: RunConfig, model: AbstractModel, mesh: Mesh, specs: Specs, by_layers: Gathered
) -> dict[str, Reduction]:
    """Returns how accumulated gradients are summed, over the axes that no layer has summed over."""
    reduced = [axis for axis in MANUAL_AXES if mesh.shape[axis] > 1]

    def reduction_of(path: str) -> Reduction:
        scattered = by_layers.get(path, ())
        axes = [axis for axis in reduced if axis not in scattered]
        parameter = model.parameters[path]
        shape = parameter.shape[parameter.apart :]
        codec = codec_of(config.compression, shape, mesh.shape["data"])
        return reduction(specs[path], axes, owning_axes(parameter.axes), codec)

    return {path: reduction_of(path) for path in specs}


def feedback_codecs(
    config: RunConfig, model: AbstractModel, sizes: Mapping[str, int]
) -> dict[str, FeedbackCodec]:
    """Returns how gradients of matrices cross `data`, by path, if what is not sent is kept.

    A matrix whose factors have more numbers than itself, and one that has not a number to send for
    each device, have no codec. Neither have others if the settings ask for none of these. Raises
    ConfigError if they do and no matrix can have one.
    """
    settings = config.compression
    if not settings.has_feedback or sizes["data"] == 1:
        return {}
    codecs: dict[str, FeedbackCodec] = {}
    for path, parameter in model.parameters.items():
        if not parameter.is_trained or not is_matrix(path, parameter):
            continue
        shape = parameter.shape[parameter.apart :]
        row = stream_dim(parameter)
        if settings.rank is not None and pays(shape, row, settings.rank):
            codecs[path] = LowRank(settings.rank, parameter.apart, row)
        if settings.keep is not None and math.prod(shape) * settings.keep >= sizes["data"]:
            codecs[path] = Largest(settings.keep)
    if codecs:
        return codecs
    if settings.rank is not None:
        what = f"compression.rank={settings.rank}: no matrix has more numbers than its two factors"
        raise ConfigError(what, fix="a lower compression.rank, or compression.codec=int8")
    what = f"compression.keep={settings.keep:g}: no matrix has a number to send for each of the "
    fix = "a larger compression.keep, or compression.codec=int8"
    raise ConfigError(f"{what}{sizes['data']} devices of mesh.data", fix=fix)


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
