"""[model.both]: layers that mix tokens by attention and by a state space side by side."""

from typing import ClassVar

from pydantic import Field

from spmdtrain.config.settings import Positive, Settings


class BothConfig(Settings):
    """Attention beside the state space of [model.ssd], as in Falcon-H1 (arXiv:2507.22448).

    Both read one normed input, and their outputs are summed. The factors of the state space are in
    its own table.
    """

    of_no_array: ClassVar = ("in_factor", "out_factor")

    in_factor: Positive = Field(default=1.0, description="factor of attention's input")
    out_factor: Positive = Field(default=1.0, description="factor of attention's output")
