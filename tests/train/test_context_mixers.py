"""Layers of every mixer in one model, through the batches and gradients of a run: documents in one
row, on meshes where devices share a sequence, are as on one device.
"""

import pytest
from helpers import assert_gradients_of_one_device

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
    (PACKED, ("mesh.context=2", "mesh.fsdp=2", "mesh.data=2", "train.remat=dots")),
    (PACKED, ("mesh.context=2", ULYSSES, "train.remat=full")),
    (PACKED, ("mesh.context=2", "mesh.tensor=2", STREAM)),
    ((), ("mesh.context=4", "model.context_attention=gather", "train.scan_layers=false")),
]


@pytest.mark.long
@pytest.mark.parametrize(("numbers", "placement"), MESHES)
def test_every_mixer_has_the_gradients_of_one_device(numbers, placement):
    assert_gradients_of_one_device((*MODEL, *numbers), placement, 1e-5)
