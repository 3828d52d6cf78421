"""Decides when islands meet, and which weights each meeting averages.

A meeting is named by its step: the number of steps that an island has taken when it begins. All
islands have the same timetable, which depends on the settings alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from spmdtrain.config.schema import IslandsConfig


@dataclass(frozen=True)
class Timetable:
    """The timetable of meetings: after each of the first `after` steps, and then every `interval`
    steps.

    From then on the `fragments` take turns.
    """

    after: int
    interval: int
    fragments: int
    delay: int

    @classmethod
    def of(cls, settings: IslandsConfig) -> "Timetable":
        return cls(settings.after, settings.interval, settings.fragments, settings.delay)

    def meets(self, step: int) -> bool:
        """Returns True if a meeting begins after this step."""
        return 0 < step <= self.after or self._turns(step) > 0

    def following(self, step: int) -> int:
        """Returns the step of the first meeting after this step."""
        if step < self.after:
            return step + 1
        return step + self.interval - (step - self.after) % self.interval

    def before(self, step: int) -> int:
        """Returns the step of the last meeting before this step; 0 if there is none."""
        if step - 1 <= self.after:
            return max(step - 1, 0)
        return step - 1 - (step - 1 - self.after) % self.interval

    def ordinal(self, step: int) -> int:
        """Returns the number of meetings up to this step."""
        return min(step, self.after) + max(step - self.after, 0) // self.interval

    def fragment(self, step: int) -> int | None:
        """Returns the fragment of the meeting of this step; None: it is about all weights."""
        if step <= self.after:
            return None
        return (self._turns(step) - 1) % self.fragments

    def is_in_step(self, step: int) -> bool:
        """Returns True if the meeting of this step is one of the first, which only average."""
        return step <= self.after

    def late(self, step: int, last: int) -> int:
        """Returns the steps after the meeting of `step` until its result is taken.

        The run ends after `last` steps, and leaves nothing open.
        """
        return 0 if step <= self.after or step == last else self.delay

    def _turns(self, step: int) -> int:
        """Returns which of the regular meetings this step has, from 1; 0 if it has none."""
        since = step - self.after
        return since // self.interval if since > 0 and since % self.interval == 0 else 0


def deal(sizes: Mapping[str, int], fragments: int) -> list[list[str]]:
    """Deals weights, by path with their sizes, to fragments of much the same size."""
    dealt: list[list[str]] = [[] for _ in range(fragments)]
    totals = [0] * fragments
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        smallest = totals.index(min(totals))
        dealt[smallest].append(path)
        totals[smallest] += sizes[path]
    return [sorted(paths) for paths in dealt]
