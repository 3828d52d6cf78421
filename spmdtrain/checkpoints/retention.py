"""Decides which checkpoints of a run stay: the newest, the best, and some of each stretch."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spmdtrain.checkpoints.meta import Meta
from spmdtrain.config.schema import CheckpointConfig

EVAL_LOSSES = "eval_losses"  # in the meta: the losses of the checkpoints that are there, by step


class Retention:
    """Decides by `[checkpoint]`, and by the losses of the evaluations that it is told.

    A checkpoint has the "eval_loss" of an evaluation after the same step, if there was one, and
    only then it can be among the best. Each checkpoint keeps the losses of all, so that a run that
    is resumed decides as if it had never stopped.
    """

    def __init__(self, config: CheckpointConfig):
        self._newest = 1 if config.keep == "best" else config.keep
        self._best = max(config.keep_best, 1) if config.keep == "best" else config.keep_best
        self._every = config.keep_every
        self._losses: dict[int, float] = {}

    @property
    def keeps_best(self) -> bool:
        """Whether any checkpoint stays for its loss."""
        return self._best > 0

    def recall(self, meta: Meta) -> None:
        """Takes in the losses that the checkpoint kept from which the run goes on."""
        kept = meta.get(EVAL_LOSSES)
        if not isinstance(kept, dict):  # a checkpoint of before
            return
        self._losses = {
            int(step): float(loss)
            for step, loss in kept.items()
            if re.fullmatch("[0-9]{1,18}", step) and isinstance(loss, float)
        }

    def evaluated(self, step: int, figures: Mapping[str, Any]) -> None:
        """Notes what an evaluation after `step` has found; a loss that is not finite is none."""
        loss = figures.get("eval_loss")
        if loss is not None and math.isfinite(loss):
            self._losses[step] = float(loss)

    def forget(self, steps: Iterable[int]) -> None:
        """Drops the losses of steps whose checkpoints have been set aside."""
        for step in steps:
            self._losses.pop(step, None)

    def wants(self, step: int, saved: Iterable[int]) -> bool:
        """True if `step` has to be saved, due or not: with those in `saved` it is of the best."""
        return step in self._best_of([*saved, step])

    def stay(self, saved: Sequence[int]) -> set[int]:
        """Those of the checkpoints `saved`, oldest first, that stay.

        Of each stretch of `keep_every` steps the first one does, where none lies at its beginning.
        """
        first: dict[int, int] = {}
        if self._every:
            for step in saved:
                if step >= self._every:
                    first.setdefault(step // self._every, step)
        return {*saved[-self._newest :], *self._best_of(saved), *first.values()}

    def meta(self, saved: Iterable[int]) -> Meta:
        """The part of a checkpoint's meta that `recall` reads; `saved` are those that are there."""
        there = {str(step): self._losses[step] for step in saved if step in self._losses}
        return {EVAL_LOSSES: there}

    def best(self, saved: Iterable[int]) -> tuple[int, float] | None:
        """The best one and its loss, where the best are kept and one has a loss."""
        return next(((step, self._losses[step]) for step in self._best_of(saved)), None)

    def _best_of(self, saved: Iterable[int]) -> list[int]:
        """The best, best first. Of equal ones the older: it came there in fewer steps."""
        known = {step for step in saved if step in self._losses}
        return sorted(known, key=lambda step: (self._losses[step], step))[: self._best]
