"""Makes the reference: some steps on one device, and how far rounding alone moves each of their
figures.

Five siblings repeat each step, from the same state except for rounding: three with every weight
rounded differently, one with the batch in reverse, one with the batch in more microbatches. A
constant tolerance would not do: leaves differ in how much of them is rounding. The gradient of a
key's bias, whose exact value is 0, is nothing but rounding.

A model that mixes the samples of a microbatch, as by subtracting their mean, trains something else
in more microbatches. That sibling then lies far outside the other four, and does not count: its
distance is no rounding, and a floor as wide as that would hide any mistake of a layout.
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
    farther,
    first_of,
    is_floating,
    norm,
    rounding_of,
)
from spmdtrain.lab.certify.stepper import HostBatch, Own, Stepper, hash_of
from spmdtrain.train.compared.in_order import WEIGHT, Plain

ROUNDED = (1, 2, 3)  # seeds of the siblings whose weights are rounded differently
MICROBATCHES = 4  # of the sibling that cuts the batch, if it divides
# Floors of the other siblings beyond which the one that cuts the batch trains something else;
# measured: 3 at most for models that do not mix samples, 8e5 for one that subtracts their mean.
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
        """True if a sample has another gradient among other samples of its microbatch."""
        return bool(self.mixed)

    @property
    def leaves(self) -> int:
        """The number of figures of one step."""
        first = self.figures[0]
        return len(first.arrays) + len(first.whole) + len(first.numbers)

    def spread(self) -> tuple[float, float]:
        """Returns the least and the largest relative floor of a leaf that is not all zeros."""
        shares = [
            floor / norm(figures.arrays[leaf])
            for figures, floors in zip(self.figures, self.floors, strict=True)
            for leaf, floor in floors.arrays.items()
            if floor and norm(figures.arrays[leaf])
        ]
        return (min(shares), max(shares)) if shares else (0.0, 0.0)


def make_reference(config: RunConfig, steps: int, own: Own) -> Reference:
    """Returns the reference of a run whose mesh is one device.

    Raises ConfigError if a figure of it is not a number: nothing can be compared with that.
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
        floors = farther(floors, got, figures)
    _, got = made.stepper.take(before, {name: x[:, ::-1] for name, x in batch.items()})
    floors = farther(floors, got, figures)
    _, got = cutting.take(before, cutting.cut(batch))
    apart = differences(len(made.figures), got, figures, floors)
    if mixed := [each for each in apart if not each.ratio <= MIXED]:
        made.mixed.append(first_of(mixed))
    else:
        floors = farther(floors, got, figures)
    made.batches.append(batch)
    made.states.append(after)
    made.figures.append(figures)
    made.floors.append(floors)
    made.hashes.append(hash_of(made.stepper.setup, batch))


def rounded_otherwise(plain: Plain, rounding: float, seed: int) -> Plain:
    """Returns a state whose weights are slightly larger or smaller, by twice the rounding."""
    random = np.random.default_rng(seed)

    def moved(x: np.ndarray) -> np.ndarray:
        signs = random.choice((-1.0, 1.0), x.shape)
        return (x.astype(np.float64) * (1 + 2 * rounding * signs)).astype(x.dtype)

    return {
        leaf: moved(x) if leaf.kind == WEIGHT and is_floating(x) else x for leaf, x in plain.items()
    }
