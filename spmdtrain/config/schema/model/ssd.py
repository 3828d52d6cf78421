"""[model.ssd]: layers that mix tokens by the state space of Mamba-2, in linear time."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import Count, NonNegative, Positive, Settings

Factors = Annotated[tuple[Positive, ...], Field(strict=False)]


PARTS = 5  # of the projection from the stream


class SsdConfig(Settings):
    """The state-space duality of Mamba-2 (arXiv:2405.21060).

    Each head keeps a matrix of `state` x `head_dim` numbers, whatever the length. A token lets it
    decay, adds to it, and reads it; the heads of a group share the keys and queries of that.
    """

    of_no_array: ClassVar = (
        *("norm_first", "epsilon", "smallest_step", "largest_step"),
        *("factors", "in_factor", "out_factor"),
    )

    heads: Count = Field(description="heads of values")
    head_dim: Count = Field(description="channels of a head")
    groups: Count = Field(default=1, description="groups of heads, which share keys and queries")
    state: Count = Field(default=128, description="channels of keys and queries")
    taps: Count = Field(
        default=4,
        description="tokens that the convolution in front of values, keys and queries sees, the "
        "token itself among them",
    )
    taps_bias: bool = Field(default=True, description="bias of the convolution")
    norm: Literal["group", "none"] = Field(
        default="group", description="RMSNorm of the output: of each group at once, or none"
    )
    norm_first: bool = Field(
        default=False, description="the norm stands before the gate, instead of behind it"
    )
    epsilon: Positive | None = Field(
        default=None, description="epsilon of that norm; default: model.norm_epsilon"
    )
    smallest_step: NonNegative = Field(
        default=0.0,
        description="the time of a token, by which it decays and adds, is at least so long",
    )
    largest_step: Positive | None = Field(
        default=None, description="the time of a token is at most this; default: any"
    )
    factors: Factors = Field(
        default=(1.0, 1.0, 1.0, 1.0, 1.0),
        description="factors of the projections to gates, values, keys, queries and times",
    )
    in_factor: Positive = Field(default=1.0, description="factor of the mixer's input")
    out_factor: Positive = Field(default=1.0, description="factor of the mixer's output")

    @model_validator(mode="after")
    def _check(self):
        if self.heads % self.groups:
            raise ValueError(
                f"model.ssd.heads={self.heads} is not a multiple of model.ssd.groups={self.groups}"
            )
        if len(self.factors) != PARTS:
            raise ValueError(
                f"model.ssd.factors has {len(self.factors)} numbers; set {PARTS}, for gates, "
                "values, keys, queries and times"
            )
        if self.largest_step is not None and self.largest_step < self.smallest_step:
            raise ValueError(
                f"model.ssd.largest_step={self.largest_step:g} is below "
                f"model.ssd.smallest_step={self.smallest_step:g}"
            )
        return self

    @property
    def group(self) -> int:
        """The heads of a group."""
        return self.heads // self.groups
