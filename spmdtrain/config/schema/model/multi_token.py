"""[model.multi_token]: a model that also learns the tokens after the next one."""

from typing import ClassVar

from pydantic import Field

from spmdtrain.config.settings import Count, Positive, Settings


class MultiTokenConfig(Settings):
    """Multi-token prediction, MTP (arXiv:2412.19437, section 2.2).

    A further block for each depth reads the stream after the last block, and the embedding of the
    next token, and predicts the token after that by the model's own head. It runs only in training.
    """

    of_no_array: ClassVar = ("weight", "after_norm")

    depth: Count = Field(default=1, description="tokens beyond the next one")
    weight: Positive = Field(
        default=0.3, description="weight of the mean of their losses, which is added to the loss"
    )
    after_norm: bool = Field(
        default=False,
        description="a block reads the stream as the head does, after the norm in front of it; "
        "default: before that norm, as in DeepSeek-V3",
    )
    frozen: bool = Field(
        default=False,
        description="keep the blocks as they are, without their losses: import sets it",
    )
