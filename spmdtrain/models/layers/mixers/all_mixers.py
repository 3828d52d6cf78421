"""Chooses the mixer of a layer by its name in `model.mixers`."""

from flax import nnx

from spmdtrain.config.schema import Mixer
from spmdtrain.models.layers.mixers.gated_convolution import ConvMixer
from spmdtrain.models.layers.mixers.gated_delta import DeltaMixer
from spmdtrain.models.layers.mixers.state_space import SsdMixer

MIXERS: dict[Mixer, type[nnx.Module]] = {"delta": DeltaMixer, "ssd": SsdMixer, "conv": ConvMixer}


def mixer_of(name: Mixer) -> type[nnx.Module]:
    """Returns the class of a mixer other than attention, made as `mixer(config, rngs)`."""
    return MIXERS[name]
