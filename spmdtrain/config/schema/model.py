"""[model]: the shape of a transformer, and the families that preset it."""

from typing import Any, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import Count, Fraction, Positive, Settings

Attention = Literal["auto", "xla", "triton", "mosaic", "cudnn"]


class TransformerConfig(Settings):
    """A decoder-only transformer.

    `name` picks a family, which is a set of defaults; every field may be set in any family.
    """

    layers: Count = 4
    embed: Count = Field(default=128, description="width of the residual stream")
    heads: Count = Field(default=4, description="query heads")
    kv_heads: Count | None = Field(
        default=None, description="key and value heads (GQA); default: heads"
    )
    head_dim: Count | None = Field(default=None, description="default: embed / heads")
    ffn: Count | None = Field(
        default=None, description="hidden width of the mlp; default: 4 embed, swiglu 8/3 embed"
    )
    vocab: Count | None = Field(
        default=None, description="rows of the embedding; default: what the tokenizer has"
    )
    max_length: Count | None = Field(
        default=None, description="longest sequence; default: train.sequence_length"
    )
    positions: Literal["learned", "rope"]
    norm: Literal["layernorm", "rmsnorm"]
    mlp: Literal["gelu", "swiglu"]
    bias: bool = Field(description="biases in linear layers and layernorm")
    tied: bool = Field(description="one matrix for embedding and head")
    dropout: Fraction = 0.0
    attention: Attention = Field(
        default="auto",
        description="its implementation; auto: cuDNN where it can, then our kernels for the GPU, "
        "then XLA; a named one never falls back",
    )
    rope_theta: Positive = 10_000.0
    norm_epsilon: Positive = 1e-5
    make: str | None = Field(
        default=None,
        description="a model of one's own in the place of the shipped one: "
        "FILE.py:CLASS or package.module:CLASS",
    )
    extra: dict[str, Any] = Field(
        default={}, description="settings of that model, which its class types"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.head_dim is None and self.embed % self.heads:
            raise ValueError(
                f"model.embed={self.embed} is not divisible by model.heads={self.heads}; "
                "set model.head_dim"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}"
            )
        if self.positions == "rope" and self.width_per_head % 2:
            raise ValueError(
                f"model.head_dim={self.width_per_head}: rope turns pairs, so it must be even"
            )
        return self

    # A field of None takes its default from other fields: use these, not the fields.

    @property
    def width_per_head(self) -> int:
        """Channels of one head of attention: `head_dim`, or else `embed / heads`."""
        return self.head_dim or self.embed // self.heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values: `kv_heads`, or else as many as `heads`."""
        return self.kv_heads or self.heads

    @property
    def hidden(self) -> int:
        """Hidden width of the mlp: `ffn`, or else 4 embed, and for swiglu 8/3 embed, rounded up
        to a multiple of 64."""
        if self.ffn:
            return self.ffn
        if self.mlp == "gelu":
            return 4 * self.embed
        return -(-8 * self.embed // 3 // 64) * 64


class GPT(TransformerConfig):
    """GPT-2: learned positions, layernorm, gelu, biases, tied head."""

    name: Literal["gpt"] = "gpt"
    positions: Literal["learned", "rope"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    tied: bool = True


class Llama(TransformerConfig):
    """Llama: rotary positions, RMSNorm, SwiGLU, no biases, untied head."""

    name: Literal["llama"] = "llama"
    positions: Literal["learned", "rope"] = "rope"
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    mlp: Literal["gelu", "swiglu"] = "swiglu"
    bias: bool = False
    tied: bool = False
