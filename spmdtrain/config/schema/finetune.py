"""[finetune] and [sparsity]: which weights of a model are trained, with which adapters, and which
stay zero.
"""

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import (
    Count,
    CountOrZero,
    Decay,
    DerivedOrNone,
    Fraction,
    Positive,
    Settings,
    Strings,
)

LINEAR = ("q", "k", "v", "out", "gate", "up", "down")  # the linear layers of a shipped block


class FinetuneConfig(Settings):
    """The weights that are trained: all, those of the upper layers, or small adapters of a frozen
    model.
    """

    kind: Literal["full", "lora", "dora"] = Field(
        default="full",
        description="all weights | a low-rank product added to each frozen matrix "
        "(arXiv:2106.09685) | the same, with the norm of each row learned separately "
        "(arXiv:2402.09353)",
    )
    frozen_layers: CountOrZero = Field(
        default=0,
        description="number of first layers that are frozen, together with the weights that only "
        "embed tokens; they keep no activations and have no backward pass",
    )
    rank: Count = Field(default=16, description="rank of an adapter's product")
    alpha: Positive = Field(
        default=32.0, description="an adapter's product is multiplied by alpha / rank"
    )
    rank_stabilised: bool = Field(
        default=False, description="multiply by alpha / sqrt(rank) instead (arXiv:2312.03732)"
    )
    targets: Strings = Field(
        default=LINEAR,
        description="linear layers of a block that get an adapter; in a custom model patterns of "
        "their paths, as `show` prints them",
    )
    base: Literal["float", "int8", "nf4"] = Field(
        default="float",
        description="how adapted weights are stored: as precision.frozen says | in 8 bits, with "
        "a scale for each output | in NF4, in blocks of 64, 4.1 bits "
        "(arXiv:2305.14314)",
    )
    dropout: Fraction = Field(default=0.0, description="dropout of an adapter's input")
    also_train: Strings = Field(
        default=(), description="patterns of paths of further weights that are trained in full"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.kind == "full":
            for name, field in type(self).model_fields.items():
                if name != "frozen_layers" and getattr(self, name) != field.default:
                    raise ValueError(
                        f"finetune.{name}={getattr(self, name)!r} only applies to adapters, and "
                        "finetune.kind='full' trains all weights; set finetune.kind='lora'"
                    )
        elif not self.targets:
            raise ValueError(
                "finetune.targets is empty, so there would be no adapter; set "
                f"finetune.targets={','.join(LINEAR)}"
            )
        return self

    @property
    def has_adapters(self) -> bool:
        """True if adapters are trained, and the weights that they belong to are frozen."""
        return self.kind != "full"

    @property
    def scale(self) -> float:
        """The factor by which an adapter's product is multiplied."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


LARGEST_GROUP = 32


class SparsityConfig(Settings):
    """The weights that are zero and stay so, while the others are trained (docs/sparsity.md)."""

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
        description="last step after which it is chosen anew which weights are zero; magnitude "
        "reaches its share then, by a cubic schedule; default: since",
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
        """Refuses a pattern that is no N:M with N below M."""
        kept, size = self.group or (0, 0)
        if not 0 < kept < size <= LARGEST_GROUP:
            raise ValueError(
                f"sparsity.pattern={self.pattern!r} must be none, magnitude, kept or N:M with N "
                f"below M and M at most {LARGEST_GROUP}; set sparsity.pattern='2:4'"
            )

    @property
    def group(self) -> tuple[int, int] | None:
        """N and M of a pattern N:M."""
        found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", self.pattern)
        return (int(found[1]), int(found[2])) if found else None

    @property
    def chooses(self) -> bool:
        """True if a run chooses which of its weights are zero."""
        return self.pattern not in ("none", "kept")

    @property
    def choices(self) -> int:
        """The number of times that it is chosen which weights are zero."""
        if self.since is None or self.until is None:
            return 0
        return 1 if self.every is None else (self.until - self.since) // self.every + 1
