"""Sums accumulated gradients over the mesh once a step, and divides them."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spmdtrain.compiled.step_parts import part
from spmdtrain.parallel.axes import drop_axes
from spmdtrain.parallel.reduce import reduce_gradients
from spmdtrain.parallel.regions import MANUAL_AXES
from spmdtrain.train.setup import Setup


class OverData(NamedTuple):
    """A sum over `data` in place of the plain one, for the gradients at some paths.

    `sums(own)` returns the sums of what each shard has, by path, and new values of items, by name.
    """

    paths: Collection[str]
    sums: Callable[[dict[str, jax.Array]], tuple[dict[str, jax.Array], dict[str, Any]]]


def summing_wide(setup: Setup, local: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `local` with its long sums of 16-bit floats taken in float32, if it has any."""
    compute = setup.config.precision.compute
    if compute == "float32":
        return local
    from spmdtrain.parallel.wide_sums import with_wide_sums

    return with_wide_sums(local, compute, setup.platform)


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
    over_data: OverData | None = None,
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Returns (accumulated gradients, reduced over the manual axes and divided; new items by name).

    They are divided by the number of `tokens` (unmasked, of the whole batch), and by the cotangent
    of the objective, if it was not 1. `over_data`: None sums all of them in full.
    """
    apart = over_data.paths if over_data else ()
    reduced = _reduce(setup, gradients, apart)
    count = jnp.maximum(tokens, 1)
    if cotangent is not None:
        count = count * cotangent
    means = {path: x / count for path, x in reduced.items()}
    made = {}
    if over_data:
        # Divided first: what is kept must not depend on the tokens and the loss scale of a step.
        summed, made = over_data.sums({path: means[path] for path in apart})
        means |= summed
    return {path: x.astype(gradients[path].dtype) for path, x in means.items()}, made


def _reduce(
    setup: Setup, gradients: dict[str, jax.Array], but_for_data: Collection[str]
) -> dict[str, jax.Array]:
    """Returns accumulated gradients summed over all devices that share a weight.

    They are scattered if it rests split. Copies are summed last, when their slices are small. The
    gradients at the paths `but_for_data` are not summed over `data`.
    """
    padded, reductions, automatic = {}, {}, {}
    for path, gradient in gradients.items():
        copies = setup.copies[path]
        padded[path] = copies.map(partial(setup.padding.use_to_rest, path), gradient)
        reduction = setup.reductions[path]
        if path in but_for_data:
            others = tuple(axis for axis in reduction.sum if axis != "data")
            reduction = replace(reduction, sum=others)
        reductions[path] = copies.reduction(reduction)
        automatic[path] = drop_axes(MANUAL_AXES, copies.spec(setup.specs[path]))
    reduced = reduce_gradients(padded, reductions, automatic)
    return {path: setup.copies[path].sum(x, setup.specs[path]) for path, x in reduced.items()}
