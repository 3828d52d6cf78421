"""[kernels]: the choice among implementations."""

from typing import Literal

from pydantic import Field

from spmdtrain.config.settings import Settings


class KernelsConfig(Settings):
    """The choice among the implementations of attention and norms."""

    tune: Literal["auto", "off", "again"] = Field(
        default="auto",
        description="auto: the fastest correct ones, which `train` measures on the GPU once and "
        "remembers; a resumed run keeps its choice; off: a fixed order, and nothing "
        "is measured; again: they are measured once more, even for a resumed run, "
        "whose last bits then differ",
    )
