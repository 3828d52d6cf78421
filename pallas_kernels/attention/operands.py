"""Pads the operands of kernels, for both Triton and Mosaic GPU."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import Inputs


class MaskOperands(NamedTuple):
    """The operands that mask a tile: arrays [b, time], or references; None if not given."""

    q_segment_ids: Any
    kv_segment_ids: Any
    q_positions: Any
    kv_positions: Any


def pad_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns x with zeros appended in every dim, up to `shape`."""
    extra = [(0, want - have) for have, want in zip(x.shape, shape, strict=True)]
    return jnp.pad(x, extra) if any(after for _, after in extra) else x


def pad_mask_operands(inputs: Inputs, q_length: int, kv_length: int) -> MaskOperands:
    """Returns segment ids and positions, with zeros up to the padded lengths."""
    b = inputs.q_bthd.shape[0]

    def padded(x, length):
        return None if x is None else pad_to(x, (b, length))

    return MaskOperands(
        padded(inputs.q_segment_ids, q_length),
        padded(inputs.kv_segment_ids, kv_length),
        padded(inputs.q_positions, q_length),
        padded(inputs.kv_positions, kv_length),
    )


def split_mask_operands(
    refs: Sequence[Any], has_segments: bool, has_positions: bool
) -> tuple[MaskOperands, list[Any]]:
    """Returns (mask operands, the references after them); a kernel gets those that exist."""
    refs = list(refs)
    ids = [refs.pop(0), refs.pop(0)] if has_segments else [None, None]
    positions = [refs.pop(0), refs.pop(0)] if has_positions else [None, None]
    return MaskOperands(*ids, *positions), refs


def round_up(size: int, block: int) -> int:
    """Returns the smallest multiple of `block` that is not below `size`."""
    return -(-size // block) * block
