"""[model.latent]: attention whose keys and values are made of a narrow latent."""

from pydantic import Field, model_validator

from spmdtrain.config.settings import Count, Settings


class LatentConfig(Settings):
    """Multi-head latent attention, MLA (arXiv:2405.04434, section 2.1).

    Keys and values of all heads are made of one latent of the token, and queries of another. A
    cache holds the latent and the turned channels of keys, which all heads share.
    """

    rank: Count = Field(description="width of the latent of which keys and values are made")
    query_rank: Count | None = Field(
        default=None,
        description="width of the latent of which queries are made; default: none, the stream",
    )
    plain_dim: Count = Field(
        description="channels of a head's queries and keys that do not turn with the position"
    )
    rope_dim: Count = Field(
        description="further channels of a head's queries and keys, which turn with the position; "
        "even"
    )
    value_dim: Count = Field(description="channels of a head's values")

    @model_validator(mode="after")
    def _check(self):
        if self.rope_dim % 2:
            raise ValueError(
                f"model.latent.rope_dim={self.rope_dim}: rope turns pairs, so it must be even"
            )
        return self
