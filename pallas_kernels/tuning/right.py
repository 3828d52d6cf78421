"""Checks the values of an implementation, tile by tile, against a float32 reference.

In a whole array, a wrong tile would hide in the error of all others. Limits are relative errors:
the rounding of the dtype, as in tests. Nothing here imports jax.
"""

from collections.abc import Mapping

import numpy as np

# dtype -> (of values, of gradients)
LIMITS = {
    "bfloat16": (4e-3, 8e-3),
    "float16": (1e-3, 2e-3),
    "float32": (1e-5, 1e-4),
    "float64": (1e-5, 1e-4),
}
TILE = 64  # rows
# The error of a tile is relative to its own size, but no smaller than this share of the array's:
# gradients of masked pairs cancel, and what is left of them is rounding.
LEAST_SIZE = 0.25
GRADIENT = "d"  # begins the names of gradients


def complaint(
    values: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], dtype: str
) -> str:
    """Returns what is wrong with `values`; "" if nothing is.

    Arrays are keyed by name, with the rows of a tile along the second to last dim: [..., rows,
    width]. Names of gradients begin with "d".
    """
    of_values, of_gradients = LIMITS[dtype]
    for name, want in wanted.items():
        got = np.asarray(values[name], np.float32)
        want = np.asarray(want, np.float32)
        if got.shape != want.shape:
            return f"{name} has the shape {got.shape}, not {want.shape}"
        finite = np.isfinite(want)
        if not np.isfinite(got[finite]).all():
            return f"{name} is not finite"
        if not np.array_equal(got[~finite], want[~finite]):
            return f"{name} is finite where it should not be"
        limit = of_gradients if name.startswith(GRADIENT) else of_values
        worst = _worst_tile(np.where(finite, got, 0), np.where(finite, want, 0))
        if not worst <= limit:
            return f"{name} is wrong by {worst:.1e} in a tile, at most {limit:.0e}"
    return ""


def _worst_tile(got: np.ndarray, want: np.ndarray) -> float:
    """Returns the largest error of a tile over its size, both root mean squares."""
    rows = want.shape[-2]
    starts = np.arange(0, rows, TILE)
    counts = np.diff([*starts, rows]) * want.shape[-1]

    def sizes(x):
        squares = np.square(x, dtype=np.float64).sum(-1)
        return np.sqrt(np.add.reduceat(squares, starts, axis=-1) / counts)

    of_all = np.sqrt(np.mean(np.square(want, dtype=np.float64)))
    errors = sizes(got - want)
    size = np.maximum(sizes(want), LEAST_SIZE * of_all)
    return float(np.max(errors / np.where(size, size, 1.0)))
