"""Defines the type of an adapted weight, and its parts.

One of our arrays may hold several linear layers of a published model, e.g. the projections to
queries, keys and values. Each of them is a *part*, with its own adapter.

i: the dims that a matmul contracts, o: its other ones, r: the rank.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config.schema import DeltaConfig, FinetuneConfig, TransformerConfig
from spmdtrain.models.adapters.quantised import QuantisedWeight, dequantised
from spmdtrain.models.projection import Product
from spmdtrain.models.scaled import scaled

SLOTS, CHANNELS = -2, -1  # the dims along which parts lie side by side: of slots, or the last

# The weights that are one linear layer, by their names.
WHOLE = {
    "up_ef": "up",
    "down_fe": "down",
    "out_kgde": "out",
    "out_hrve": "out",
    "out_ce": "out",
    # The projections of a mixer whose published model has one for all of them.
    "zxt_ehrn": "in",
    "kq_ehn": "in",
    "in_e3c": "in",
}
# The parts of the weights of `DeltaMixer`, by their names.
OF_DELTA = {"qkvz_ehn": ("q", "k", "v", "z"), "rates_ehn": ("rate", "decay")}


@dataclass(frozen=True)
class LinearPart:
    """A linear layer in a weight: its places [start, stop) along the dim `side`.

    `stop` is None if the weight is one linear layer.
    """

    name: str
    start: int = 0
    stop: int | None = None
    side: int = SLOTS

    def of(self, x: Any) -> Any:
        """Returns the places of this part in a weight [*i, *o], or in an array [..., *o]."""
        if self.stop is None:
            return x
        places = slice(self.start, self.stop)
        return x[..., places, :] if self.side == SLOTS else x[..., places]


def parts_of(path: str, shape: tuple[int, ...], model: TransformerConfig) -> tuple[LinearPart, ...]:
    """Returns the linear layers in the weight at a dotted path, of this shape.

    Names are those of the shipped block. A weight with another name is one linear layer, `adapter`.
    """
    name = path.rpartition(".")[2]
    if name in OF_DELTA and model.delta:
        return _side_by_side_parts(OF_DELTA[name], _widths_of_delta(name, model.delta), shape)
    if name in ("qkv_eknd", "qk_eknd", "q_eknd"):
        behind = name.partition("_")[0][1:]
        queries = shape[SLOTS] - len(behind)  # and the gates of their channels
        others = [LinearPart(part, at, at + 1) for at, part in enumerate(behind, queries)]
        return (LinearPart("q", 0, queries), *others)
    if name == "up_ef" and shape[SLOTS] == 2:
        return LinearPart("gate", 0, 1), LinearPart("up", 1, 2)
    return (LinearPart(WHOLE.get(name, "adapter")),)


def _widths_of_delta(name: str, delta: DeltaConfig) -> tuple[int, ...]:
    """Returns the channels of each part in a key head of a weight of `DeltaMixer`."""
    if name == "rates_ehn":
        return (delta.group,) * 2
    return *delta.mixed_widths, delta.mixed_widths[-1]


def _side_by_side_parts(
    names: Sequence[str], widths: Sequence[int], shape: tuple[int, ...]
) -> tuple[LinearPart, ...]:
    """Returns parts of these widths, of which a weight of this shape has as many as fit."""
    stops = list(itertools.accumulate(widths))
    places = zip(names, [0, *stops], stops, strict=False)
    return tuple(
        LinearPart(name, start, stop, CHANNELS)
        for name, start, stop in places
        if stop <= shape[CHANNELS]
    )


class Adapter(nnx.Module):
    """The adapter of one part: a [*i, r], b [r, *o], and for DoRA the magnitudes, flattened
    over o.
    """

    any_order = True

    def __init__(self, a: nnx.Param, b: nnx.Param, magnitude: nnx.Param | None):
        self.a = a
        self.b = b
        self.magnitude = magnitude


class AdaptedWeight(nnx.Module):
    """A frozen weight W with adapters: x W + s (x a) b (LoRA, arXiv:2106.09685).

    With magnitudes m (DoRA, arXiv:2402.09353) each output is multiplied by m / |W + s a b|, with
    the norm over i. As in section 4.3 of the paper, no gradient goes through the norm.
    """

    any_order = True

    def __init__(
        self, weight: Any, parts: tuple[LinearPart, ...], config: FinetuneConfig, site: int
    ):
        self.adapted_weight = weight  # see projection.WEIGHT
        self.parts = parts
        self.scale = config.scale
        self.dropout = config.dropout
        self.site = site

    def multiply(self, product: Product, x: jax.Array) -> jax.Array:
        y = self.adapted_weight.multiply(product, x)
        adapters = [getattr(self, part.name, None) for part in self.parts]
        # One matmul for all parts, which reads x once.
        a = jnp.concatenate([adapter.a[...] for adapter in adapters if adapter is not None], -1)
        low = product.to_rank(product.dropout(x, self.site, self.dropout), a)
        added = []
        factors = []
        for part, adapter in zip(self.parts, adapters, strict=True):
            of_part = part.of(y)
            if adapter is None:
                added.append(jnp.zeros_like(of_part))
                factors.append(jnp.ones(of_part.shape[2:], jnp.float32))
                continue
            b = adapter.b[...]
            added.append(jnp.tensordot(low[..., : len(b)], b, 1))
            low = low[..., len(b) :]
            if adapter.magnitude is not None:
                factors.append(self._factor(product, part, adapter))
        y = y + scaled(self._side_by_side(added), self.scale)
        has_magnitudes = len(factors) == len(added)
        if not has_magnitudes:
            return y
        # The gradient of the factors reads y, which would otherwise be kept in float32.
        return jax.checkpoint(scaled)(y, self._side_by_side(factors))

    def _side_by_side(self, parts: list[jax.Array]) -> jax.Array:
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, self.parts[0].side)

    def _wide(self, ins: int) -> jax.Array:
        weight = self.adapted_weight
        if isinstance(weight, QuantisedWeight):
            return dequantised(weight.arrays(), weight.kind, ins)
        return weight[...]

    def _factor(self, product: Product, part: LinearPart, adapter: Adapter) -> jax.Array:
        """Returns m / |W + s a b| of a part, float32 [*o]."""
        norm = partial(_norm, part=part, b=adapter.b[...], scale=self.scale)
        w = self._wide(product.contracted)
        a = adapter.a[...]
        # On a mesh with `context` either may come as copies, with one more dim.
        copies = [
            0 if x.ndim > dims else None
            for x, dims in ((w, len(product.names) + 1), (a, product.contracted + 1))
        ]
        if copies != [None, None]:
            raw_norms = jax.vmap(norm, copies)(w, a).max(0)  # all the same
        else:
            raw_norms = norm(w, a)
        assert adapter.magnitude is not None, "the caller has checked"
        # The padding layers of a pipeline have weights of zero.
        norms = jnp.maximum(jax.lax.stop_gradient(raw_norms), jnp.finfo(jnp.float32).tiny)
        return adapter.magnitude[...].astype(jnp.float32).reshape(norms.shape) / norms


def _norm(w: jax.Array, a: jax.Array, *, part: LinearPart, b: jax.Array, scale: float) -> jax.Array:
    """Returns |W + s a b| over i, float32 [*o], without a further array of W's size."""
    w = part.of(w)
    over = tuple(range(a.ndim - 1))
    wide = b.astype(jnp.float32)
    squares = jnp.sum(jnp.square(w.astype(jnp.float32)), over)
    crossed = jnp.sum(_contracted(a, w, over) * wide, 0)
    of_product = jnp.sum(jnp.tensordot(_contracted(a, a, over), wide, 1) * wide, 0)
    return jnp.sqrt(squares + 2 * scale * crossed + scale**2 * of_product)


def _contracted(a: jax.Array, w: jax.Array, over: tuple[int, ...]) -> jax.Array:
    """Returns the product of a and w over their first dims, float32.

    XLA's CPU backend makes a float32 product of 16-bit arrays only if both are matrices (jax 0.10
    and 0.12). On a GPU a reshaped weight might have to be gathered.
    """
    dot = partial(jnp.tensordot, preferred_element_type=jnp.float32)

    def as_matrices(a: jax.Array, w: jax.Array) -> jax.Array:
        inner = math.prod(a.shape[: len(over)])
        product = dot(a.reshape(inner, -1).T, w.reshape(inner, -1), 1)
        return product.reshape(*a.shape[len(over) :], *w.shape[len(over) :])

    def as_they_are(a: jax.Array, w: jax.Array) -> jax.Array:
        return dot(a, w, (over, over))

    return jax.lax.platform_dependent(a, w, cpu=as_matrices, default=as_they_are)
