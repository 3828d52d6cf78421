"""[model.rope_scaling]: rotary positions beyond the length that a model was trained for."""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import Count, Derived, Positive, Settings, Share

Factors = Annotated[tuple[Positive, ...], Field(strict=False)]
# The settings that only some kinds read.
READ_BY = {
    "original_length": ("llama3", "yarn", "longrope"),
    "low_factor": ("llama3",),
    "high_factor": ("llama3",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "truncate": ("yarn",),
    "short": ("longrope",),
    "long": ("longrope",),
    "use": ("longrope",),
    "share": ("proportional",),
}


class RopeScaling(Settings):
    """The scaling of the frequencies of rotary positions.

    linear: all of them (arXiv:2306.15595). llama3 and yarn (arXiv:2309.00071): those whose wave is
    longer than the original context, with a ramp between. longrope (arXiv:2402.13753): each by its
    own factor. proportional: all of them, and only the fastest turn at all, as in Gemma 4.
    """

    of_no_array: ClassVar = ("",)

    kind: Literal["linear", "llama3", "yarn", "longrope", "proportional"]
    factor: Positive = Field(
        description="longest sequence as a multiple of original_length; at least 1"
    )
    original_length: Count | None = Field(
        default=None,
        description="tokens of a sequence before the scaling; llama3, yarn and longrope",
    )
    low_factor: Positive = Field(
        default=1.0, description="llama3: waves longer than original_length / this are divided"
    )
    high_factor: Positive = Field(
        default=4.0, description="llama3: waves shorter than original_length / this stay"
    )
    beta_fast: Positive = Field(
        default=32.0,
        description="yarn: frequencies with more turns than this in original_length stay",
    )
    beta_slow: Positive = Field(
        default=1.0,
        description="yarn: frequencies with fewer turns than this in original_length are divided",
    )
    truncate: bool = Field(
        default=True, description="yarn: the ends of the ramp are rounded to whole channels"
    )
    scale: Positive | None = Field(
        default=None,
        description="factor of cosines and sines; default: 1, yarn 0.1 ln(factor) + 1, longrope "
        "sqrt(1 + ln(factor) / ln(original_length))",
    )
    short: Factors = Field(
        default=(), description="longrope: a divisor for each frequency, up to original_length"
    )
    long: Factors = Field(default=(), description="longrope: the same, for longer sequences")
    use: Derived[Literal["short", "long"]] = Field(
        default=None,
        description="longrope: which divisors all sequences of the run use; default: long if "
        "model.max_length is beyond original_length",
    )
    share: Share = Field(
        default=1.0,
        description="proportional: share of a head's pairs of channels that turn, the fastest ones",
    )

    @model_validator(mode="after")
    def _check(self):
        for name, kinds in READ_BY.items():
            is_set = getattr(self, name) != type(self).model_fields[name].default
            if is_set and self.kind not in kinds:
                owners = " or ".join(map(repr, kinds))
                raise ValueError(
                    f"model.rope_scaling.{name} belongs to kind {owners}, not {self.kind!r}"
                )
        if self.factor < 1:
            raise ValueError(f"model.rope_scaling.factor={self.factor:g} is below 1")
        if self.kind in READ_BY["original_length"] and self.original_length is None:
            raise ValueError(
                f"model.rope_scaling.kind={self.kind!r} needs model.rope_scaling.original_length"
            )
        if self.kind == "longrope" and self.scale is None and self.original_length == 1:
            raise ValueError(
                "model.rope_scaling.original_length=1 has no logarithm to scale by; set "
                "model.rope_scaling.scale"
            )
        if self.kind == "llama3" and self.high_factor < self.low_factor:
            raise ValueError(
                f"model.rope_scaling.high_factor={self.high_factor:g} is below "
                f"low_factor={self.low_factor:g}"
            )
        if self.kind == "yarn" and self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"model.rope_scaling.beta_fast={self.beta_fast:g} is not above "
                f"beta_slow={self.beta_slow:g}"
            )
        if self.kind == "longrope":
            self._check_lists()
        return self

    def _check_lists(self) -> None:
        """Refuses a missing list of divisors: any, or the one that `use` names."""
        for name in (self.use,) if self.use else ("short", "long"):
            if not getattr(self, name):
                raise ValueError(
                    f"model.rope_scaling.kind='longrope' needs model.rope_scaling.{name}"
                )

    def for_length(self, length: int | None) -> "RopeScaling":
        """Returns the scaling of a model that reads sequences of up to `length` tokens."""
        if self.kind != "longrope" or length is None or self.original_length is None:
            return self
        return self.with_derived(use="long" if length > self.original_length else "short")

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines: `scale`, or else that of the kind."""
        if self.scale is not None:
            return self.scale
        if self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1
        if self.kind == "longrope" and self.original_length is not None:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        return 1.0

    @property
    def divisors(self) -> tuple[float, ...]:
        """The divisors of the frequencies, for longrope."""
        return self.long if self.use == "long" else self.short


def check_rope(model: Any) -> None:
    """Refuses rotary settings of a model that do not fit together.

    Raises ValueError.
    """
    if model.rope_dim % 2 or not model.rope_dim:
        share = f" and model.rope_share={model.rope_share:g}" if model.rope_share < 1 else ""
        raise ValueError(
            f"model.head_dim={model.head_dim}{share}: rope rotates pairs, so {model.rope_dim} "
            "channels must be even"
        )
    if model.rope_theta_window is not None and not any(model.windows):
        raise ValueError(
            f"model.rope_theta_window={model.rope_theta_window:g} only applies to layers with "
            "a window, and model.windows has none"
        )
    scaling = model.rope_scaling
    if scaling and scaling.kind == "yarn" and model.rope_theta <= 1:
        raise ValueError(
            f"model.rope_theta={model.rope_theta:g}: yarn needs falling frequencies, which "
            "take a theta above 1"
        )
    for name in ("short", "long") if scaling else ():
        divisors = getattr(scaling, name)
        if divisors and len(divisors) != model.rope_dim // 2:
            raise ValueError(
                f"model.rope_scaling.{name} has {len(divisors)} factors, and "
                f"{model.rope_dim} channels turn in {model.rope_dim // 2} pairs"
            )


def refuse_rope(model: Any) -> None:
    """Refuses rotary settings of a model whose positions are learned.

    Raises ValueError.
    """
    for name in ("rope_theta_window", "rope_layers", "rope_share", "rope_scaling"):
        if getattr(model, name) != type(model).model_fields[name].default:
            raise ValueError(f"model.{name} needs model.positions='rope'")
