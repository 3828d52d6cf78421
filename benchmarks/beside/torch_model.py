"""GPT-2 and Llama in plain PyTorch, as one would write them by hand: what compare_torch.py runs
beside ours.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from spmdtrain.config.schema import TransformerConfig


def norm(config: TransformerConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.embed, eps=config.norm_epsilon)
    return nn.LayerNorm(config.embed, eps=config.norm_epsilon, bias=config.bias)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """x [b, h, t, d]: halves rotated against each other."""
    first, second = x.float().chunk(2, -1)
    turned = first * cosine - second * sine, second * cosine + first * sine
    return torch.cat(turned, -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        heads, shared, d = config.heads, config.kv_heads, config.head_dim
        self.widths = [heads * d, shared * d, shared * d]
        linear = lambda fan_in, fan_out: nn.Linear(fan_in, fan_out, bias=config.bias)  # noqa: E731
        self.attention_norm, self.mlp_norm = norm(config), norm(config)
        self.qkv, self.out = linear(config.embed, sum(self.widths)), linear(heads * d, config.embed)
        self.gated = config.mlp == "swiglu"
        self.up = linear(config.embed, (1 + self.gated) * config.ffn)
        self.down = linear(config.ffn, config.embed)

    def forward(
        self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        b, t, _ = x.shape
        parts = self.qkv(self.attention_norm(x)).split(self.widths, -1)
        q, k, v = (part.view(b, t, -1, self.config.head_dim).transpose(1, 2) for part in parts)
        if turns is not None:
            q, k = rotate(q, *turns), rotate(k, *turns)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        h = self.up(self.mlp_norm(x))
        if self.gated:
            gate, value = h.chunk(2, -1)
            return x + self.down(F.silu(gate) * value)
        return x + self.down(F.gelu(h, approximate="tanh"))

    def values(self, given: dict[str, np.ndarray]) -> list[tuple[nn.Parameter, np.ndarray]]:
        """(parameter, its value) from those of the framework's block, whose one projection has q, k
        and v per head.
        """
        qkv = given["attention.qkv_eknd"]
        embed, shared, slots, d = qkv.shape

        def cut(x):
            parts = x[..., : slots - 2, :], x[..., slots - 2, :], x[..., slots - 1, :]
            return np.concatenate([part.reshape(len(x), -1) for part in parts], -1)

        pairs = [
            (self.qkv.weight, cut(qkv).T),
            (self.out.weight, given["attention.out_kgde"].reshape(-1, embed).T),
            (self.up.weight, given["mlp.up_ef"].reshape(embed, -1).T),
            (self.down.weight, given["mlp.down_fe"].T),
        ]
        if self.config.bias:
            pairs += [
                (self.qkv.bias, cut(given["attention.qkv_bias"].reshape(1, shared, slots, d))[0]),
                (self.out.bias, given["attention.out_bias"]),
                (self.up.bias, given["mlp.up_bias"].reshape(-1)),
                (self.down.bias, given["mlp.down_bias"]),
            ]
        pairs += scaled(self.attention_norm, given, "attention_norm.")
        return pairs + scaled(self.mlp_norm, given, "mlp_norm.")


class Transformer(nn.Module):
    """`forward(tokens [b, t], targets [b, t])`: mean loss of the next token."""

    def __init__(self, config: TransformerConfig, length: int):
        super().__init__()
        self.table = nn.Embedding(config.vocab, config.embed)
        learned = config.positions == "learned"
        self.positions = (
            nn.Embedding(config.max_length or length, config.embed) if learned else None
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = norm(config)
        self.head = nn.Linear(config.embed, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.table.weight
        half = config.head_dim // 2
        angle = torch.arange(length)[:, None] * config.rope_theta ** (-torch.arange(half) / half)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        turns = (self.cosine, self.sine) if self.positions is None else None
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, turns)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))

    def take(self, given: dict[str, np.ndarray]) -> None:
        """The framework's values, by its names; a KeyError says which name it no longer has."""
        pairs = [(self.table.weight, given["tokens.table_ve"]), *scaled(self.norm, given, "norm.")]
        if self.positions is not None:
            pairs.append((self.positions.weight, given["positions_te"]))
        if self.head.weight is not self.table.weight:
            pairs.append((self.head.weight, given["unembed_ve"]))
        stack = {
            name.removeprefix("blocks.layer."): x
            for name, x in given.items()
            if name.startswith("blocks.")
        }
        for i, block in enumerate(self.blocks):
            pairs += block.values({name: x[i] for name, x in stack.items()})
        with torch.no_grad():
            for parameter, value in pairs:
                parameter.copy_(torch.from_numpy(np.array(value)))
        taken = {id(parameter) for parameter, _ in pairs}
        assert taken == {id(parameter) for parameter in self.parameters()}, (
            "a parameter was given no value"
        )


def scaled(
    norm: nn.Module, given: dict[str, np.ndarray], prefix: str
) -> list[tuple[nn.Parameter, np.ndarray]]:
    pairs = [(norm.weight, given[prefix + "scale_e"])]
    return (
        pairs
        if getattr(norm, "bias", None) is None
        else [*pairs, (norm.bias, given[prefix + "bias_e"])]
    )
