"""Counts the FLOPs of a model in closed form."""

from spmdtrain.config.schema import TransformerConfig


def matmul_parameters(config: TransformerConfig) -> int:
    """Parameters that multiply every token.

    They are the matrices of the blocks and the head; the embedding is a lookup.
    """
    dim, heads, groups = config.width_per_head, config.heads, config.key_value_heads
    attention = config.embed * dim * (heads + 2 * groups) + heads * dim * config.embed
    mlp = (3 if config.mlp == "swiglu" else 2) * config.embed * config.hidden
    return config.layers * (attention + mlp) + config.embed * (config.vocab or 0)


def train_flops_per_token(config: TransformerConfig, sequence_length: int) -> float:
    """FLOPs of forward and backward per token, the numerator of MFU (arXiv:2204.02311, appendix B).

    They are 6 per matmul parameter, and for attention 12 x layers x heads x head_dim x length,
    halved because it is causal. Recomputation does not count.
    """
    attention = 12 * config.layers * config.heads * config.width_per_head * sequence_length / 2
    return 6 * matmul_parameters(config) + attention
