"""[islands]: runs that train separately and average their weights every few steps."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema.optimizer import ScheduleFreeAdamW
from spmdtrain.config.settings import (
    Count,
    CountOrZero,
    Fraction,
    LocalPath,
    NonNegative,
    Positive,
    Settings,
)


class IslandsConfig(Settings):
    """The islands of a run: they train separately, each on its own mesh, and average their weights
    every few steps.

    Each island is a separate run, with `train.global_batch` sequences a step (docs/islands.md).
    """

    decides: ClassVar = {
        **dict.fromkeys(("directory", "patience", "keep"), "none"),
        "index": "data",
        "": "update",
    }

    count: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1, description="islands that train together; 1: the run trains alone"
    )
    index: CountOrZero | None = Field(
        default=None, description="which of the islands this run is, from 0"
    )
    directory: LocalPath | None = Field(
        default=None,
        description="folder that all islands reach, in which they leave what they have learned",
    )
    every: Count = Field(default=20, description="steps from one meeting to the next (H)")
    after: CountOrZero = Field(
        default=0,
        description="first steps, each of which ends in a meeting that averages the weights",
    )
    outer: Literal["nesterov", "average"] = Field(
        default="nesterov",
        description="the outer optimizer, applied to the islands' mean change: SGD with Nesterov "
        "momentum (arXiv:2311.08105) | none, the mean change is taken as it is",
    )
    rate: Positive = Field(default=0.7, description="learning rate of the outer step of nesterov")
    momentum: Fraction = Field(default=0.9, description="momentum of the outer step of nesterov")
    codec: Literal["none", "int8", "float8"] = Field(
        default="none",
        description="how changes are written: float32 | 8 bits, with a float32 scale for 256 each",
    )
    fragments: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="parts of the weights that meet in turns, one each every / fragments steps "
        "(arXiv:2501.18512)",
    )
    delay: CountOrZero = Field(
        default=0,
        description="steps that an island takes while the others' changes arrive; its weights are "
        "then half its own and half the meeting's",
    )
    patience: NonNegative = Field(
        default=600.0,
        description="seconds that a meeting waits for an island; then it continues without it",
    )
    keep: Count = Field(
        default=16,
        description="meetings that stay in the folder, at least; an island that resumes from "
        "further back takes the newest weights instead of repeating its steps",
    )

    @model_validator(mode="after")
    def _check(self):
        if self.count > 1 and (self.index is None or self.directory is None):
            raise ValueError(
                f"islands.count={self.count}: each island needs its islands.index, from 0, and "
                "islands.directory, a folder that all reach"
            )
        if self.index is not None and self.index >= self.count:
            raise ValueError(
                f"islands.index={self.index}: {self.count} islands have the indices 0 to "
                f"{self.count - 1}; set islands.count={self.index + 1}"
            )
        for name in ("rate", "momentum"):
            # Not `is_given`: config.json gives the defaults too.
            default = type(self).model_fields[name].default
            if self.outer == "average" and getattr(self, name) != default:
                raise ValueError(
                    f"islands.{name}={getattr(self, name):g} belongs to nesterov, not to "
                    "islands.outer='average'; leave it out"
                )
        if self.every % self.fragments:
            raise ValueError(
                f"islands.every={self.every} does not divide by fragments={self.fragments}; set "
                f"islands.every={self.every // self.fragments * self.fragments or self.fragments}"
            )
        if self.delay and self.delay >= self.interval:
            raise ValueError(
                f"islands.delay={self.delay}: the next meeting is after {self.interval} steps; set "
                f"islands.delay={self.interval - 1}"
            )
        return self

    def lost_in_small_runs(self) -> str:
        """Returns the meetings, if there are any."""
        return "meetings with other islands, between the steps" if self.are_several else ""

    @property
    def are_several(self) -> bool:
        """True if this run is one of several islands."""
        return self.count > 1

    @property
    def interval(self) -> int:
        """The steps from one meeting to the next, of any fragment."""
        return self.every // self.fragments

    def own_samples(self, ids: Any) -> Any:
        """Returns the global indices of this island's samples number `ids`: they take turns."""
        if not self.are_several:
            return ids
        assert self.index is not None, "checked"
        return ids * self.count + self.index


def check_repeatable(run: Any) -> None:
    """Raises ConfigError if the steps of a run depend on other islands."""
    if run.islands.are_several:
        raise ConfigError(
            f"islands.count={run.islands.count}: what the others brought to a meeting is not in "
            "the run, so that its steps cannot be taken again",
            fix="spmdtrain diff, or resuming the island, which repeats its meetings",
        )


def check_alone(run: Any) -> None:
    """Raises ConfigError for islands where strategies are compared, which takes a single run."""
    if run.islands.are_several:
        raise ConfigError(
            "strategies are compared of one run, and islands are several",
            asked=f"islands.count={run.islands.count}",
            fix="--set islands.count=1",
        )


def refusals(run: Any) -> Iterator[str]:
    """Yields the settings that cannot be combined with islands."""
    if not run.islands.are_several:
        return
    setting = f"islands.count={run.islands.count}"
    if run.train.epochs is not None:
        yield (
            f"{setting}: an epoch is one of all islands together; set train.steps instead of "
            "train.epochs"
        )
    if run.optimizer.ema is not None:
        yield (
            f"{setting}: each island would keep another average of the weights; set "
            "optimizer.ema='none'"
        )
    if isinstance(run.optimizer, ScheduleFreeAdamW):
        yield (
            f"{setting}: schedule_free_adamw keeps two copies of the weights, and a meeting "
            "moves one; set optimizer.name='adamw'"
        )
    if run.model.experts and run.model.experts.bias_rate:
        yield (
            f"{setting}: each island would keep other biases of its routers; set "
            "model.experts.bias_rate=0.0"
        )
    if run.guard.policy == "rollback":
        yield (
            f"{setting}: an island that goes back would meet the others at another step; set "
            "guard.policy='skip'"
        )


def refusals_of_sparsity(run: Any) -> Iterator[str]:
    """Yields why islands cannot choose the weights that stay zero."""
    if run.islands.are_several and run.sparsity.pattern != "none":
        yield (
            f"sparsity.pattern={run.sparsity.pattern!r}: each island would choose other weights, "
            "and a meeting averages them; set islands.count=1"
        )


def refusals_of_teachers(run: Any) -> Iterator[str]:
    """Yields why islands have no teacher."""
    if run.islands.are_several and run.distill.teacher is not None:
        yield (
            f"{run.distill.source}: each of islands.count={run.islands.count} islands would hold "
            "the teacher; set distill.logits, which `spmdtrain data teach` writes, or "
            "islands.count=1"
        )


def refusals_of_stages(run: Any) -> Iterator[str]:
    """Yields why islands cannot have stages with other batches."""
    if run.islands.are_several and run.train.stages:
        yield (
            f"train.stages: each of islands.count={run.islands.count} islands reads its own "
            "share of every batch, of one size; set train.stages=[]"
        )


def refusals_of_steps(run: Any) -> Iterator[str]:
    """Yields a refusal if `train.steps` ends without a meeting, so that islands would end up with
    different weights.
    """
    islands, steps = run.islands, run.train.steps
    if not islands.are_several:
        return
    over = (steps - islands.after) % islands.interval
    if over or steps <= islands.after:
        fitting = max(steps - over, islands.after + islands.interval)
        yield (
            f"train.steps={steps}: islands meet after step {islands.after} every "
            f"{islands.interval} steps, and must after the last; set train.steps={fitting}"
        )
