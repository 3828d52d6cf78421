"""Compares one step in two layouts, figure by figure, in units of each figure's rounding error.

Both steps start from the same state, so differences cannot accumulate. A figure is a gradient, an
update or a leaf of the next state, compared by Euclidean norm, or a number that the step reports.
How far rounding alone moves a figure is measured (noise.py) and called its floor. A figure more
than `MARGIN` floors away is wrong. Over 768 random layouts the largest distance was 3.9 floors; the
smallest of a planted error was 100.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spmdtrain.train.compared.in_order import OPTIMIZER, STEP, WEIGHT, Leaf, Plain

MARGIN = 8.0
NUMBER = "number"  # the kind of a figure that the step reports
GRADIENT = "gradient"
UPDATE = "update"
INITIAL = "initial"
BATCH = "batch"
ORDER = (INITIAL, BATCH, NUMBER, GRADIENT, UPDATE, OPTIMIZER, WEIGHT)  # of the step; then items
# A leaf of zeros may be off by the rounding of all leaves of its kind taken together.
OF_ALL = 2.0**-10
# Counts and switches, which rounding cannot move.
COUNTS = ("tokens", "pairs", "skipped", "overflow", "loss_scale")


class Figures(NamedTuple):
    """The results of one step.

    `arrays` are in float64: gradients, updates, and how far each leaf of the state moved. `whole`
    are the integer leaves after the step, and `numbers` the metrics. `stored` is the norm of the
    largest error of storing a leaf of the state, and `fine` the relative rounding of the dtype of
    an array.
    """

    arrays: dict[Leaf, np.ndarray]
    whole: dict[Leaf, np.ndarray]
    stored: dict[Leaf, float]
    numbers: dict[str, float]
    fine: dict[Leaf, float]


class Floors(NamedTuple):
    """The distances by which rounding alone moves the figures of one step."""

    arrays: dict[Leaf, float]
    numbers: dict[str, float]


@dataclass(frozen=True)
class FigureApart:
    """A figure of one step in two layouts: `apart` from the reference, whose norm is `size`.

    `floor`: how far rounding alone moves it. `ratio`: how many floors apart they are.
    """

    step: int
    leaf: Leaf
    apart: float
    floor: float
    size: float
    ratio: float

    @property
    def is_wrong(self) -> bool:
        return not self.ratio <= MARGIN

    def __str__(self) -> str:
        if self.leaf.kind in (INITIAL, BATCH):
            return f"{self.leaf}: not the same"
        return (
            f"{self.leaf}, step {self.step + 1}: {self.apart:.1e} apart, "
            f"rounding moves it {self.floor:.0e}"
        )


def rounding_of(dtype: np.dtype) -> float:
    """Returns the largest relative rounding of a floating dtype, as 2^-24 for float32."""
    import jax.numpy as jnp

    return float(jnp.finfo(dtype).eps) / 2


def is_floating(x: np.ndarray) -> bool:
    """Returns True for numpy's floating dtypes and for bfloat16."""
    return x.dtype.kind == "f" or x.dtype.name == "bfloat16"


def figures_of(
    before: Plain,
    after: Plain,
    shown: Mapping[str, Mapping[str, np.ndarray]],
    numbers: Mapping[str, float],
) -> Figures:
    """Returns the figures of a step from `before` to `after`.

    `shown`: its gradients and updates, {kind: {path: array}}. `numbers`: its metrics.
    """
    figures = Figures({}, {}, {}, dict(numbers), {})
    for kind, arrays in shown.items():
        for path, x in arrays.items():
            leaf = Leaf(kind, path)
            figures.arrays[leaf] = x.astype(np.float64)
            figures.fine[leaf] = rounding_of(x.dtype)
    for leaf, x in after.items():
        if not is_floating(x):
            figures.whole[leaf] = x
            continue
        wide = x.astype(np.float64)
        finite = np.isfinite(wide) | np.isfinite(before[leaf].astype(np.float64))
        moved = np.where(finite, wide - before[leaf].astype(np.float64), 0.0)
        figures.arrays[leaf] = moved
        figures.fine[leaf] = rounding_of(x.dtype)
        figures.stored[leaf] = figures.fine[leaf] * norm(np.where(np.isfinite(wide), wide, 0.0))
    return figures


def norm(x: np.ndarray) -> float:
    """Returns the Euclidean norm of all elements."""
    return float(np.linalg.norm(np.asarray(x, np.float64).ravel()))


def apart(got: np.ndarray, want: np.ndarray) -> float:
    """Returns the norm of the difference; infinity if shapes differ or a value is not finite."""
    if got.shape != want.shape:
        return math.inf
    distance = norm(got - want)
    return distance if math.isfinite(distance) else math.inf


def raised_floors(floors: Floors, got: Figures, want: Figures) -> Floors:
    """Returns the floors, raised to a sibling's distance from the reference `want`."""
    arrays = {
        leaf: max(floors.arrays.get(leaf, 0.0), apart(got.arrays[leaf], x))
        for leaf, x in want.arrays.items()
    }
    numbers = {
        name: max(floors.numbers.get(name, 0.0), abs(got.numbers[name] - x))
        for name, x in want.numbers.items()
    }
    return Floors(arrays, numbers)


def differences(step: int, got: Figures, want: Figures, floors: Floors) -> list[FigureApart]:
    """Returns how far every figure of a step in another layout is from the reference `want`."""
    together: dict[str, float] = {}
    for leaf, x in want.arrays.items():
        together[leaf.kind] = math.hypot(together.get(leaf.kind, 0.0), norm(x))
    figures_apart = [_of_number(step, name, got, want, floors) for name in want.numbers]
    for leaf in want.arrays.keys() | got.arrays.keys():
        if leaf not in want.arrays or leaf not in got.arrays:
            figures_apart.append(FigureApart(step, leaf, math.inf, 0.0, 0.0, math.inf))
            continue
        x, fine = want.arrays[leaf], want.fine[leaf]
        size = norm(x)
        floor = max(
            floors.arrays.get(leaf, 0.0),
            2 * fine * size,
            want.stored.get(leaf, 0.0),
            OF_ALL * fine * together[leaf.kind],
        )
        figures_apart.append(_difference(step, leaf, apart(got.arrays[leaf], x), floor, size))
    for leaf, x in want.whole.items():
        same = leaf in got.whole and np.array_equal(got.whole[leaf], x)
        figures_apart.append(
            FigureApart(step, leaf, float(not same), 0.0, 0.0, 0.0 if same else math.inf)
        )
    return figures_apart


def _of_number(step: int, name: str, got: Figures, want: Figures, floors: Floors) -> FigureApart:
    ours, theirs = got.numbers.get(name, math.nan), want.numbers[name]
    leaf = Leaf(NUMBER, name)
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs) and name in got.numbers):
        return FigureApart(step, leaf, 0.0, floors.numbers.get(name, 0.0), abs(theirs), 0.0)
    off = abs(ours - theirs)
    if name.partition("/")[0] in COUNTS or not math.isfinite(off):
        return FigureApart(step, leaf, off, 0.0, abs(theirs), math.inf)
    floor = max(floors.numbers.get(name, 0.0), 2 * rounding_of(np.dtype("float32")) * abs(theirs))
    return _difference(step, leaf, off, floor, abs(theirs))


def _difference(step: int, leaf: Leaf, off: float, floor: float, size: float) -> FigureApart:
    if off == 0:
        return FigureApart(step, leaf, 0.0, floor, size, 0.0)
    return FigureApart(step, leaf, off, floor, size, off / floor if floor else math.inf)


def unequal(step: int, kind: str, names: Iterable[str]) -> list[FigureApart]:
    """Returns a difference for each of the things that should be bit-equal and are not."""
    return [FigureApart(step, Leaf(kind, name), math.inf, 0.0, 0.0, math.inf) for name in names]


def first_of(wrong: Iterable[FigureApart]) -> FigureApart:
    """Returns the difference that occurs first within the step; of several, the largest."""

    def place(figure: FigureApart) -> tuple[int, int, float]:
        after_gradients = figure.leaf == Leaf(NUMBER, "grad_norm")
        kind = UPDATE if after_gradients else figure.leaf.kind
        return figure.step, ORDER.index(kind) if kind in ORDER else len(ORDER), -figure.ratio

    return min(wrong, key=place)


def without_step(plain: Plain) -> Plain:
    """Returns a state without its step number, which is a position and not a result."""
    return {leaf: x for leaf, x in plain.items() if leaf.kind != STEP}
