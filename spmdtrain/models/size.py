"""Counts the FLOPs of a model in closed form."""

from spmdtrain.config.schema import LayerParts, TransformerConfig
from spmdtrain.config.schema.model.layer_kinds import singles_of
from spmdtrain.models.mixer_sizes import chunk_of, matrices, mixer_sizes


def matmul_parameters(config: TransformerConfig) -> int:
    """Counts the parameters that multiply every token.

    They are the matrices of the blocks and the head; the embedding is a lookup. Of the
    experts only those that a token goes through count, and the router. The head counts once for
    each token that is predicted from one.
    """
    depth = config.further_depth
    total = (1 + depth) * config.embed * (config.vocab or 0) + 2 * depth * config.embed**2
    for layer in _blocks(config):
        for mixer in singles_of(layer.mixer):
            sizes = mixer_sizes(config, mixer)
            own = config.of_layer(layer)
            total += matrices(sizes, config.embed) if sizes else _attention_parameters(own)
        total += _mlp_parameters(config, layer)
        total += 3 * config.embed * config.token_layers.dim if config.token_layers else 0
    return total


def _blocks(config: TransformerConfig) -> tuple[LayerParts, ...]:
    """Returns the parts of each layer, and of the blocks that predict further tokens."""
    return config.layer_parts + (config.further_parts,) * config.further_depth


def _mlp_parameters(config: TransformerConfig, layer: LayerParts) -> int:
    """Counts the parameters of the matrices of a layer's mlp that a token goes through."""
    per_hidden = (3 if config.is_gated else 2) * config.embed
    if layer.mlp == "none":
        return 0
    own = config.of_layer(layer)
    experts = own.experts
    if layer.mlp == "mlp" or experts is None:
        return per_hidden * own.ffn
    of_chosen = per_hidden // config.embed * config.expert_width * experts.chosen * experts.ffn
    projections = experts.count + experts.shared_gate + 2 * (experts.width or 0)
    return of_chosen + per_hidden * experts.shared_width + config.embed * projections


def _attention_parameters(config: TransformerConfig) -> int:
    """Counts the parameters of the matrices of one layer's attention."""
    dim, heads, groups = config.head_dim, config.heads, config.kv_heads
    out = heads * config.value_width * config.embed
    latent = config.latent
    if latent is None:
        gates = {"none": 0, "channel": heads * dim, "head": heads}[config.output_gate]
        keys = 1 if config.full and config.full.keys_are_values else 2
        keys = 0 if config.shared_keys else keys
        return config.embed * (dim * (heads + keys * groups) + gates) + out
    down = config.embed * ((latent.query_rank or 0) + latent.rank + latent.rope_dim)
    queries = (latent.query_rank or config.embed) * heads * dim
    return down + queries + latent.rank * heads * (latent.plain_dim + latent.value_dim) + out


def train_flops_per_token(config: TransformerConfig, sequence_length: int) -> float:
    """Returns the FLOPs of forward and backward per token (arXiv:2204.02311, appendix B).

    They are the numerator of MFU: 6 per matmul parameter, and for attention 12 x heads x head_dim
    in each layer for each key that a token sees: half of the length on average, because it is
    causal, or fewer through a window. If values and keys have different widths, head_dim is the
    mean of both. Layers with another mixer count that instead. Recomputation does not count.
    """
    depth = config.further_depth
    kinds = (*config.layer_kinds, *config.layer_kinds[-1:] * depth)
    mixing = 0.0
    for kind, layer in zip(kinds, _blocks(config), strict=True):
        for mixer in singles_of(layer.mixer):
            if sizes := mixer_sizes(config, mixer):
                mixing += 3 * sizes.flops(chunk_of(sequence_length))
            else:
                own = config.of_layer(layer)
                of_pair = 6 * own.heads * (own.head_dim + own.value_width)
                pairs = seen_pairs(sequence_length, kind.window, kind.chunk)
                mixing += of_pair * pairs / sequence_length
    return 6 * matmul_parameters(config) + mixing


def seen_pairs(length: int, window: int = 0, chunk: int = 0) -> float:
    """Counts the pairs of query and key that causal attention sees in a sequence, as in `counting`.

    `window`: tokens that a query sees, including itself; 0: all, which count half of the square.
    `chunk`: tokens of a block that it does not leave; 0: there are none.
    """
    if 0 < chunk < length:
        whole, rest = divmod(length, chunk)
        return (whole * chunk * (chunk + 1) + rest * (rest + 1)) / 2
    if not window or window >= length:
        return length * length / 2
    return window * length - window * (window - 1) / 2
