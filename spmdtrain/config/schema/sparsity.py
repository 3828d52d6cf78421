"""[sparsity]: which weights are zero and stay so."""

import re
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field, model_validator

from spmdtrain.config.schema.finetune import frozen_by_setting
from spmdtrain.config.settings import Count, Decay, DerivedOrNone, Settings, Strings

LARGEST_GROUP = 32


class SparsityConfig(Settings):
    """The weights that are zero and stay so, while the others are trained (docs/sparsity.md)."""

    decides: ClassVar = {"": "update"}

    pattern: str = Field(
        default="none",
        description="which weights stay: all | N:M, e.g. 2:4: of each M consecutive inputs of an "
        "output the N largest (arXiv:2102.04010) | magnitude: the largest of each matrix "
        "(arXiv:1710.01878) | kept: those that are not zero at the start",
    )
    share: DerivedOrNone[Decay] = Field(
        default=None,
        description="magnitude only: share of each matrix that is zero in the end; default: 0.5",
    )
    since: DerivedOrNone[Count] = Field(
        default=None, description="step after which the first weights are set to 0; default: 1"
    )
    until: DerivedOrNone[Count] = Field(
        default=None,
        description="last step after which the zeros are chosen again; magnitude reaches its share "
        "then, by a cubic schedule; default: since",
    )
    every: DerivedOrNone[Count] = Field(
        default=None,
        description="steps from one choice to the next, up to until; default: 100, at "
        "most those from since to until",
    )
    weights: Strings = Field(
        default=(),
        description="patterns of paths of matrices, as `show` prints them; default: all that only "
        "matmuls of layers read: neither embeddings and head nor norms and routers",
    )

    def derived(self) -> dict[str, Any]:
        """Returns the share of zeros, which only magnitude has, and the steps of the choices."""
        since = (self.since or 1) if self.chooses else None
        until = (self.until or since) if self.chooses else None
        return {
            "share": 0.5 if self.pattern == "magnitude" else None,
            "since": since,
            "until": until,
            "every": min(100, until - since) if since and until and until > since else None,
        }

    def affecting_numbers(self) -> dict[str, Any]:
        return self.as_given() if self.pattern != "none" else {}

    @model_validator(mode="after")
    def _check(self):
        if self.chooses and self.pattern != "magnitude":
            self._check_group()
        if self.share is not None and self.pattern != "magnitude":
            raise ValueError(
                f"sparsity.share={self.share:g} belongs to 'magnitude', not to {self.pattern!r}; "
                "set sparsity.pattern='magnitude'"
            )
        idle = [] if self.chooses else ["since", "until", "every"]
        idle += ["weights"] if self.pattern == "none" else []
        for name in idle:
            if getattr(self, name):
                raise ValueError(
                    f"sparsity.{name}: {self.pattern!r} sets no weight to zero; set "
                    "sparsity.pattern='2:4' or 'magnitude'"
                )
        if self.since is None or self.until is None:
            return self
        if self.until < self.since:
            raise ValueError(
                f"sparsity.until={self.until} is before since={self.since}; set "
                f"sparsity.until={self.since}"
            )
        if self.every is not None and self.until < self.since + self.every:
            raise ValueError(
                f"sparsity.every={self.every}: from since={self.since} until={self.until} there "
                f"is one choice; set sparsity.until={self.since + self.every} or later"
            )
        return self

    def _check_group(self) -> None:
        """Refuses a pattern that is not N:M with N below M."""
        nonzero, size = self.group or (0, 0)
        if not 0 < nonzero < size <= LARGEST_GROUP:
            raise ValueError(
                f"sparsity.pattern={self.pattern!r} must be none, magnitude, kept or N:M with N "
                f"below M and M at most {LARGEST_GROUP}; set sparsity.pattern='2:4'"
            )

    def lost_in_small_runs(self) -> str:
        """Returns which weights are zero, if any are."""
        if self.pattern == "none":
            return ""
        return f"weights that {self.pattern} sets to zero: rounding may choose"

    @property
    def group(self) -> tuple[int, int] | None:
        """N and M of a pattern N:M."""
        numbers = re.fullmatch(r"(\d{1,9}):(\d{1,9})", self.pattern)
        return (int(numbers[1]), int(numbers[2])) if numbers else None

    @property
    def chooses(self) -> bool:
        """True if a run chooses which of its weights are zero."""
        return self.pattern not in ("none", "kept")

    @property
    def choices(self) -> int:
        """The number of times that the run chooses which weights are zero."""
        if self.since is None or self.until is None:
            return 0
        return 1 if self.every is None else (self.until - self.since) // self.every + 1


def refusals(run: Any) -> Iterator[str]:
    """Yields the settings that cannot be combined with weights that stay zero."""
    if run.sparsity.pattern == "none":
        return
    setting = f"sparsity.pattern={run.sparsity.pattern!r}"
    if run.finetune.has_adapters:
        yield (
            f"{setting}: an adapter adds a dense product to a frozen weight; set "
            "finetune.kind='full'"
        )
    for name in frozen_by_setting(run):
        yield (
            f"{setting}: the frozen layers would lose weights and never make up for them; set "
            f"{name}=0"
        )


def refusals_of_steps(run: Any) -> Iterator[str]:
    """Yields a refusal if the last choice of weights is beyond `train.steps`."""
    last, steps = run.sparsity.until, run.train.steps
    if last is not None and last > steps:
        yield (
            f"sparsity.until={last} is beyond train.steps={steps}; "
            f"set sparsity.until={steps} or earlier"
        )
