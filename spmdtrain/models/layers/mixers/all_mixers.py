"""Chooses the mixer of a layer by its name in `model.mixers`."""

from collections.abc import Callable
from functools import partial

from flax import nnx

from spmdtrain.config.schema import Mixer, TransformerConfig
from spmdtrain.models.layers.mixers.gated_convolution import ConvMixer
from spmdtrain.models.layers.mixers.gated_delta import DeltaMixer
from spmdtrain.models.layers.mixers.state_space import SsdMixer
from spmdtrain.models.layers.mixers.two_mixers import TwoMixers

MIXERS: dict[Mixer, type[nnx.Module]] = {"delta": DeltaMixer, "ssd": SsdMixer, "conv": ConvMixer}
MakeMixer = Callable[[TransformerConfig, nnx.Rngs], nnx.Module]


def mixer_of(name: Mixer, attention: MakeMixer) -> MakeMixer | None:
    """Returns the maker of a mixer other than `attention`, called as `maker(config, rngs)`; None:
    the layer has no mixer.
    """
    if name == "none":
        return None
    if name == "both":
        return partial(TwoMixers, attention=attention)
    return MIXERS[name]
