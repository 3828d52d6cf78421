"""Reads matrices of 8- and 4-bit floats that lie beside their scales, in any family.

A matrix [O, I] has its scales in tensors of their own:

- e4m3 floats, in 8 bits, with one scale for the matrix, for each row, or for each square of
  128 x 128, as in DeepSeek-V3;
- NVFP4: two e2m1 floats in a byte, the first in its low half, with an e4m3 scale for 16 numbers of
  a row, and a scale of the matrix by which ModelOpt multiplies and compressed-tensors divides.

A matrix is float32 when it has been read: exact in 8 bits, rounded once in the product of the two
scales in 4.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np

from spmdtrain.config.errors import CheckpointError
from spmdtrain.interop.mxfp4 import e2m1_numbers
from spmdtrain.interop.safetensors_files import Tensor

SQUARE = 128  # numbers on a side that share a scale
BLOCK = 16  # numbers of a row that share a scale in NVFP4
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)
BYTES = np.dtype(np.uint8)
KINDS = {"F8_E4M3": FLOAT8, "U8": BYTES}  # by the name in a file
# Endings of names. The last is DeepSeek's, whose scales multiply like the others.
WEIGHT, PACKED, SCALE, SCALE_INV = ".weight", ".weight_packed", "_scale", "_scale_inv"
MULTIPLIES, DIVIDES = ".weight_scale_2", ".weight_global_scale"
# Scales of activations and of a cache, which the quantised kernels of servers need.
OF_ACTIVATIONS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class Float8Matrix(Tensor):
    """A matrix of e4m3 floats in a file. Reading any part of it dequantises the whole."""

    scale: Tensor

    def map(self) -> np.ndarray:
        """Returns the numbers of the matrix, float32 [O, I]."""
        scales = self.scale.map().astype(np.float32)
        rows, columns = self.shape
        if scales.size == 1:
            scales = scales.reshape(1, 1)
        elif scales.shape in ((rows,), (rows, 1)):
            scales = scales.reshape(rows, 1)
        else:
            scales = np.repeat(scales, SQUARE, 0)[:rows]
            scales = np.repeat(scales, SQUARE, 1)[:, :columns]
        return super().map().astype(np.float32) * scales


@dataclass(frozen=True)
class Float4Matrix(Tensor):
    """A matrix in NVFP4. Reading any part of it dequantises the whole."""

    packed: Tensor
    scale: Tensor
    whole: Tensor
    divides: bool  # by `whole`, instead of multiplying

    @property
    def size(self) -> int:
        """The bytes of the matrix, without its scales."""
        return self.packed.size

    def map(self) -> np.ndarray:
        """Returns the numbers of the matrix, float32 [O, I]."""
        whole = self.whole.map().astype(np.float32).reshape(())
        scales = self.scale.map().astype(np.float32)
        scales = scales / whole if self.divides else scales * whole
        numbers = e2m1_numbers(self.packed.map()).reshape(*scales.shape, BLOCK)
        return (numbers * scales[..., None]).reshape(self.shape)


def with_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of files in 8 or 4 bits, each matrix joined with its scales.

    Raises CheckpointError if a matrix has no scales, or not as many as its shape needs.
    """
    joined = {}
    used = {name for name in tensors if name.endswith(OF_ACTIVATIONS)}
    for name, tensor in tensors.items():
        if name.endswith(PACKED):
            matrix = _in_4_bits(tensors, tensor, name.removesuffix(PACKED), DIVIDES)
        elif tensor.kind == BYTES and name.endswith(WEIGHT):
            matrix = _in_4_bits(tensors, tensor, name.removesuffix(WEIGHT), MULTIPLIES)
        elif tensor.kind == FLOAT8 and not name.endswith(SCALE):
            matrix = _in_8_bits(tensors, tensor)
        else:
            continue
        joined[matrix.name] = matrix
        used |= {name, *(part.name for part in _parts_of(matrix))}
    left = {name: tensor for name, tensor in tensors.items() if name not in used}
    for tensor in left.values():
        if tensor.kind in (BYTES, FLOAT8):
            raise _without_scales(tensor, "the matrix that it belongs to", None)
    return left | joined


def _parts_of(matrix: Float8Matrix | Float4Matrix) -> Iterator[Tensor]:
    values = (getattr(matrix, field.name) for field in fields(matrix))
    return (value for value in values if isinstance(value, Tensor))


def _in_8_bits(tensors: Mapping[str, Tensor], matrix: Tensor) -> Float8Matrix:
    squares = tuple(-(-size // SQUARE) for size in matrix.shape)
    name = matrix.name + (SCALE if matrix.name + SCALE in tensors else SCALE_INV)
    allowed = {squares} if name.endswith(SCALE_INV) else _shapes_of_scales(matrix, squares)
    scale = tensors.get(name)
    if scale is None or len(matrix.shape) != 2 or scale.shape not in allowed:
        raise _without_scales(matrix, f"{name} {list(squares)}", scale)
    return Float8Matrix(**_place_of(matrix), scale=scale)


def _shapes_of_scales(matrix: Tensor, squares: tuple[int, ...]) -> set[tuple[int, ...]]:
    rows = matrix.shape[0] if matrix.shape else 1
    return {(), (1,), (1, 1), (rows,), (rows, 1), squares}


def _in_4_bits(
    tensors: Mapping[str, Tensor], packed: Tensor, base: str, of_whole: str
) -> Float4Matrix:
    """Returns the matrix `base`.weight [O, I] of bytes [O, I / 2].

    `of_whole`: the ending of the scale of the matrix, `MULTIPLIES` or `DIVIDES`.
    """
    scale, whole = tensors.get(base + WEIGHT + SCALE), tensors.get(base + of_whole)
    rows, columns = packed.shape if len(packed.shape) == 2 else (0, 0)
    wanted = (rows, 2 * columns // BLOCK)
    is_whole = (2 * columns) % BLOCK == 0 and rows > 0 and packed.kind == BYTES
    if scale is None or not is_whole or scale.shape != wanted or scale.kind != FLOAT8:
        raise _without_scales(packed, f"{base}{WEIGHT}{SCALE} {list(wanted)} in e4m3", scale)
    if whole is None or np.prod(whole.shape, dtype=np.int64) != 1:
        raise _without_scales(packed, f"{base}{of_whole} [1]", whole)
    place = _place_of(packed) | {
        "name": base + WEIGHT,
        "shape": (rows, 2 * columns),
        "kind": FLOAT4,
    }
    return Float4Matrix(
        **place, packed=packed, scale=scale, whole=whole, divides=of_whole == DIVIDES
    )


def _place_of(tensor: Tensor) -> dict[str, Any]:
    return {field.name: getattr(tensor, field.name) for field in fields(Tensor)}


def _without_scales(tensor: Tensor, asked: str, found: Tensor | None) -> CheckpointError:
    bits = 8 if tensor.kind == FLOAT8 else 4
    return CheckpointError(
        f"{tensor.name} of {tensor.path} has {bits} bits, and no scales",
        asked=asked,
        found="no such tensor" if found is None else f"{list(found.shape)} in {found.kind}",
        fix="the config.json of these weights, or downloading them again",
    )
