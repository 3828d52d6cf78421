"""A dim that does not divide is proposed under the setting that gives it its size."""

import jax
import pytest
from helpers import mesh_of, prepared, tiny

from spmdtrain.parallel.axes import IndivisibleError
from spmdtrain.train.shard import shard

LLAMA = ("model.name=llama", "model.mlp=swiglu", "model.layers=3", "model.embed=32")
EXPERTS = (*LLAMA, "model.experts.count=4", "model.experts.chosen=2", "model.experts.ffn=32")
DELTA = (
    *("model.mixers=['delta', 'attention']", "model.layers=4", "model.delta.key_heads=2"),
    *("model.delta.value_heads=2", "model.delta.key_dim=8", "model.delta.value_dim=8"),
)
SSD = (
    *("model.mixers=['ssd', 'attention']", "model.layers=4", "model.ssd.heads=3"),
    *("model.ssd.head_dim=8", "model.ssd.groups=1", "model.ssd.state=8"),
)
FSDP, TENSOR, EXPERT = "mesh.fsdp=2", "mesh.tensor=2", "mesh.expert=2"
# (settings, the mesh axis that does not divide, the tensor, what its setting is proposed to be)
CASES = [
    (("model.embed=30", "model.heads=2"), "mesh.fsdp=4", "out_kgde", "model.embed=32"),
    ((*LLAMA, "model.ffn=33"), TENSOR, "down_fe", "model.ffn=34"),
    ((*LLAMA, "model.token_layers.dim=5"), FSDP, "table_vf", "model.token_layers.dim=6"),
    ((*LLAMA, "model.token_layers.dim=5"), "mesh.fsdp=4", "table_vf", "model.token_layers.dim=8"),
    ((*EXPERTS, "model.experts.width=15"), FSDP, "down_xfe", "model.experts.width=16"),
    ((*EXPERTS, "model.experts.ffn=33"), TENSOR, "down_xfe", "model.experts.ffn=34"),
    (
        (*EXPERTS, "model.experts.shared=1", "model.experts.shared_ffn=33"),
        *(TENSOR, "shared.down_fe", "model.experts.shared_ffn=34"),
    ),
    (
        (*EXPERTS, "model.experts.first_dense=1", "model.ffn=33"),
        *(TENSOR, "first_blocks.layer.mlp.down_fe", "model.ffn=34"),
    ),
    ((*EXPERTS, "model.experts.count=3"), EXPERT, "down_xfe", "model.experts.count=4"),
    (("model.heads=3", "model.embed=48"), TENSOR, "out_kgde", "model.heads=4"),
    ((*LLAMA, *SSD), TENSOR, "decay_log", "model.ssd.heads=4"),
    (
        ("model.max_length=33", "rules.parameters.position=tensor", "train.sequence_length=32"),
        *(TENSOR, "positions_te", "model.max_length=34"),
    ),
    # No single setting mends these: queries share keys, and so do the values of a state.
    ((*LLAMA, "model.heads=6", "model.embed=48", "model.kv_heads=3"), TENSOR, "out_kgde", None),
    (
        (*LLAMA, *DELTA, "model.delta.key_heads=3", "model.delta.value_heads=3"),
        *(TENSOR, "decay_bias", None),
    ),
]


@pytest.mark.parametrize(("settings", "mesh", "tensor", "proposed"), CASES)
def test_the_setting_of_a_size_is_proposed_and_mends_it(settings, mesh, tensor, proposed):
    with pytest.raises(IndivisibleError) as refused:
        prepared("model.vocab=64", *settings, mesh)
    line = str(refused.value)
    assert tensor in line and line.endswith(f", or {refused.value.whole}")
    if proposed is None:
        assert "(--set" not in line
        return
    assert f"(--set {proposed}), or --set rules.parameters." in line
    try:
        prepared("model.vocab=64", *settings, mesh, proposed)
    except IndivisibleError as other:
        assert (other.at, other.axis) != (refused.value.at, refused.value.axis)


def test_sizes_of_weights_that_exist_are_not_proposed_to_change():
    asked = ("model.vocab=64", "model.embed=30", "model.heads=2", "mesh.fsdp=4")
    with pytest.raises(IndivisibleError, match=r"4; try --set rules.parameters.embed= to keep it"):
        prepared(*asked, "train.init_from=run")
    config = tiny(*asked)
    config.origin["model.embed"] = "published/config.json"
    with pytest.raises(IndivisibleError, match=r"4; try --set rules.parameters.embed= to keep it"):
        shard(config, devices=jax.devices()[: mesh_of(asked)])
