"""Makes the operands, statics and scratch that both backward kernels share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.hopper.heads import heads_of, shared_array
from pallas_kernels.attention.hopper.programs import COMPUTING, ROWS
from pallas_kernels.attention.hopper.scores import ScoresStatics
from pallas_kernels.attention.mask import visible_keys, zero_hidden
from pallas_kernels.attention.operands import (
    pad_mask_operands,
    pad_to,
    round_up,
    split_mask_operands,
)
from pallas_kernels.attention.problem import Inputs, Problem
from pallas_kernels.attention.tile_ranges import FULL, OVER_KEYS, possible_ranges
from pallas_kernels.backends import mosaic as gpu

LENGTH_MULTIPLE = COMPUTING * ROWS  # of padded lengths: whole tiles of both kernels


class Operands(NamedTuple):
    """The operands, padded to multiples of LENGTH_MULTIPLE in time and SWIZZLE_ELEMENTS in head
    dims.
    """

    qkv: tuple[jax.Array, ...]  # q, k and v, or the one array that they share (heads.py)
    dout: jax.Array
    lse: jax.Array  # [b, h, t], in units of log 2, because the kernels take exp2
    delta: jax.Array  # [b, h, t], the sum of out x dout, less dlse
    masks: list[jax.Array]  # those that exist, in the order of MaskOperands

    @property
    def widths(self) -> tuple[int, int]:
        """The padded head dims, of keys and of values."""
        return self.qkv[0].shape[3], self.qkv[-1].shape[3]

    @property
    def lengths(self) -> tuple[int, int]:
        """The padded lengths, of queries and of keys."""
        return self.dout.shape[1], self.qkv[-1].shape[1]

    @property
    def is_joined(self) -> bool:
        return len(self.qkv) == 1

    def in_order(self) -> tuple[jax.Array, ...]:
        """Returns the arrays as a kernel takes them."""
        return *self.qkv, self.dout, self.lse, self.delta, *self.masks


def pad_operands(
    problem: Problem, inputs: Inputs, results, gradients, joined_btknd: jax.Array | None = None
) -> Operands:
    """Pads the operands, and sets rows that see nothing, or that nothing sees, to 0: they may hold
    NaN.

    `results` are (out, lse), `gradients` theirs. `joined_btknd`: the array of which q, k and v are
    parts; then every query sees its own key.
    """
    out, lse = results
    dout, dlse = gradients
    b, t, h, d = inputs.q_bthd.shape
    _, s, kv_heads, e = inputs.v_bske.shape
    sees_nothing = jnp.isneginf(lse)
    d_padded = round_up(d, gpu.SWIZZLE_ELEMENTS)
    e_padded = round_up(e, gpu.SWIZZLE_ELEMENTS)
    q_length = round_up(t, LENGTH_MULTIPLE)
    kv_length = round_up(s, LENGTH_MULTIPLE)

    def pad_vector(x_bth):
        x_bht = jnp.moveaxis(jnp.where(sees_nothing, 0, x_bth), 2, 1)
        return pad_to(x_bht, (b, h, q_length))

    def zero_sightless(x):
        """Returns x with 0 for queries that see no key."""
        if inputs.mask_is_static and t <= s:  # there are none: each sees the key at its position
            return x
        return jnp.where(sees_nothing[..., None], 0, x)

    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), -1) - dlse
    lse = pad_vector(lse * gpu.LOG2E)
    delta = pad_vector(delta)
    masks = [x for x in pad_mask_operands(inputs, q_length, kv_length) if x is not None]
    dout_shape = (b, q_length, h, e_padded)
    if joined_btknd is not None:
        shared = shared_array(joined_btknd, q_length, d_padded)
        return Operands((shared,), pad_to(dout, dout_shape), lse, delta, masks)
    q = zero_sightless(inputs.q_bthd)
    dout = zero_sightless(dout)
    visible = visible_keys(problem, inputs)
    q = pad_to(q, (b, q_length, h, d_padded))
    dout = pad_to(dout, dout_shape)
    k = pad_to(zero_hidden(inputs.k_bskd, visible), (b, kv_length, kv_heads, d_padded))
    v = pad_to(zero_hidden(inputs.v_bske, visible), (b, kv_length, kv_heads, e_padded))
    return Operands((q, k, v), dout, lse, delta, masks)


def make_scores_statics(
    problem, inputs, operands, table, over: int, interpret: bool
) -> ScoresStatics:
    """Returns the statics of a kernel. `over`: the side whose tiles a program walks over."""
    tile = table[max(operands.widths)]
    padded_keys = over == OVER_KEYS and inputs.lengths[1] % tile.k != 0
    ranges = possible_ranges(problem, inputs, padded_keys=padded_keys, over=over)
    return ScoresStatics(
        problem,
        tile,
        rows_are_queries=over == OVER_KEYS,
        lengths=inputs.lengths,
        heads=heads_of(inputs, operands.is_joined),
        needs_mask=ranges != (FULL,),
        has_segments=inputs.has_segments,
        has_positions=inputs.has_positions,
        interpret=interpret,
    )


class Memory(NamedTuple):
    """The references to global memory."""

    bounds: Any  # of this program's tile
    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any  # [b, h, t], in units of log 2
    delta: Any  # [b, h, t]
    q_masks: list[Any]  # [b, t]: segment ids, positions; those that exist
    kv_masks: list[Any]  # [b, s]


def split_masks(statics: ScoresStatics, refs) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns (q_masks, kv_masks, the references after them)."""
    masks, rest = split_mask_operands(refs, statics.has_segments, statics.has_positions)
    q_masks = [x for x in (masks.q_segment_ids, masks.q_positions) if x is not None]
    kv_masks = [x for x in (masks.kv_segment_ids, masks.kv_positions) if x is not None]
    return q_masks, kv_masks, rest


def mask_scratch(statics: ScoresStatics, own: int) -> list:
    """Returns the mask vectors of the program's own tiles, and of those in the first ring."""
    if not statics.mask_vectors:
        return []
    slots = statics.tile.stages[0]
    return [
        gpu.shared_memory((own, statics.mask_vectors, ROWS), jnp.int32),
        gpu.shared_memory((slots, statics.mask_vectors, statics.columns), jnp.int32),
    ]


def ring_barriers(statics: ScoresStatics, own: int, arrays: int) -> list:
    """Returns own_ready, then `ready` of both rings, then `free` of both.

    Every copy arrives once at its barrier: a slot takes `arrays` copies, and in the first ring one
    more for each mask vector; an own tile takes two arrays and the mask vectors.
    """
    first, second = statics.tile.stages
    return [
        gpu.barriers(own, arrivals=2 + statics.mask_vectors),
        gpu.barriers(max(first, 2), arrivals=arrays + statics.mask_vectors),
        gpu.barriers(max(second, 2), arrivals=arrays),
        gpu.barriers(first, arrivals=COMPUTING),
        gpu.barriers(second, arrivals=COMPUTING),
    ]


def staging_scratch(statics: ScoresStatics, dtype) -> list:
    """Returns shared memory for left operands, which only the interpreter needs."""
    if not statics.interpret:
        return []
    return [gpu.shared_memory((COMPUTING, *statics.shape), dtype)] * 2
