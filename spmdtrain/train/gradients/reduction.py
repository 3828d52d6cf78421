"""Sums accumulated gradients over the mesh once a step, and divides them."""

from functools import partial

import jax
import jax.numpy as jnp

from spmdtrain.compiled.parts import part
from spmdtrain.parallel.reduce import reduce_gradients
from spmdtrain.parallel.regions import MANUAL_AXES
from spmdtrain.parallel.specs import drop_axes
from spmdtrain.train.setup import Setup


def add_copies(setup: Setup, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the parameters inside the manual region, with the weights of matmuls as copies."""
    return {path: setup.copies[path].add(x, setup.specs[path]) for path, x in params.items()}


def zero_gradients(setup: Setup, weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns zeros in which to accumulate the gradients of `add_copies`' weights.

    They are made inside the manual region.
    """

    def zeros(path: str, x: jax.Array) -> jax.Array:
        dtype = setup.model.dtype(path, setup.config.precision.accumulate)
        spec = drop_axes(MANUAL_AXES, setup.copies[path].spec(setup.specs[path]))
        return jax.lax.with_sharding_constraint(jnp.zeros(x.shape, dtype), spec)

    return {path: zeros(path, x) for path, x in weights.items()}


@part("reduction")
def mean_gradients(
    setup: Setup,
    gradients: dict[str, jax.Array],
    tokens: jax.Array,
    cotangent: jax.Array | None,
) -> dict[str, jax.Array]:
    """Returns accumulated gradients, reduced over the manual axes and divided.

    They are divided by the number of `tokens` (unmasked, of the whole batch), and by the cotangent
    of the objective, if it was not 1.
    """
    reduced = _reduce(setup, gradients)
    count = jnp.maximum(tokens, 1)
    if cotangent is not None:
        count = count * cotangent
    return {path: (gradient / count).astype(gradient.dtype) for path, gradient in reduced.items()}


def _reduce(setup: Setup, gradients: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns accumulated gradients summed over all devices that share a weight.

    They are scattered if it rests split. Copies are summed last, when their slices are small.
    """
    padded, reductions, automatic = {}, {}, {}
    for path, gradient in gradients.items():
        copies = setup.copies[path]
        padded[path] = copies.each(partial(setup.padding.use_to_rest, path), gradient)
        reductions[path] = copies.reduction(setup.reductions[path])
        automatic[path] = drop_axes(MANUAL_AXES, copies.spec(setup.specs[path]))
    reduced = reduce_gradients(padded, reductions, automatic)
    return {path: setup.copies[path].sum(x, setup.specs[path]) for path, x in reduced.items()}
