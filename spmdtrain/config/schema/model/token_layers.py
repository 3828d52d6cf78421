"""[model.token_layers]: a further embedding of each token for each layer."""

from pydantic import Field

from spmdtrain.config.settings import Count, Settings


class TokenLayersConfig(Settings):
    """The per-layer embeddings of Gemma 4.

    Each layer adds a projection of `dim` channels to the stream at its end: those of its own row of
    a table, and of a projection of the embedding, times a gate that is computed from the stream.
    """

    dim: Count = Field(description="channels that a layer reads of a token")
    vocab: Count | None = Field(
        default=None, description="rows of the table of all layers; default: model.vocab"
    )
