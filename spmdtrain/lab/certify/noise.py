"""Makes the reference: a few steps on one device, with the rounding error of each of their figures.

Five siblings repeat each step from the same state up to rounding: three with every weight rounded
differently, one with the batch reversed, one with the batch cut into more microbatches. A constant
tolerance would not do, because leaves differ in how much of them is rounding: the gradient of a
key's bias is exactly 0, so whatever is computed for it is rounding alone.

A model that couples the samples of a microbatch, say by subtracting their mean, computes something
else in more microbatches. That sibling is then far from the other four and is left out: its
distance is not rounding, and so high a floor would hide any error of a layout.
"""

from dataclasses import dataclass

import jax
import numpy as np

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.lab.certify.compare import (
    MARGIN,
    FigureApart,
    Figures,
    Floors,
    differences,
    first_of,
    is_floating,
    norm,
    raised_floors,
    rounding_of,
)
from spmdtrain.lab.certify.stepper import HostBatch, Own, Stepper, hash_of
from spmdtrain.train.compared.in_order import WEIGHT, Plain

ROUNDED = (1, 2, 3)  # seeds of the siblings whose weights are rounded differently
MICROBATCHES = 4  # of the sibling that cuts the batch, if it divides
# Distance, in floors of the other siblings, from which the sibling that cuts the batch counts as
# another model. Measured: at most 3 for models that do not mix samples, 8e5 for one that subtracts
# their mean.
MIXED = 8 * MARGIN


@dataclass(frozen=True)
class Reference:
    """The steps on one device. `states`: before each step, and after the last.

    `cut`: into how many microbatches one sibling cuts the batch. `mixed`: the figures that show
    that this trains something else.
    """

    stepper: Stepper
    cut: int
    batches: list[HostBatch]
    states: list[Plain]
    figures: list[Figures]
    floors: list[Floors]
    hashes: list[str]
    mixed: list[FigureApart]

    @property
    def mixes_samples(self) -> bool:
        """True if the gradient of a sample depends on the others in its microbatch."""
        return bool(self.mixed)

    @property
    def leaves(self) -> int:
        """The number of figures of one step."""
        first = self.figures[0]
        return len(first.arrays) + len(first.whole) + len(first.numbers)

    def spread(self) -> tuple[float, float]:
        """Returns the smallest and the largest relative floor of leaves that are not all zeros."""
        shares = [
            floor / norm(figures.arrays[leaf])
            for figures, floors in zip(self.figures, self.floors, strict=True)
            for leaf, floor in floors.arrays.items()
            if floor and norm(figures.arrays[leaf])
        ]
        return (min(shares), max(shares)) if shares else (0.0, 0.0)


def make_reference(config: RunConfig, steps: int, own: Own) -> Reference:
    """Returns the reference of a run whose mesh is one device.

    Raises ConfigError if one of its figures is not finite: nothing can be compared with that.
    """
    device = jax.devices()[:1]
    stepper = Stepper(config, device, own)
    whole = config.train.global_batch
    parts = next((n for n in (MICROBATCHES, 3, 2) if whole % n == 0), 1)
    train = config.train.model_copy(update={"microbatch": whole // parts})
    cutting = Stepper(config.model_copy(update={"train": train}), device, own)
    rounding = rounding_of(np.dtype(config.precision.compute)) if _is_numpy(config) else 2.0**-9
    made = Reference(stepper, parts, [], [stepper.begin()], [], [], [], [])
    with stepper.batches() as ahead:
        for _ in range(steps):
            _take_one(made, next(ahead), cutting, rounding)
    return made


def _is_numpy(config: RunConfig) -> bool:
    return config.precision.compute != "bfloat16"


def _take_one(made: Reference, batch: HostBatch, cutting: Stepper, rounding: float) -> None:
    before = made.states[-1]
    after, figures = made.stepper.take(before, batch)
    for leaf, x in figures.arrays.items():
        if not np.isfinite(x).all():
            step = len(made.figures) + 1
            raise ConfigError(
                f"{leaf} is not finite on one device, in step {step}: nothing compares with it",
                fix="a lower optimizer.learning_rate",
            )
    floors = Floors({}, {})
    for seed in ROUNDED:
        _, got = made.stepper.take(rounded_otherwise(before, rounding, seed), batch)
        floors = raised_floors(floors, got, figures)
    _, got = made.stepper.take(before, {name: x[:, ::-1] for name, x in batch.items()})
    floors = raised_floors(floors, got, figures)
    _, got = cutting.take(before, cutting.cut(batch))
    apart = differences(len(made.figures), got, figures, floors)
    if mixed := [figure for figure in apart if not figure.ratio <= MIXED]:
        made.mixed.append(first_of(mixed))
    else:
        floors = raised_floors(floors, got, figures)
    made.batches.append(batch)
    made.states.append(after)
    made.figures.append(figures)
    made.floors.append(floors)
    made.hashes.append(hash_of(made.stepper.setup, batch))


def rounded_otherwise(plain: Plain, rounding: float, seed: int) -> Plain:
    """Returns a state with every weight moved up or down at random by twice its rounding error."""
    random = np.random.default_rng(seed)

    def moved(x: np.ndarray) -> np.ndarray:
        signs = random.choice((-1.0, 1.0), x.shape)
        return (x.astype(np.float64) * (1 + 2 * rounding * signs)).astype(x.dtype)

    return {
        leaf: moved(x) if leaf.kind == WEIGHT and is_floating(x) else x for leaf, x in plain.items()
    }
