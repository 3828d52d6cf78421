"""[model.temperature]: queries that grow with their position, so that attention stays sharp in long
sequences.
"""

from typing import ClassVar, Literal

from pydantic import Field

from spmdtrain.config.settings import Count, Positive, Settings


class TemperatureConfig(Settings):
    """The factor 1 + weight * ln(1 + floor((position + offset) / length)) of queries.

    It stands behind the rotary positions, and counts from the start of a token's document. Llama 4
    and Ministral 3 have it.
    """

    of_no_array: ClassVar = ("",)

    weight: Positive = Field(description="weight of the logarithm")
    length: Count = Field(description="tokens in which the factor stays the same: at first 1")
    offset: Literal[0, 1] = Field(
        default=0, description="added to the position, which is 0 for the first token"
    )
    layers: Literal["all", "no_rope"] = Field(
        default="all", description="all layers, or those without rotary positions"
    )
