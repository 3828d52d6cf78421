"""Finds the sizes by which the tensors of a model are rearranged."""

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.interop.pieces import Sizes


def sizes_of(model: TransformerConfig) -> Sizes:
    """Returns the sizes by which tensors are rearranged."""
    latent = model.latent
    return Sizes(
        model.embed,
        model.heads,
        model.kv_heads,
        model.head_dim,
        model.ffn,
        query_rank=(latent.query_rank or 0) if latent else 0,
        rope_dim=model.rope_dim,
        key_dim=model.delta.key_dim if model.delta else 0,
        state_heads=model.ssd.heads if model.ssd else 0,
        state_width=model.ssd.heads * model.ssd.head_dim if model.ssd else 0,
        state=model.ssd.state if model.ssd else 0,
    )
