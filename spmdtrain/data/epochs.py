"""Converts `train.epochs` to steps, once the amount of data is known."""

import math
from fractions import Fraction
from typing import NamedTuple, Protocol

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig

MOST_STEPS = 2**31 - 1


class Endless(NamedTuple):
    """The reason why a kind of data has no epochs, for a message."""

    why: str


class Sized(Protocol):
    """A kind of data, and the number of samples in one pass over it."""

    def samples_per_epoch(self, config: RunConfig) -> int | Endless:
        """Returns the samples in one pass over the data, or why there is no such number."""
        ...


def counted_in_steps(config: RunConfig, data: Sized) -> RunConfig:
    """Returns the config with enough `train.steps` for `train.epochs` passes, rounded up.

    Raises ConfigError if the data has no epochs, or if other settings do not fit the steps.
    """
    epochs = config.train.epochs
    assert epochs is not None, "the settings count in epochs"
    setting = f"train.epochs={epochs:g}"
    samples = data.samples_per_epoch(config)
    if isinstance(samples, Endless):
        raise ConfigError(
            "only a single corpus has epochs",
            asked=setting,
            found=samples.why,
            fix="--set train.steps=1000",
        )
    batch = config.train.global_batch
    steps = math.ceil(Fraction(repr(epochs)) * samples / batch)
    if steps > MOST_STEPS:
        raise ConfigError(
            "a run has fewer than 2^31 steps",
            asked=setting,
            found=f"{samples:,} samples in an epoch",
        )
    try:
        counted = config.with_steps(steps)
    except ValueError as error:
        raise ConfigError(f"{error} ({setting})") from None
    counted.notes.append(
        f"{setting}: {steps:,} steps of {batch}, with {samples:,} samples an epoch"
    )
    return counted
