"""Ends a run whose evaluations no longer improve: `eval.patience`."""

from collections.abc import Mapping
from typing import Any

from spmdtrain.checkpoints.meta import Meta
from spmdtrain.config.schema import EvalConfig


class EarlyStop:
    """The count of evaluations since the best one.

    Checkpoints keep it: `meta` is that of the checkpoint from which the run resumes. An evaluation
    without a loss counts as no improvement. Evaluations are the same in every process, so all
    processes decide alike.
    """

    def __init__(self, config: EvalConfig, meta: Meta | None = None):
        self._config = config
        self.go_back(meta or {})

    def go_back(self, meta: Meta) -> None:
        """Forgets the evaluations after the checkpoint with this meta."""
        record = meta.get("early_stop", {})
        self._best: float | None = record.get("best")
        self._since: int = record.get("since", 0)

    def document(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as JSON values; empty if `eval.patience` is not set."""
        if self._config.patience is None:
            return {}
        return {"early_stop": {"best": self._best, "since": self._since}}

    def evaluated(self, figures: Mapping[str, float]) -> None:
        """Counts an evaluation by its figures."""
        loss = figures.get("eval_loss")
        if loss is not None and self._is_better(loss):
            self._best = loss
            self._since = 0
        else:
            self._since += 1

    def _is_better(self, loss: float) -> bool:
        return self._best is None or loss < self._best - self._config.min_delta

    @property
    def is_over(self) -> bool:
        """True if the run must end: `eval.patience` evaluations in a row brought no improvement."""
        patience = self._config.patience
        return patience is not None and self._since >= patience

    @property
    def more_patience(self) -> int:
        """A value of `eval.patience` that lets the run continue."""
        return 2 * self._since

    def describe(self) -> str:
        """Returns why the run ends, in words."""
        best = "no eval loss" if self._best is None else f"none below the best, {self._best:.4f}"
        least = f" by more than {self._config.min_delta:g}" if self._config.min_delta else ""
        return f"{self._since} evaluations in a row and {best}{least}"
