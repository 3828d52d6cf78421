"""[mesh], [rules] and [compression]: devices along each axis, what is split over them, and how
gradients are compressed.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import (
    Count,
    CountOrZero,
    DerivedOrNone,
    Fraction,
    LocalPath,
    NonNegative,
    Positive,
    Settings,
    Strings,
)

# Slowest link first.
MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


class MeshConfig(Settings):
    """The number of devices along each mesh axis, slowest link first.

    Their product is the device count.

    1 switches an axis off. One axis may be -1: it takes all remaining devices.
    """

    pipeline: int = Field(default=1, description="layers are split into stages")
    data: int = Field(default=1, description="batch is split, parameters are copied")
    fsdp: int = Field(default=1, description="batch is split, parameters are split too (ZeRO-3)")
    expert: int = Field(
        default=1, description="batch is split; experts of a mixture are distributed"
    )
    context: int = Field(default=1, description="sequence is split")
    tensor: int = Field(
        default=1, description="heads, ffn and vocabulary are split; needs the fastest links"
    )
    collective_matmul: bool = Field(
        default=False,
        description="overlap each matmul over tensor with the gather or scatter of its tokens; "
        "needs rules.activations.stream_time = context,tensor",
    )
    elastic: bool = Field(
        default=True,
        description="a run resumed on another number of devices may change the sizes of data and "
        "fsdp; global batch and order of the samples stay the same",
    )

    @model_validator(mode="after")
    def _check(self):
        sizes = self.sizes
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise ValueError(
                    f"mesh.{axis}={size}: an axis spans at least 1 device (or -1: fill)"
                )
        filled = [f"mesh.{axis}" for axis, size in sizes.items() if size == -1]
        if len(filled) > 1:
            raise ValueError(f"{' and '.join(filled)} are both -1; only one axis can be filled")
        return self

    @property
    def sizes(self) -> dict[str, int]:
        """The devices along each axis, in mesh order (slowest link first)."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}


class RulesConfig(Settings):
    """The overrides of the sharding rules: logical axis -> mesh axes.

    A new name adds a rule, for models that have other logical axes.
    """

    parameters: dict[str, Strings] = {}
    activations: dict[str, Strings] = {}


EIGHT_BITS = ("int8", "float8")
# The codecs to which other settings belong.
OF_CODECS = {
    "within": EIGHT_BITS,
    "rank": ("lowrank",),
    "ranks": ("lowrank",),
    "keep": ("topk",),
    "after": ("lowrank", "topk"),
}
MOST_RANKS = 64
Rank = Annotated[int, Field(ge=1, le=MOST_RANKS)]


class CompressionConfig(Settings):
    """The compression of gradients of matrices when they are reduced over `data`."""

    codec: Literal["none", "int8", "float8", "lowrank", "topk"] = Field(
        default="none",
        description="as precision.accumulate says | 8-bit integers, or e4m3 floats, with a "
        "float32 scale for each block (arXiv:2306.10209) | thin factors of each matrix "
        "(arXiv:1905.13727) | the largest numbers (arXiv:1809.07599); the last two keep on each "
        "device what they have not sent yet; vectors, and what `fsdp` gathers by layer, are not "
        "compressed",
    )
    block: Annotated[int, Field(ge=16, le=65536)] = Field(
        default=256, description="numbers that share a scale"
    )
    within: DerivedOrNone[Count] = Field(
        default=None,
        description="int8 and float8 only: neighbours along data, such as those of a host, that "
        "sum in float32; only these sums are compressed; default: 1",
    )
    rank: DerivedOrNone[Rank] = Field(
        default=None, description="lowrank only: columns of each factor; default: 4"
    )
    ranks: dict[str, Annotated[int, Field(ge=0, le=MOST_RANKS)]] = Field(
        default={},
        description="lowrank only: pattern of paths, as `show` prints them -> rank of their "
        "matrices, 0: not compressed; the first match counts, others have rank",
    )
    keep: DerivedOrNone[Annotated[float, Field(gt=0, le=0.25)]] = Field(
        default=None, description="topk only: share of the numbers that is sent; default: 0.01"
    )
    after: DerivedOrNone[CountOrZero] = Field(
        default=None,
        description="lowrank and topk only: first steps, which are not compressed; default: 0",
    )

    def derived(self) -> dict[str, Any]:
        """Returns the settings of some codecs, which others do not have."""
        return {
            "within": 1 if self.codec in EIGHT_BITS else None,
            "rank": 4 if self.codec == "lowrank" else None,
            "keep": 0.01 if self.codec == "topk" else None,
            "after": 0 if self.has_feedback else None,
        }

    @model_validator(mode="after")
    def _check(self):
        for name, fitting in OF_CODECS.items():
            value = getattr(self, name)
            if value not in (None, {}) and self.codec not in fitting:
                said = "" if isinstance(value, dict) else f"={value:g}"
                raise ValueError(
                    f"compression.{name}{said} belongs to "
                    f"{' and '.join(map(repr, fitting))}, not to {self.codec!r}; set "
                    f"compression.codec={fitting[0]!r}"
                )
        return self

    @property
    def has_feedback(self) -> bool:
        """True if the codec keeps on each device what it has not sent, for later steps."""
        return self.codec in ("lowrank", "topk")


class IslandsConfig(Settings):
    """The islands of a run, which train apart, each on its own mesh, and average their weights
    every few steps.

    Each island is a separate run, with `train.global_batch` sequences a step (docs/islands.md).
    """

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
        description="what a meeting makes of the mean change of the islands: a step of SGD with "
        "Nesterov momentum (arXiv:2311.08105) | the change itself",
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

    @property
    def are_several(self) -> bool:
        """True if this run is one of several islands."""
        return self.count > 1

    @property
    def interval(self) -> int:
        """The steps from one meeting to the next, of any fragment."""
        return self.every // self.fragments
