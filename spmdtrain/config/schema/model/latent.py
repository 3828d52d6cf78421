"""[model.latent]: attention whose keys and values are computed from a narrow latent."""

from typing import ClassVar

from pydantic import Field, model_validator

from spmdtrain.config.settings import Count, Positive, Settings


class LatentConfig(Settings):
    """Multi-head latent attention, MLA (arXiv:2405.04434, section 2.1).

    Keys and values of all heads are computed from one latent of the token, and queries from
    another. A cache holds the latent and the rotated channels of keys, which all heads share.
    """

    of_no_array: ClassVar = ("epsilon",)

    rank: Count = Field(description="width of the latent that keys and values are computed from")
    query_rank: Count | None = Field(
        default=None,
        description="width of the latent that queries are computed from; default: none, queries "
        "come straight from the residual stream",
    )
    plain_dim: Count = Field(
        description="channels of a head's queries and keys that are not rotated"
    )
    rope_dim: Count = Field(
        description="further channels of a head's queries and keys, which are rotated by their "
        "position; even"
    )
    value_dim: Count = Field(description="channels of a head's values")
    epsilon: Positive | None = Field(
        default=None, description="epsilon of the latents' norms; default: model.norm_epsilon"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.rope_dim % 2:
            raise ValueError(
                f"model.latent.rope_dim={self.rope_dim}: rope rotates pairs, so it must be even"
            )
        return self
