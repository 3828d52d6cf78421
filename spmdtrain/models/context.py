"""Gives a layer its inputs besides activations: positions, segments, noise, and the sharding of
activations.

One `ForwardContext` accompanies a microbatch through the model. It is an argument, not ambient
state: a layer without one cannot silently run unsharded. It is a pytree of its arrays.

b: sequences, t: tokens of a sequence.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.models.projection import Product, Weight, multiply
from spmdtrain.models.scaled import scaled
from spmdtrain.parallel.tensor_matmul import (
    Names,
    TensorMatmul,
    make_column_parallel,
    make_row_parallel,
    no_ring,
)

if TYPE_CHECKING:
    from spmdtrain.parallel.context.context_method import ContextMethod
    from spmdtrain.parallel.experts import Experts
    from spmdtrain.parallel.experts.expert_weights import Activation, ExpertWeights


def _unsplit(x: jax.Array, *_: str | None) -> jax.Array:
    return x


def _experts_of_one_device(
    x_bte: jax.Array,
    gates_btk: jax.Array,
    ids_btk: jax.Array,
    weights: "ExpertWeights",
    *,
    activation: "Activation",
) -> jax.Array:
    from spmdtrain.parallel.experts import make_experts

    return make_experts()(x_bte, gates_btk, ids_btk, weights, activation=activation)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions_bt", "segment_ids_bt", "mask_bt", "ids_bt", "noise_b", "layer", "read"],
    meta_fields=[
        "constrain",
        "local_map",
        "lookup",
        "gather_layer",
        "remat",
        "scan_layers",
        "column_matmul",
        "row_matmul",
        "experts",
        "sum_over_batch",
        "dropout_rate",
        "context_method",
        "frozen_layers",
        "around_layer",
    ],
)
@dataclass(frozen=True)
class ForwardContext:
    """The context of a layer. Defaults are those of one device: no splits, no dropout."""

    # The position of each token inside its document; int32.
    positions_bt: jax.Array
    # Tokens attend only within equal ids; int32. None: one document.
    segment_ids_bt: jax.Array | None = None
    # 1 for the tokens that have a loss, else 0; float32. None: all have one.
    mask_bt: jax.Array | None = None
    # The ids of tokens, int32, of a model whose layers read them (model.token_layers); else None.
    ids_bt: jax.Array | None = None
    # constrain(x, *logical axes): a sharding constraint, by the activation table.
    constrain: Callable[..., jax.Array] = _unsplit
    # A kernel on each device's own part; see parallel.regions.make_local_map.
    local_map: Callable[..., Any] = lambda function, arrays, *_: function(*arrays)
    # Rows of a table whose vocabulary may be split.
    lookup: Callable[[jax.Array, jax.Array], jax.Array] = lambda table, ids: table[ids]
    # A layer's weights, whole over fsdp.
    gather_layer: Callable[[nnx.State], nnx.State] = lambda state: state
    # The part of the forward that backward recomputes; see stack.rematerialised.
    remat: Literal["none", "weights", "dots", "full", "offload"] = "none"
    # Whether a stack runs its layers as one loop, instead of writing each out.
    scan_layers: bool = True
    # (x [b, t, e], array [e, *f], logical axes of f) -> [b, t, *f]: from the residual stream.
    column_matmul: TensorMatmul = make_column_parallel(_unsplit, no_ring)
    # (h [b, t, *f], array [*f, e], logical axes of f) -> [b, t, e]: back to it.
    row_matmul: TensorMatmul = make_row_parallel(_unsplit, no_ring)
    # (x [b, t, e], gates [b, t, k], ids [b, t, k], weights, activation=) -> [b, t, e]: the experts
    # that each token has chosen, times their gates; see parallel.experts.
    experts: "Experts" = _experts_of_one_device
    # The sums of arrays over all devices among which the batch is split; without a gradient.
    sum_over_batch: Callable[[Any], Any] = lambda tree: tree
    dropout_rate: float = 0.0
    # A random key per sequence; None: no dropout (evaluation).
    noise_b: jax.Array | None = None
    # How attention reaches the keys of other devices, and the order of tokens that this needs.
    # None: a device has whole sequences.
    context_method: "ContextMethod | None" = None
    # Layers of the stack, from the first on, whose weights and input have no gradient.
    frozen_layers: int = 0
    # The number of the layer in the model, 0 for the first; traced in scans. None: outside them.
    layer: jax.Array | int | None = None
    # Arrays that parts of the step read beside the weights, by the name of the part.
    read: Mapping[str, Any] = field(default_factory=dict)
    # Runs a layer: see AroundLayer. None: it is run as it is.
    around_layer: "AroundLayer | None" = None

    def column_parallel(self, x: jax.Array, weight: Weight | jax.Array, names: Names) -> jax.Array:
        """Returns x [b, t, e] of the residual stream times a weight [e, *f]: [b, t, *f].

        `names` are the logical axes of f. The weight's type multiplies: see projection.py.
        """
        return multiply(weight, Product(self.column_matmul, names, True, self.dropout), x)

    def row_parallel(self, h: jax.Array, weight: Weight | jax.Array, names: Names) -> jax.Array:
        """Returns h [b, t, *f] times a weight [*f, e], back to the residual stream: [b, t, e]."""
        return multiply(weight, Product(self.row_matmul, names, False, self.dropout), h)

    def at_layer(self, number: jax.Array | int, count: int = 1) -> "ForwardContext":
        """Returns the context of layer `number`, with its own noise.

        Inside a layer that is a round of `count` layers, `number` is the place in the round.
        """
        layer = number if self.layer is None else self.layer * count + number
        noise_b = None if self.noise_b is None else _fold_in(self.noise_b, number)
        return replace(self, layer=layer, noise_b=noise_b)

    def with_noise_of(self, number: int) -> "ForwardContext":
        """Returns the context with the noise of layer `number`, for layers outside a stack."""
        return replace(self, noise_b=self.at_layer(number).noise_b)

    def dropout(self, x: jax.Array, site: int, rate: float | None = None) -> jax.Array:
        """Applies dropout to x [b, t, ...]; `site` distinguishes places within a layer.

        `rate`: default `dropout_rate`.

        Noise depends only on (seed, step, global sample index, layer, site), not on mesh or
        accumulation.
        """
        rate = self.dropout_rate if rate is None else rate
        if self.noise_b is None or not rate:
            return x
        keep_rate = 1 - rate
        keys = _fold_in(self.noise_b, site)
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, keep_rate, x.shape[1:]))(keys)
        return jnp.where(self.as_tokens(keep), scaled(x, 1 / keep_rate), 0)

    @property
    def zigzag(self) -> int:
        """The number of devices for which tokens are in zigzag order; 1: they keep theirs."""
        return self.context_method.zigzag if self.context_method else 1

    def as_tokens(self, x_bt: jax.Array) -> jax.Array:
        """Returns x [b, t, ...], given in the order of the sequence, in the order of the tokens."""
        if self.context_method is None:
            return x_bt
        order = self.context_method.token_order(x_bt.shape[1])
        return x_bt if order is None else x_bt[:, order]

    def jitter(self, x: jax.Array, site: int, share: float) -> jax.Array:
        """Multiplies x [b, t, ...] by uniform noise between 1 - share and 1 + share.

        Noise depends on the same things as that of `dropout`.
        """
        if self.noise_b is None or not share:
            return x
        keys = _fold_in(self.noise_b, site)
        draw = partial(jax.random.uniform, shape=x.shape[1:], minval=1 - share, maxval=1 + share)
        return x * self.as_tokens(jax.vmap(draw)(keys)).astype(x.dtype)


# around_layer(run, x, ctx) -> what `run(x)` returns: x after a layer, and its side losses.
AroundLayer = Callable[
    [Callable[[jax.Array], tuple[jax.Array, dict[str, jax.Array]]], jax.Array, ForwardContext],
    tuple[jax.Array, dict[str, jax.Array]],
]


def _fold_in(keys_b: jax.Array, number: jax.Array | int) -> jax.Array:
    return jax.vmap(jax.random.fold_in, (0, None))(keys_b, number)


# A purpose is identified by its position: append new ones, or old runs would draw other numbers.
Purpose = Literal["init", "noise", "corruption", "rounding", "part"]


def random_key(seed: int, purpose: Purpose) -> jax.Array:
    """Returns the key of one purpose: initial values and noise share a seed, but never a key."""
    return jax.random.fold_in(jax.random.key(seed), get_args(Purpose).index(purpose))


def part_key(seed: int, name: str, step: jax.Array) -> jax.Array:
    """Returns the key of a step from which the part of this name draws, whatever other parts do."""
    key = jax.random.fold_in(random_key(seed, "part"), zlib.crc32(name.encode()) >> 1)
    return jax.random.fold_in(key, step)


def sample_noise(seed: int, step: jax.Array, sample_b: jax.Array) -> jax.Array:
    """Returns a random key per sample, from (seed, step, global sample index).

    sample_b: uint32 [b].
    """
    key = jax.random.fold_in(random_key(seed, "noise"), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, sample_b)


def sample_corruption(seed: int, sample_b: jax.Array) -> jax.Array:
    """Returns a random key per sample, from (seed, global sample index). sample_b: uint32 [b].

    A sample that is evaluated again is corrupted in the same way.
    """
    key = random_key(seed, "corruption")
    return jax.vmap(jax.random.fold_in, (None, 0))(key, sample_b)
