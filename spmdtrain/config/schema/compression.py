"""[compression]: the bytes in which gradients cross the data axis."""

from typing import Annotated, Literal

from pydantic import Field

from spmdtrain.config.settings import Settings


class CompressionConfig(Settings):
    """How gradients of matrices are sent when they are reduced over `data`."""

    codec: Literal["none", "int8", "float8"] = Field(
        default="none",
        description="as precision.accumulate says | 8-bit integers, or e4m3 floats, with a float32 "
        "scale for each block (arXiv:2306.10209); vectors, and what `fsdp` gathers by layer, stay "
        "wide",
    )
    block: Annotated[int, Field(ge=16, le=65536)] = Field(
        default=256, description="numbers that share a scale"
    )
