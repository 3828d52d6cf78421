"""Finds where the tokens and experts of a layer are on a mesh, and what is summed over which axes.

b: sequences, t: tokens, e: width of the stream, x: experts, u, f: as in expert_weights.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import axes_of
from spmdtrain.parallel.axes import STREAM, Rules, axes_of_dim
from spmdtrain.parallel.experts.expert_weights import Activation, ExpertWeights
from spmdtrain.parallel.experts.rounds import Exchange
from spmdtrain.parallel.reduce import psum_tree, scatter_sum

WHOLE = P(None, None, None)


@dataclass(frozen=True)
class WeightPlace:
    """The place of a weight inside the region.

    is_copied: it has a leading dim for its copies, one on each device.
    is_added_once: of the devices that sum their results, only the first adds it.

    summed: the axes over which its gradient is summed.
    """

    spec: P
    is_copied: bool
    is_added_once: bool
    summed: tuple[str, ...]


@dataclass(frozen=True)
class Places:
    """The places of all arrays, in a region that is manual over all axes of the exchange.

    Axes over which the surrounding region is manual appear only in `exchange`.

    stream: the spec of x [b, t, e], and of y.
    tokens: the spec of x inside the region.
    results: the spec of y as it leaves the region.
    ffn: the axes that split the width of every expert: results are summed over them.
    scattered: those of them that split the tokens of `results`, major first.
    sliced: the axes of the exchange along which devices hold the same tokens, and each one takes
    its slice; `slices` is the number of devices along them.
    weights: the place of each weight, or None if there is no such weight.
    """

    exchange: Exchange
    stream: P = WHOLE
    tokens: P = WHOLE
    results: P = WHOLE
    ffn: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    sliced: tuple[str, ...] = ()
    slices: int = 1
    weights: tuple[WeightPlace | None, ...] = (None,) * len(ExpertWeights._fields)

    @property
    def weight_specs(self) -> ExpertWeights:
        """The spec of each weight."""
        specs: Any = [place and place.spec for place in self.weights]
        return ExpertWeights(*specs)

    def own_tokens(self, x_bte: jax.Array, padding: int = 0) -> jax.Array:
        """Returns the device's slice of the tokens [n, e], filled up with `padding`."""
        x_ne = x_bte.reshape(-1, x_bte.shape[-1])
        if not self.sliced:
            return x_ne
        size = -(-x_ne.shape[0] // self.slices)
        missing = size * self.slices - x_ne.shape[0]
        x_ne = jnp.pad(x_ne, ((0, missing), (0, 0)), constant_values=padding)
        at = jax.lax.axis_index(self.sliced) * size
        return jax.lax.dynamic_slice_in_dim(x_ne, at, size)

    def join_tokens(self, x_ne: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Reverses `own_tokens`, for an x of this shape [b, t, e]."""
        if self.sliced:
            x_ne = jax.lax.all_gather(x_ne, self.sliced, axis=0, tiled=True)
        return x_ne[: math.prod(shape[:-1])].reshape(shape)

    def sum_results(self, y_bte: jax.Array) -> jax.Array:
        """Returns y, or the gradient of x, summed over the parts of the experts' width."""
        if self.scattered:
            y_bte = scatter_sum(y_bte, self.scattered, 1)
        return psum_tree(y_bte, [axis for axis in self.ffn if axis not in self.scattered])

    def sum_gates(self, dgates_btk: jax.Array) -> jax.Array:
        """Returns the gradient of the gates, summed over the parts of the experts' width."""
        return psum_tree(dgates_btk, self.ffn)

    def own_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Returns the weights that the device multiplies by."""

        def own(weight: jax.Array | None, place: WeightPlace | None) -> jax.Array | None:
            if weight is None or place is None:
                return weight
            if place.is_added_once:
                weight = self._once(weight)
            return weight[0] if place.is_copied else weight

        own_parts: Any = map(own, weights, self.weights)
        return ExpertWeights(*own_parts)

    def sum_weights(self, dweights: ExpertWeights, weights: ExpertWeights) -> ExpertWeights:
        """Returns the gradients of `weights`, given those of `own_weights`."""

        def summed(
            dweight: jax.Array | None, weight: jax.Array | None, place: WeightPlace | None
        ) -> jax.Array | None:
            if dweight is None or weight is None:
                return None
            if place is None:
                return dweight.astype(weight.dtype)
            if place.is_added_once:
                dweight = self._once(dweight)
            if place.summed:
                wide: Any = psum_tree(dweight.astype(jnp.float32), place.summed)
                dweight = wide
            return jnp.asarray(dweight, weight.dtype).reshape(weight.shape)

        gradients: Any = map(summed, dweights, weights, self.weights)
        return ExpertWeights(*gradients)

    def _once(self, bias: jax.Array) -> jax.Array:
        return jnp.where(jax.lax.axis_index(self.ffn) == 0, bias, 0)


def on_one_device(factor: float, activation: Activation) -> Places:
    return Places(Exchange((), 1, factor, activation))


def find_places(
    rules: Rules,
    manual: Sequence[str],
    shape: tuple[int, ...],
    weights: ExpertWeights,
    of_one: Exchange,
) -> Places:
    """Returns the places for a layer whose x has this shape, in a region that is manual over
    `manual`.
    """

    def in_use(axes: Sequence[str]) -> list[str]:
        return [axis for axis in axes if rules.sizes[axis] > 1]

    # A region splits what the surrounding one has left whole: manual axes are major.
    over = sorted(in_use(rules.axes_of_experts), key=lambda axis: axis not in manual)
    automatic = tuple(axis for axis in over if axis not in manual)
    ffn = [axis for axis in in_use(rules.parameters["ffn"]) if axis not in (*over, *manual)]
    stream = rules.activation_spec(STREAM, shape, drop=manual)
    time = axes_of_dim(stream[1])
    whole = tuple(axis for axis in time if axis not in ffn)
    scattered = time[len(whole) :] if time[: len(whole)] == whole else ()
    tokens = P(stream[0], whole or None, None)
    sliced = tuple(axis for axis in automatic if axis not in axes_of(tokens))
    places = Places(
        exchange=replace(
            of_one, axes=tuple(over), devices=math.prod(rules.sizes[axis] for axis in over)
        ),
        stream=stream,
        tokens=tokens,
        results=stream if scattered else tokens,
        ffn=tuple(ffn),
        scattered=scattered,
        sliced=sliced,
        slices=math.prod(rules.sizes[axis] for axis in sliced),
    )
    (over_time,) = rules.activation_spec(("time",), (0,), drop=manual)
    of_weights = _weight_places(weights, shape[-1], places, automatic, axes_of_dim(over_time))
    return replace(places, weights=of_weights)


def _weight_places(
    weights: ExpertWeights,
    width: int,
    places: Places,
    experts: tuple[str, ...],
    copies: tuple[str, ...],
) -> tuple[WeightPlace | None, ...]:
    """Returns the place of each weight, given the axes `experts` that split experts."""
    is_gated = weights.up.shape[-2] != width
    x, f = experts or None, places.ffn or None
    u = (None, f) if is_gated else (f,)
    fields: Any = P(x, None, *u), P(x, f, None), P(x, *u), P(x, None)
    specs = ExpertWeights(*fields)
    shared = axes_of(places.tokens) - set(experts)

    def of_weight(name: str) -> WeightPlace | None:
        weight, spec = getattr(weights, name), getattr(specs, name)
        if weight is None:
            return None
        is_copied = weight.ndim > len(spec)
        is_added_once = name == "down_bias" and bool(places.ffn)
        summed = shared - set(copies) if is_copied else shared
        return WeightPlace(
            spec=P(copies, *spec) if is_copied else spec,
            is_copied=is_copied,
            is_added_once=is_added_once,
            summed=(*sorted(summed), *(places.ffn if is_added_once else ())),
        )

    return tuple(map(of_weight, ExpertWeights._fields))
