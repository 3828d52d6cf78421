"""Decides which checkpoints of a run to keep: the newest, the best, and one per interval."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spmdtrain.checkpoints.meta import Meta
from spmdtrain.config.schema import CheckpointConfig

EVAL_LOSSES = "eval_losses"  # in the meta: losses of the existing checkpoints, by step


class Retention:
    """The choice of the checkpoints to keep, by `[checkpoint]` and the reported evaluation losses.

    A checkpoint has the "eval_loss" of an evaluation after the same step; without one it cannot be
    among the best. Each checkpoint stores the losses of all, so a resumed run decides as if it had
    never stopped.
    """

    def __init__(self, config: CheckpointConfig):
        self._newest = 1 if config.keep == "best" else config.keep
        self._best = max(config.keep_best, 1) if config.keep == "best" else config.keep_best
        self._every = config.keep_every
        self._losses: dict[int, float] = {}

    @property
    def keeps_best(self) -> bool:
        """True if any checkpoint is kept for its loss."""
        return self._best > 0

    def recall(self, meta: Meta) -> None:
        """Reads the losses stored in the checkpoint from which the run resumes."""
        losses = meta.get(EVAL_LOSSES)
        if not isinstance(losses, dict):  # no checkpoint is kept for its loss
            return
        self._losses = {
            int(step): float(loss)
            for step, loss in losses.items()
            if re.fullmatch("[0-9]{1,18}", step) and isinstance(loss, float)
        }

    def evaluated(self, step: int, figures: Mapping[str, Any]) -> None:
        """Records the loss of an evaluation after `step`; ignores a non-finite one."""
        loss = figures.get("eval_loss")
        if loss is not None and math.isfinite(loss):
            self._losses[step] = float(loss)

    def forget(self, steps: Iterable[int]) -> None:
        """Drops the losses of steps whose checkpoints have been set aside."""
        for step in steps:
            self._losses.pop(step, None)

    def wants(self, step: int, saved: Iterable[int]) -> bool:
        """Returns True if `step` would be among the best of `saved`.

        Then it must be saved even if it is not due.
        """
        return step in self._best_of([*saved, step])

    def stay(self, saved: Sequence[int]) -> set[int]:
        """Returns which of the checkpoints `saved`, listed oldest first, to keep.

        The first checkpoint in each interval of `keep_every` steps is kept, even if it is not at
        the start of the interval.
        """
        first: dict[int, int] = {}
        if self._every:
            for step in saved:
                if step >= self._every:
                    first.setdefault(step // self._every, step)
        return {*saved[-self._newest :], *self._best_of(saved), *first.values()}

    def meta(self, saved: Iterable[int]) -> Meta:
        """Returns the part of a checkpoint's meta that `recall` reads.

        `saved` are the existing steps.
        """
        losses = {str(step): self._losses[step] for step in saved if step in self._losses}
        return {EVAL_LOSSES: losses}

    def best(self, saved: Iterable[int]) -> tuple[int, float] | None:
        """Returns the best step and its loss; None if the best are not kept or none has a loss."""
        return next(((step, self._losses[step]) for step in self._best_of(saved)), None)

    def _best_of(self, saved: Iterable[int]) -> list[int]:
        """Returns the best steps, best first. Ties go to the older step, which was there sooner."""
        known = {step for step in saved if step in self._losses}
        return sorted(known, key=lambda step: (self._losses[step], step))[: self._best]
