"""Maps the slopes of xIELU, beside which files hold its two constants."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmdtrain.config.errors import CheckpointError
from spmdtrain.interop.pieces import Index, Shape, Sizes

CONSTANTS = {"beta": 0.5, "eps": -1e-6}
ROUNDING = 1e-2  # of constants in 16 bits, relative


@dataclass(frozen=True)
class SlopeBesideConstants:
    """The slope above 0, a vector of one number, whose tensors are it and the constants."""

    shape: Shape

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (self.shape, *(() for _ in CONSTANTS))

    def read(self, tensors: Sequence[np.ndarray], index: Index) -> np.ndarray:
        """Returns the slope. Raises CheckpointError if a constant has another value."""
        slope, *constants = tensors
        for (name, value), tensor in zip(CONSTANTS.items(), constants, strict=True):
            written = float(np.asarray(tensor, np.float64).reshape(()))
            if not abs(written - value) <= ROUNDING * abs(value):
                raise CheckpointError(
                    f"xIELU has {name}={written:g} in these files",
                    asked=f"{name}={value:g}, which is fixed here",
                    fix="a model that was trained so",
                )
        return slope[index]

    def write(self, parameter: np.ndarray) -> list[np.ndarray]:
        """Returns the slope and the constants, in its dtype."""
        constants = [np.array(value, parameter.dtype) for value in CONSTANTS.values()]
        return [parameter, *constants]


def slope_above(sizes: Sizes, shape: Shape) -> SlopeBesideConstants:  # noqa: ARG001 - as others
    """Takes the slope [1] and two numbers beside it."""
    return SlopeBesideConstants(shape)
