"""Runs a model up to its head, inside the region that is manual over the axes of the batch.

A weight sharded over such an axis (`fsdp`) is gathered by the layer that uses it.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import axes_of
from spmdtrain.models.abstract import Scaling, cast_floating
from spmdtrain.models.context import ForwardContext
from spmdtrain.parallel.axes import keep_axes
from spmdtrain.parallel.gather import gather_over
from spmdtrain.parallel.regions import MANUAL_AXES
from spmdtrain.train.batch import Batch
from spmdtrain.train.gradients.forward import gather_layer_of
from spmdtrain.train.gradients.reduction import add_copies
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses


def resting_specs_in(setup: Setup) -> dict[str, P]:
    """Returns the specs of weights and of their gradients at the border of the region."""
    return {path: keep_axes(MANUAL_AXES, spec) for path, spec in setup.specs.items()}


def in_use(setup: Setup, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the weights that a step begins with, from those at rest: copies where devices share a
    sequence.
    """
    return add_copies(setup, _over_data(setup, params))


def _over_data(setup: Setup, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Gathers over `data` the parameters that ZeRO-1 splits.

    This happens once a step, in compute precision.
    """
    if not setup.config.train.zero:
        return params

    def whole(path: str, x: jax.Array) -> jax.Array:
        spec = setup.specs[path]
        if "data" not in axes_of(spec):
            return x
        compute = setup.model.dtype(path, setup.config.precision.compute)
        in_compute = cast_floating(x, compute)
        gathered = gather_over(("data",), spec, in_compute)
        gathered = setup.padding.rest_to_use(path, gathered)
        # A gradient has the dtype of its parameter. One that a layer scatters is a sum over
        # devices, which must not be rounded to compute precision on its way back.
        return gathered.astype(x.dtype) if setup.gathered[path] else gathered

    return {path: whole(path, x) for path, x in params.items()}


def make_stream(setup: Setup) -> Callable[..., tuple[Any, jax.Array, Losses]]:
    """Returns `stream(params, microbatch, ctx, scaling) -> (module, x_bte, side losses)`, the model
    up to the head.

    `scaling`: as in `AbstractModel.bind`.
    """
    gather = gather_layer_of(setup)

    def stream(params, microbatch: Batch, ctx: ForwardContext, scaling: Scaling | None = None):
        here = {path: x for path, x in params.items() if not setup.gathered[path]}
        # A layer that gathers a weight also casts it.
        values = params | setup.model.cast(here, setup.config.precision.compute)
        module = setup.model.bind(values, gather, scaling)
        x_bte, side_losses = module.blocks(module.embed(microbatch["tokens"], ctx), ctx)
        return module, x_bte, side_losses

    return stream
