"""Padding of the operands of kernels, on Triton and on Mosaic GPU alike."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import Inputs


class MaskOperands(NamedTuple):
    """Operands that a tile is masked by: arrays [b, time], or references; None where not given."""

    q_segment_ids: Any
    kv_segment_ids: Any
    q_positions: Any
    kv_positions: Any


def pad_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """x with zeros behind it in every dim, up to `shape`."""
    extra = [(0, want - have) for have, want in zip(x.shape, shape, strict=True)]
    return jnp.pad(x, extra) if any(after for _, after in extra) else x


def pad_mask_operands(inputs: Inputs, q_length: int, kv_length: int) -> MaskOperands:
    """Segment ids and positions, with zeros up to the padded lengths."""
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
    """(mask operands, the references behind them), of a kernel that is given those that exist."""
    refs = list(refs)
    ids = [refs.pop(0), refs.pop(0)] if has_segments else [None, None]
    positions = [refs.pop(0), refs.pop(0)] if has_positions else [None, None]
    return MaskOperands(*ids, *positions), refs


def round_up(size: int, block: int) -> int:
    """The smallest multiple of `block` that is not below `size`."""
    return -(-size // block) * block
