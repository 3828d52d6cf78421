"""Counts the FLOPs of a model in closed form."""

from spmdtrain.config.schema import TransformerConfig


def matmul_parameters(config: TransformerConfig) -> int:
    """Counts the parameters that multiply every token.

    They are the matrices of the blocks and the head; the embedding is a lookup. Of experts, those
    that a token goes through count, and the router.
    """
    dim, heads, groups = config.width_per_head, config.heads, config.key_value_heads
    attention = config.embed * dim * (heads + 2 * groups) + heads * dim * config.embed
    per_hidden = (3 if config.is_gated else 2) * config.embed
    total = config.layers * attention + config.embed * (config.vocab or 0)
    for has_experts in config.has_experts:
        if not has_experts or config.experts is None:
            total += per_hidden * config.hidden
            continue
        ways = config.experts.chosen + config.experts.shared
        total += per_hidden * config.expert_hidden * ways + config.embed * config.experts.count
    return total


def train_flops_per_token(config: TransformerConfig, sequence_length: int) -> float:
    """Returns the FLOPs of forward and backward per token (arXiv:2204.02311, appendix B).

    They are the numerator of MFU: 6 per matmul parameter, and for attention 12 x heads x head_dim
    in each layer for each key that a token sees: half of the length on average, because it is
    causal, or fewer through a window. Recomputation does not count.
    """
    pairs = sum(seen_pairs(sequence_length, kind.window) for kind in config.layer_kinds)
    attention = 12 * config.heads * config.width_per_head * pairs / sequence_length
    return 6 * matmul_parameters(config) + attention


def seen_pairs(length: int, window: int = 0) -> float:
    """Counts the pairs of query and key that causal attention sees in a sequence, as in `counting`.

    `window`: tokens that a query sees, including itself; 0: all, which count half of the square.
    """
    if not window or window >= length:
        return length * length / 2
    return window * length - window * (window - 1) / 2
