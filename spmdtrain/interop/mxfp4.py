"""Reads matrices of experts in MXFP4, the four-bit format in which gpt-oss is published.

32 numbers of a row share a scale, a power of 2 (OCP Microscaling Formats, version 1.0).

A byte holds two numbers, the first in its low half. Every number is exact in bfloat16. Letters in
addition to those of pieces.py:

X experts, O rows out and I columns in of an expert's matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdtrain.interop.pieces import Index, Mapped, Shape

BLOCK = 32  # numbers that share a scale
BIAS = 127  # bias of the exponent that a scale stores
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = np.array([*SIZES, *(-size for size in SIZES)], np.float32)
BLOCKS, SCALES = "_blocks", "_scales"  # the endings of the two tensors of a matrix


@dataclass(frozen=True)
class MappedMxfp4:
    """A parameter of one layer's experts [X, ...], made from blocks [X, O, I / 32, 16] and scales.

    `of_one` makes one expert's part from its matrix [I, O], as in a file without quantisation.
    """

    of_one: Mapped
    count: int

    @property
    def shape(self) -> Shape:
        return (self.count, *self.of_one.shape)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        ((ins, outs),) = self.of_one.shapes
        blocks = (self.count, outs, ins // BLOCK)
        return (*blocks, BLOCK // 2), blocks

    def read(self, tensors: Sequence[np.ndarray], index: Index) -> np.ndarray:
        """Returns the slice `index` of the parameter in float32, one expert at a time."""
        blocks, scales = tensors
        first, *others = index
        own = range(self.count)[first]
        experts = [
            self.of_one.read([numbers(blocks[at], scales[at]).T], tuple(others)) for at in own
        ]
        empty = tuple(
            len(range(*part.indices(size))) for part, size in zip(index, self.shape, strict=True)
        )
        return np.stack(experts) if experts else np.zeros(empty, np.float32)

    def write(self, parameter: np.ndarray) -> list[np.ndarray]:
        """Fails: an export writes matrices in 16 or 32 bits, so nothing calls this."""
        raise AssertionError(f"MXFP4 is only read, and not made of {parameter.shape}")


def numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the float32 matrix [O, I] of one expert, given blocks [O, I / 32, 16] and scales."""
    floats = e2m1_numbers(blocks).reshape(*scales.shape, BLOCK)
    exponents = scales.astype(np.int32) - BIAS
    return np.ldexp(floats, exponents[..., None]).reshape(len(scales), -1)


def e2m1_numbers(packed: np.ndarray) -> np.ndarray:
    """Returns the float32 numbers [..., 2 n] of bytes [..., n], two in each, the low half first."""
    halves = np.stack([packed & 15, packed >> 4], -1)
    return NUMBERS[halves.reshape(*packed.shape[:-1], -1)]


def of_blocks(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the rule for a parameter in MXFP4, given that for one expert's matrix [I, O]."""
    return lambda sizes, shape: MappedMxfp4(rule(sizes, shape[1:]), shape[0])
