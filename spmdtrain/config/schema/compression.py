"""[compression]: how gradients are compressed when they are reduced over `data`."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from spmdtrain.config.settings import Count, CountOrZero, DerivedOrNone, Settings

EightBits = Literal["int8", "float8"]
EIGHT_BITS: tuple[EightBits, ...] = get_args(EightBits)
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

    decides: ClassVar = {"": "gradient"}

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
            "within": 1 if self.eight_bits else None,
            "rank": 4 if self.codec == "lowrank" else None,
            "keep": 0.01 if self.codec == "topk" else None,
            "after": 0 if self.has_feedback else None,
        }

    def affecting_numbers(self) -> dict[str, Any]:
        return self.as_given() if self.codec != "none" else {}

    @model_validator(mode="after")
    def _check(self):
        for name, fitting in OF_CODECS.items():
            value = getattr(self, name)
            if value not in (None, {}) and self.codec not in fitting:
                number = "" if isinstance(value, dict) else f"={value:g}"
                raise ValueError(
                    f"compression.{name}{number} belongs to "
                    f"{' and '.join(map(repr, fitting))}, not to {self.codec!r}; set "
                    f"compression.codec={fitting[0]!r}"
                )
        return self

    def lost_in_small_runs(self) -> str:
        """Returns how gradients cross `data`, unless in full."""
        if self.codec == "none":
            return ""
        return f"gradients that cross `data` in {self.codec}: in float32"

    @property
    def eight_bits(self) -> EightBits | None:
        """The 8-bit format in which gradients cross in blocks; None: they cross otherwise."""
        return self.codec if self.codec in EIGHT_BITS else None

    @property
    def exchanges(self) -> bool:
        """True if each shard sends all others their parts at once, in an all-to-all."""
        return self.eight_bits is not None or self.codec == "topk"

    @property
    def has_feedback(self) -> bool:
        """True if the codec keeps on each device what it has not sent, for later steps."""
        return self.codec in ("lowrank", "topk")


def refusals(run: Any) -> Iterator[str]:
    """Yields the refusal of a codec with feedback under `train.zero`."""
    compression = run.compression
    if compression.has_feedback and run.train.zero:
        yield (
            f"compression.codec={compression.codec!r} keeps 4 bytes of each weight on "
            "every device, more than train.zero=1 saves; set train.zero=0, or "
            "compression.codec='int8'"
        )


def refusals_of_steps(run: Any) -> Iterator[str]:
    """Yields a refusal if a run of `train.steps` ends before it compresses anything."""
    first, steps = run.compression.after, run.train.steps
    if first is not None and first >= steps:
        yield (
            f"compression.after={first} leaves nothing to compress of train.steps="
            f"{steps}; set compression.after={steps // 3}"
        )
