"""Quantises frozen weights, as weight types: to 8-bit integers by output, or to NF4 by blocks.

A weight is dequantised just before its matmul, and again in the backward pass, so only one layer's
weight is wide at a time. Scales are float32, kept as bits: no cast of a model's weights rounds
them.

i: the dims that a matmul contracts, o: its other ones; dims that stack layers come first.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spmdtrain.config.errors import ConfigError
from spmdtrain.models.buffer import Buffer
from spmdtrain.models.projection import Product

Kind = Literal["int8", "nf4"]
Arrays = Mapping[str, Any]
BLOCK = 64  # weights with one scale, along the last dim of i
GROUP = 256  # scales with one scale of their own, along the last dim of o

# NormalFloat4 (arXiv:2305.14314, appendix E): quantiles of the normal distribution, and 0.
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


class QuantisedWeight(nnx.Module):
    """A frozen, quantised weight [*i, *o]: the arrays of `quantised`, as buffers."""

    any_order = True

    def __init__(self, arrays: Mapping[str, nnx.Variable], kind: Kind):
        self.kind: Kind = kind
        for name, array in arrays.items():
            setattr(self, name, array)

    def multiply(self, product: Product, x: jax.Array) -> jax.Array:
        @partial(jax.checkpoint, prevent_cse=False)
        def run(x: jax.Array, arrays: Arrays) -> jax.Array:
            wide = dequantised(arrays, self.kind, product.contracted)
            return product(x, wide.astype(x.dtype))

        return run(x, self.arrays())

    def arrays(self) -> dict[str, jax.Array]:
        return {name: getattr(self, name)[...] for name in NAMES[self.kind]}


NAMES: Mapping[Kind, tuple[str, ...]] = {
    "int8": ("integers", "scales"),
    "nf4": ("codes", "scales", "group_scales"),
}


def quantised(w: jax.Array, kind: Kind, stacked: int, ins: int, path: str) -> dict[str, jax.Array]:
    """Returns the arrays of a weight whose first `stacked` dims count layers; the next `ins` are i.

    int8: `integers` int8 [*i, *o] and `scales` [*o]: the largest magnitude of an output is 127
    times its scale.
    nf4: `codes` uint8 [*i / 2, *o], the first of two places in the low half; `scales` uint8 [*i /
    64, *o] in units of `group_scales` [*i / 64, *o / 256], of which the largest is 255. Blocks and
    groups divide the last dims of i and o; a shorter dim is one block.

    Raises ConfigError if the last dim of i does not divide.
    """
    w = w.astype(jnp.float32)
    at = stacked + ins - 1
    if kind == "int8":
        over = tuple(range(stacked, stacked + ins))
        largest = jnp.abs(w).max(over)
        wide = jnp.expand_dims(_nonzero(largest), over)
        integers = jnp.round(w / wide * 127).astype(jnp.int8)
        return {"integers": integers, "scales": _as_bits(largest / 127)}
    block = _size(w.shape[at], BLOCK)
    if block % 2:
        raise ConfigError(
            f"finetune.base='nf4': {path} contracts {w.shape[at]} numbers, which are not whole "
            "blocks",
            asked=f"a multiple of {BLOCK}, or an even number below",
            fix="--set finetune.base=int8",
        )
    blocks = w.reshape(*w.shape[:at], -1, block, *w.shape[at + 1 :])
    largest = jnp.abs(blocks).max(at + 1)
    of_groups = _cut_last(largest)
    group_largest = of_groups.max(-1)
    scales = jnp.round(of_groups / _nonzero(group_largest)[..., None] * 255).astype(jnp.uint8)
    units = blocks / jnp.expand_dims(_nonzero(largest), at + 1)
    codes = sum((units > middle).astype(jnp.uint8) for middle in (NF4[1:] + NF4[:-1]) / 2)
    codes = jnp.asarray(codes).reshape(*w.shape[:at], -1, 2, *w.shape[at + 1 :])
    low, high = (jax.lax.index_in_dim(codes, half, at + 1, keepdims=False) for half in (0, 1))
    return {
        "codes": low | (high << 4),
        "scales": scales.reshape(largest.shape),
        "group_scales": _as_bits(group_largest / 255),
    }


def dequantised(arrays: Arrays, kind: Kind, ins: int, stacked: int = 0) -> jax.Array:
    """Inverts `quantised`: returns the float32 weight [*i, *o]."""
    at = stacked + ins - 1
    if kind == "int8":
        scales = _as_floats(arrays["scales"])
        over = tuple(range(stacked, stacked + ins))
        return arrays["integers"].astype(jnp.float32) * jnp.expand_dims(scales, over)
    codes = arrays["codes"]
    both = jnp.stack([codes & 15, codes >> 4], at + 1)
    units = jnp.asarray(NF4)[both.astype(jnp.int32)]
    of_groups = _cut_last(arrays["scales"].astype(jnp.float32))
    scales = of_groups * _as_floats(arrays["group_scales"])[..., None]
    scales = scales.reshape(arrays["scales"].shape)
    shape = codes.shape
    blocks = units.reshape(*shape[:at], scales.shape[at], -1, *shape[at + 1 :])
    wide = blocks * jnp.expand_dims(scales, at + 1)
    return wide.reshape(*shape[:at], 2 * shape[at], *shape[at + 1 :])


def axes_of(kind: Kind, axes: tuple, stacked: int, ins: int) -> dict[str, tuple]:
    """Returns the logical axes of each array, given those of the weight.

    No mesh axis splits a block or a group, nor the dim that counts blocks: scales are few.
    """
    stack, i, o = axes[:stacked], axes[stacked : stacked + ins], axes[stacked + ins :]
    if kind == "int8":
        return {"integers": axes, "scales": (*stack, *o)}
    scales = (*stack, *i[:-1], None, *o)
    return {"codes": axes, "scales": scales, "group_scales": (*scales[:-1], None)}


def as_buffers(w: nnx.Param, kind: Kind, stacked: int, ins: int, path: str) -> QuantisedWeight:
    """Returns a weight of a model that is being built, quantised."""
    arrays = quantised(w[...], kind, stacked, ins, path)
    axes = axes_of(kind, tuple(w.out_sharding), stacked, ins)
    buffers = {name: Buffer(x, out_sharding=axes[name]) for name, x in arrays.items()}
    return QuantisedWeight(buffers, kind)


def _size(whole: int, size: int) -> int:
    """Returns `size`, or the whole dim if that is shorter; 1 if `size` does not divide it."""
    if whole < size:
        return whole
    return size if whole % size == 0 else 1


def _cut_last(x: jax.Array) -> jax.Array:
    """Returns x [..., o] as [..., groups, places of a group]."""
    size = _size(x.shape[-1], GROUP)
    size = size if size > 1 else x.shape[-1]
    return x.reshape(*x.shape[:-1], -1, size)


def _nonzero(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, 1, x)


def _as_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def _as_floats(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
