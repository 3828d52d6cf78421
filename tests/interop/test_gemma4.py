"""What files of Gemma 4 may hold beside what its class reads."""

import json

import directories
import gemma4_files
import jax
import numpy as np
import pytest

from spmdtrain.config.errors import UserError
from spmdtrain.config.published.read_config import as_published
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import import_model

SHARING = gemma4_files.VARIANTS["gemma4_text with shared keys"]


def imported(folder, config, tensors, name="run"):
    directories.write(folder / f"{name} model", config, tensors, parts=3)
    return import_model(folder / f"{name} model", folder / name, devices=jax.devices()[:1])


@pytest.mark.seconds
def test_keys_of_layers_that_share_others_are_read_over(tmp_path):
    tensors = directories.drawn(directories.tensors_of(SHARING))
    params = imported(tmp_path, SHARING, tensors).params
    idle = {
        f"model.layers.{layer}.self_attn.{name}.weight": np.ones((2, 2), np.float32)
        for layer in (5, 6, 7)
        for name in ("k_proj", "v_proj", "k_norm")
    }
    again = imported(tmp_path, SHARING, tensors | idle, "again").params
    assert all(np.array_equal(params[path], again[path]) for path in params)
    strange = {"model.layers.4.self_attn.k_proj.bias": np.ones(2, np.float32)}
    with pytest.raises(UserError, match="which nothing reads"):
        imported(tmp_path, SHARING, tensors | strange, "strange")


@pytest.mark.seconds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_text_part_of_a_wrapper_goes_out_as_it_came_in(dtype, tmp_path):
    text = SHARING | {"dtype": dtype}
    whole = directories.write(tmp_path / "text", text)
    names = {name: name.replace("model.", "model.language_model.", 1) for name in whole}
    vision = {"model.vision_tower.ln.weight": whole["model.norm.weight"]}
    config = {"model_type": "gemma4", "text_config": text, "dtype": dtype}
    tensors = {names[name]: x for name, x in whole.items()} | vision
    imported(tmp_path, config, tensors)
    export_run(tmp_path / "run", tmp_path / "out", dtype=dtype)
    written = open_tensors(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "gemma4_text"
    assert len(written) == len(whole)
    for name, tensor in written.items():
        ours = whole[name] if name in whole else tensors[name]
        assert np.array_equal(tensor.map(), ours), name


@pytest.mark.parametrize("model_type", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_another_type_of_a_like_name_is_refused(model_type, tmp_path):
    with pytest.raises(UserError, match="not supported"):
        as_published(tmp_path, SHARING | {"model_type": model_type})


@pytest.mark.parametrize(
    "change",
    [
        {"use_bidirectional_attention": "all"},
        {"enable_moe_block": True},
        {"per_layer_config": {"2": {"head_dim": 8}}},
        {"per_layer_config": {"2": {"hidden_size": 8}}},
        {"num_kv_shared_layers": 7},
    ],
)
def test_what_no_setting_computes_is_one_line(change, tmp_path):
    with pytest.raises(UserError):
        directories.write(tmp_path, SHARING | change, {})
        model = as_published(tmp_path, SHARING | change).settings
        import_model(tmp_path, tmp_path / "run", overrides=[f"model.layers={model['layers']}"])
