"""Sums accumulated gradients over the mesh once a step, and divides them."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spmdtrain.compiled.step_parts import part
from spmdtrain.parallel.axes import drop_axes, keep_axes
from spmdtrain.parallel.feedback.feedback_sums import Feedback, feedback_sums
from spmdtrain.parallel.reduce import psum_tree, reduce_gradients
from spmdtrain.parallel.regions import MANUAL_AXES
from spmdtrain.train.items import feedback
from spmdtrain.train.setup import Setup


class Sending(NamedTuple):
    """The state from which a step compresses its gradients, and its 0-based number."""

    unsent: Feedback
    step: jax.Array


def sending_of(unsent: Feedback | None, step: jax.Array) -> Sending | None:
    """Returns what compresses the gradients of a step; None if nothing does."""
    return None if unsent is None else Sending(unsent, step)


def feedback_specs(setup: Setup, unsent: Feedback | None) -> Feedback | None:
    """Returns the specs of feedback at the border of the manual region; None if there is none."""
    if unsent is None:
        return None
    abstract = feedback.unsent(setup.state.items)
    return jax.tree.map(lambda x: keep_axes(MANUAL_AXES, x.sharding.spec), abstract)


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
    sending: Sending | None = None,
) -> tuple[dict[str, jax.Array], Feedback | None]:
    """Returns (accumulated gradients, reduced over the manual axes and divided; new feedback).

    They are divided by the number of `tokens` (unmasked, of the whole batch), and by the cotangent
    of the objective, if it was not 1. `sending`: None sums all of them in full.
    """
    coded = sending.unsent.errors if sending else {}
    reduced = _reduce(setup, gradients, coded)
    count = jnp.maximum(tokens, 1)
    if cotangent is not None:
        count = count * cotangent
    means = {path: x / count for path, x in reduced.items()}
    unsent = None
    if sending:
        # Divided first: what is kept must not depend on the tokens and the loss scale of a step.
        own = {path: means[path] for path in coded}
        summed, unsent = _over_data(setup, own, sending)
        means |= summed
    return {path: x.astype(gradients[path].dtype) for path, x in means.items()}, unsent


def _over_data(
    setup: Setup, own: dict[str, jax.Array], sending: Sending
) -> tuple[dict[str, jax.Array], Feedback]:
    """Returns the sums over `data` of what its shards have, by the codecs with feedback.

    The first steps, `compression.after`, sum in full.
    """

    def coded(own: dict[str, jax.Array], unsent: Feedback):
        codecs = {path: setup.codecs[path] for path in own}
        return feedback_sums(own, unsent, codecs, setup.specs, MANUAL_AXES)

    def full(own: dict[str, jax.Array], unsent: Feedback):
        return psum_tree(own, ("data",)), unsent

    after = setup.config.compression.after
    wide = {path: x.astype(jnp.float32) for path, x in own.items()}
    if not after:
        return coded(wide, sending.unsent)
    return jax.lax.cond(sending.step < after, full, coded, wide, sending.unsent)


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
