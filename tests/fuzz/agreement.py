"""Whether two runs are the same but for rounding.

Two sums of the same numbers in another order differ by rounding, and training makes that grow: by
how much is a property of the run, not of the layout. So a difference is first held against a small
floor; where it is larger, against what the very run on one device does when its first weights are
rounded otherwise (`nudges`), times `FACTOR`. A run that is chaotic by its settings is thereby told
from one that is wrong, and how often that was needed is counted.

`grad_norm` and losses are compared step by step, parameters once, per tensor: how far apart two
runs end, beside how far the tensor moved.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from fuzz.runs import Run, State

FACTOR = 20.0  # a rounding of all weights once, against roundings at every operation
NUDGES = 3
# An entry whose gradient is nearly 0 changes the sign of its update under few roundings only. What
# `NUDGES` do not explain is therefore held against more of them, but then it may be no larger than
# `ALIKE` times what one of them does.
MORE_NUDGES = 16
ALIKE = 2.0


@dataclass(frozen=True)
class Floor:
    """Relative differences that need no excuse, and the relative size of a rounding."""

    loss: float
    grad_norm: float
    moved: float
    rounding: float


FLOAT32 = Floor(loss=1e-5, grad_norm=2e-5, moved=2e-4, rounding=2.0**-24)
BFLOAT16 = Floor(loss=2e-3, grad_norm=1e-2, moved=5e-2, rounding=2.0**-9)


@dataclass(frozen=True)
class Difference:
    """At one place, between two runs; `limit` is what the floor allows."""

    what: str
    got: float
    want: float
    size: float
    limit: float

    def __str__(self) -> str:
        return f"{self.what}: {self.got!r} is not {self.want!r}"


def differences(got: Run, want: Run, floor: Floor) -> Iterator[Difference]:
    """Everything measured in both runs, also what agrees. NaN agrees with NaN alone."""
    for step in sorted(got.steps.keys() & want.steps.keys()):
        ours, theirs = got.steps[step], want.steps[step]
        yield _scalar(f"tokens of step {step}", ours["tokens"], theirs["tokens"], 0.0)
        yield _scalar(
            f"learning_rate of step {step}", ours["learning_rate"], theirs["learning_rate"], 1e-6
        )
        yield _scalar(f"loss of step {step}", ours["loss"], theirs["loss"], floor.loss)
        yield _scalar(
            f"grad_norm of step {step}", ours["grad_norm"], theirs["grad_norm"], floor.grad_norm
        )
    for step in sorted(got.evals.keys() & want.evals.keys()):
        yield _scalar(f"eval_loss of step {step}", got.evals[step], want.evals[step], floor.loss)
    last = max(got.seen.params.keys() & want.seen.params.keys(), default=None)
    if last is not None:
        yield from _parameters(last, got, want, floor)


def _scalar(what: str, got: float, want: float, tolerance: float) -> Difference:
    if not (math.isfinite(got) and math.isfinite(want)):
        same = got == want or (math.isnan(got) and math.isnan(want))
        return Difference(what, got, want, 0.0 if same else math.inf, 0.0)
    return Difference(what, got, want, abs(got - want), tolerance * abs(want))


def _parameters(step: int, got: Run, want: Run, floor: Floor) -> Iterator[Difference]:
    """By Euclidean norm per tensor, so that a few entries with a gradient of zero, which Adam
    moves by rounding alone, count as what they are.
    """
    ours, theirs = got.seen.params[step], want.seen.params[step]
    for path in sorted(theirs):
        if path not in ours or ours[path].shape != theirs[path].shape:
            yield Difference(f"{path} after step {step}", math.nan, math.nan, math.inf, 0.0)
            continue
        born = want.seen.born.get(path)
        moved = norm(theirs[path] - born) if born is not None else norm(theirs[path])
        limit = floor.moved * moved + 8 * floor.rounding * norm(theirs[path])
        apart = norm(ours[path] - theirs[path])
        apart = (
            math.inf
            if math.isnan(apart) != math.isnan(norm(theirs[path]))
            else np.nan_to_num(apart)
        )
        what = f"{path} after step {step}, as far as it moved"
        yield Difference(what, norm(ours[path]), norm(theirs[path]), float(apart), float(limit))


def norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


class Oracle:
    """A run on one device, and what becomes of it when its weights are rounded otherwise.
    `again(nudge)` runs it.
    """

    def __init__(self, run: Run, floor: Floor, again: Callable[[Callable[[State], State]], Run]):
        self.run, self.floor, self._again = run, floor, again

    @cached_property
    def sensitivity(self) -> dict[str, float]:
        """By the name of a difference: the largest among the nudged runs."""
        return self._largest(range(NUDGES))

    @cached_property
    def rare(self) -> dict[str, float]:
        """As `sensitivity`, of more nudged runs: made only for what those few do not explain."""
        return self._largest(range(NUDGES, NUDGES + MORE_NUDGES))

    def _largest(self, seeds: range) -> dict[str, float]:
        largest: dict[str, float] = {}
        for seed in seeds:
            nudged = self._again(partial(rounded_otherwise, size=self.floor.rounding, seed=seed))
            for each in differences(nudged, self.run, self.floor):
                largest[each.what] = max(each.size, largest.get(each.what, 0.0))
        return largest

    def judged(self, got: Run) -> tuple[list[str], int]:
        """(what is wrong with `got`, how many differences only rounding explains)."""
        wrong, excused = [], 0
        for each in differences(got, self.run, self.floor):
            if each.size <= each.limit:
                continue
            moves = self.sensitivity.get(each.what, 0.0)
            if each.size <= FACTOR * moves or each.size <= ALIKE * self.rare.get(each.what, 0.0):
                excused += 1
                continue
            most = max(moves, self.rare.get(each.what, 0.0))
            sizes = f"apart {each.size:.2g}, allowed {each.limit:.2g}"
            wrong.append(f"{each} ({sizes}, rounding moves it {most:.2g})")
        return wrong, excused


def rounded_otherwise(params: State, size: float, seed: int) -> State:
    """Every weight a little larger or smaller."""
    random = np.random.default_rng(seed)

    def moved(x: np.ndarray) -> np.ndarray:
        signs = random.choice((-1.0, 1.0), x.shape)
        return (x.astype(np.float64) * (1 + 2 * size * signs)).astype(x.dtype)

    return {path: moved(params[path]) for path in sorted(params)}
