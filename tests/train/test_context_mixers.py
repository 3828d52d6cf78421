"""Layers of every mixer in one model, through the batches and gradients of a run: documents in one
row, on meshes where devices share a sequence, are as on one device.
"""

import pytest
from helpers import assert_gradients_of_one_device, prepared, tiny

from spmdtrain.config.errors import ConfigError

MODEL = (
    "model.name=llama",
    "model.layers=4",
    "model.kv_heads=2",
    "model.mixers=['delta','ssd','conv','attention']",
    *(f"model.delta.{size}" for size in ("key_heads=2", "value_heads=4", "key_dim=8")),
    "model.delta.value_dim=6",
    *(f"model.ssd.{size}" for size in ("heads=4", "groups=2", "head_dim=6", "state=8")),
    "model.conv.taps=3",
)
PACKED = ("data.packing=documents", "train.sequence_length=16", "train.global_batch=16")
ULYSSES = "model.context_attention=ulysses"
STREAM = "rules.activations.stream_time=context,tensor"
MESHES = [
    (PACKED, ("mesh.context=4", "mesh.fsdp=2", "train.remat=dots")),
    (PACKED, ("mesh.context=2", ULYSSES, "train.remat=full")),
    (PACKED, ("mesh.context=2", "mesh.tensor=2", STREAM)),
    ((), ("mesh.context=4", "model.context_attention=gather", "train.scan_layers=false")),
]


@pytest.mark.long
@pytest.mark.parametrize(("numbers", "placement"), MESHES)
def test_every_mixer_has_the_gradients_of_one_device(numbers, placement):
    assert_gradients_of_one_device((*MODEL, *numbers), placement, 1e-5)


def test_heads_of_every_mixer_are_exchanged_or_refused():
    heads = tiny(*MODEL, "model.ssd.groups=1").model.exchangeable_heads
    assert heads == {
        "model.kv_heads": 2,
        "model.delta.key_heads": 2,
        "model.ssd.heads": 4,
        "model.embed": 128,
    }
    alone = tiny(*MODEL[:2], "model.mixers=['conv']", "model.conv.taps=3").model
    assert alone.exchangeable_heads == {"model.embed": 128}
    settings = (*MODEL, "model.vocab=32", "model.kv_heads=4", "mesh.context=4", ULYSSES)
    with pytest.raises(ConfigError, match="model.delta.key_heads=2 leaves 2 heads for a device"):
        prepared(*settings)
