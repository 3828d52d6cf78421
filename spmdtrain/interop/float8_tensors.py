"""Reads matrices in 8-bit floats, the format in which DeepSeek-V3 is published.

Each square of 128 x 128 numbers of a matrix shares a float32 scale, which is in another tensor. A
number times its scale is exact in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from spmdtrain.config.errors import CheckpointError
from spmdtrain.interop.safetensors_files import Tensor

SQUARE = 128  # numbers on a side
DTYPE = np.dtype(ml_dtypes.float8_e4m3fn)
KINDS = {"F8_E4M3": DTYPE}  # by the name in a file
SCALE = "_scale_inv"  # the ending of a matrix's scales, which multiply, in spite of their name


@dataclass(frozen=True)
class ScaledTensor(Tensor):
    """An 8-bit matrix in a file.

    Reading any part of it dequantises the whole, to float32.
    """

    scale: Tensor

    def map(self) -> np.ndarray:
        """Returns the numbers of the matrix, float32."""
        rows, columns = self.shape
        scales = np.repeat(self.scale.map(), SQUARE, 0)[:rows]
        scales = np.repeat(scales, SQUARE, 1)[:, :columns]
        return super().map().astype(np.float32) * scales


def with_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of an 8-bit file, each joined with its scales.

    Raises CheckpointError if a matrix has no scales, or not as many as it has squares.
    """
    scaled = {}
    used = set()
    for name, tensor in tensors.items():
        if tensor.kind != DTYPE:
            continue
        scale = tensors.get(name + SCALE)
        squares = tuple(-(-size // SQUARE) for size in tensor.shape)
        if scale is None or scale.shape != squares or len(squares) != 2:
            raise CheckpointError(
                f"{name} of {tensor.path} has 8 bits, and no scales",
                asked=f"{name}{SCALE} {list(squares)}",
                found="no such tensor" if scale is None else f"{list(scale.shape)}",
                fix="the config.json of these weights, or downloading them again",
            )
        fields = {field: getattr(tensor, field) for field in ("name", "path", "offset", "shape")}
        scaled[name] = ScaledTensor(**fields, kind=tensor.kind, scale=scale)
        used.add(scale.name)
    return {name: scaled.get(name, plain) for name, plain in tensors.items() if name not in used}
