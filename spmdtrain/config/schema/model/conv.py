"""[model.conv]: layers that mix tokens by a short convolution between two gates."""

from pydantic import Field

from spmdtrain.config.settings import Count, Settings


class ConvConfig(Settings):
    """The short convolution of LFM2 (arXiv:2511.23404): C * conv(B * x), by channel.

    B, C and x are projections of the stream, as wide as it is.
    """

    taps: Count = Field(
        default=3, description="tokens that the convolution sees, the token itself among them"
    )
    bias: bool = Field(
        default=False, description="biases of the convolution and of both projections"
    )
