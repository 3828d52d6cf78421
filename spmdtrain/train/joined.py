"""Defines what a part adds to the setup of a run that has its feature."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from spmdtrain.config.schema import RunConfig


class LearnedFrom(NamedTuple):
    """A source that a run learns from: the setting that names it, and a digest."""

    setting: str
    digest: str


class Joined:
    """A part's knowledge of one run: `Setup.own[PART]`. A part overrides what applies to it."""

    def of_batches(self, change: Callable[[RunConfig], RunConfig]) -> "Joined":
        """Returns the same for a run with different batches, given the changed settings."""
        del change
        return self

    def read(self) -> Any:
        """Returns a new value of the part's item that is never saved."""
        raise NotImplementedError

    def check_without_items(self) -> None:
        """Raises ConfigError if no loss can be computed without the part's items: it is then no
        function of weights and batch alone.
        """

    def learns_from(self) -> Mapping[str, LearnedFrom]:
        """Returns what a run learns from besides its data, by its kind."""
        return {}

    def lines(self, quantity: Callable[[int], str]) -> list[str]:
        """Returns what a run prints about it before its first step; `quantity` shortens numbers."""
        del quantity
        return []

    def flops_per_token(self, length: int) -> float:
        """Returns the FLOPs of a step per token of sequences of this length, besides those of the
        model.
        """
        del length
        return 0.0
