"""[model.delta]: layers that mix tokens by the gated delta rule, in a time linear in the length."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import Count, Positive, Settings


class DeltaConfig(Settings):
    """The gated delta rule (arXiv:2412.06464), or Kimi Delta Attention (arXiv:2510.26692).

    Each value head keeps a matrix of `key_dim` x `value_dim` numbers, whatever the length. A token
    lets it decay, corrects what it holds under the token's key, and reads it by the token's query.
    """

    of_no_array: ClassVar = ("rate", "gate", "epsilon")

    key_heads: Count = Field(description="heads of queries and keys")
    value_heads: Count = Field(
        description="heads of values, a multiple of key_heads: consecutive ones share a key head"
    )
    key_dim: Count = Field(description="channels of a head's queries and keys")
    value_dim: Count = Field(description="channels of a head's values")
    taps: Count = Field(
        default=4,
        description="tokens that the convolution in front of queries, keys and values sees, the "
        "token itself among them",
    )
    decay: Literal["head", "channel"] = Field(
        default="head", description="what has a decay of its own: a value head, or a key channel"
    )
    decay_rank: Count | None = Field(
        default=None,
        description="width between the two projections that decays of channels are computed by; "
        "default: key_dim",
    )
    rate: Literal[1, 2] = Field(
        default=1,
        description="the largest share of what a key holds that a token replaces; 2 reflects it",
    )
    gate: Literal["silu", "sigmoid"] = Field(
        default="silu", description="activation of the gate that multiplies the normed output"
    )
    gate_rank: Count | None = Field(
        default=None,
        description="width between the two projections that the gate is computed by; default: one "
        "projection",
    )
    epsilon: Positive | None = Field(
        default=None, description="epsilon of the output's norm; default: model.norm_epsilon"
    )

    norm_places: Literal["before", "after", "both"] | None = Field(
        default=None,
        description="where the norms of layers with this mixer stand; default: model.norm_places",
    )

    @model_validator(mode="after")
    def _check(self):
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"model.delta.value_heads={self.value_heads} is not a multiple of "
                f"model.delta.key_heads={self.key_heads}"
            )
        if self.decay_rank is not None and self.decay != "channel":
            raise ValueError("model.delta.decay_rank needs model.delta.decay='channel'")
        return self

    @property
    def group(self) -> int:
        """The value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def mixed_widths(self) -> tuple[int, int, int]:
        """The channels of a key head that the convolution mixes: its query, key and values."""
        return self.key_dim, self.key_dim, self.group * self.value_dim

    @property
    def mixed_width(self) -> int:
        """The sum of `mixed_widths`."""
        return sum(self.mixed_widths)
