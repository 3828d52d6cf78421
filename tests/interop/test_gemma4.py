"""What files of Gemma 4 may hold beside what its class reads."""

import json

import directories
import gemma4_files
import jax
import ml_dtypes
import numpy as np
import pytest

from spmdtrain.cli.published.check import placeholders
from spmdtrain.config.errors import UserError
from spmdtrain.config.published.read_config import as_published
from spmdtrain.inference.sample import make_logits
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.planner.cost import shape
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import import_model

# Tensors that wrappers of both kinds hold beside their text part.
OF_PICTURES_AND_SOUND = (
    "model.vision_tower.ln.weight",
    "model.embed_vision.embedding_projection.weight",
    "model.audio_tower.output_proj.weight",
    "model.embed_audio.embedding_projection.weight",
    "model.vision_embedder.patch_dense.weight",
)
SHARING = gemma4_files.VARIANTS["gemma4_text with shared keys"]


def imported(folder, config, tensors, name="run"):
    directories.write(folder / f"{name} model", config, tensors, parts=3)
    return import_model(folder / f"{name} model", folder / name, devices=jax.devices()[:1])


def with_idle(tensors, config=SHARING, dtype=np.float32):
    """The tensors of a model whose layers that share keys have projections of their own too."""
    own = gemma4_files.idle_tensors(config)
    return tensors | directories.drawn(own, dtype)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.seconds
def test_idle_keys_of_files_go_out_as_they_came_in_and_compute_nothing(dtype, tmp_path):
    config = SHARING | {"dtype": np.dtype(dtype).name}
    tensors = directories.drawn(directories.tensors_of(config), dtype)
    plain = imported(tmp_path, config, tensors)
    whole = with_idle(tensors, dtype=dtype)
    run = imported(tmp_path, config, whole, "idle")
    assert len(whole) == len(tensors) + 9
    assert not plain.setup.config.model.idle_keys
    idle = {path for path in run.params if ".idle." in path}
    assert run.params.keys() - idle == plain.params.keys()
    assert shape.parameters(run.setup.config.model) == run.setup.model.size
    tokens = np.arange(24).reshape(1, 24)
    logits = [make_logits(one.setup)(one.params, tokens) for one in (plain, run)]
    assert np.array_equal(*logits)
    export_run(tmp_path / "idle", tmp_path / "out")
    written = open_tensors(tmp_path / "out")
    assert written.keys() == whole.keys()
    for name, x in whole.items():
        assert written[name].dtype == x.dtype
        assert np.array_equal(written[name].map(), x), name


@pytest.mark.seconds
def test_idle_keys_may_be_left_out_and_others_are_still_refused(tmp_path):
    tensors = directories.drawn(directories.tensors_of(SHARING))
    directories.write(tmp_path / "model", SHARING, with_idle(tensors))
    ignored = [f"*.layers.[567].self_attn.{name}.*" for name in ("k_proj", "v_proj", "k_norm")]
    run = import_model(tmp_path / "model", tmp_path / "run", ignored=ignored)
    assert not run.setup.config.model.idle_keys
    strange = {"model.layers.4.self_attn.k_proj.bias": np.ones(2, np.float32)}
    with pytest.raises(UserError, match="which nothing reads"):
        imported(tmp_path, SHARING, tensors | strange, "strange")


@pytest.mark.seconds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_text_part_of_a_wrapper_goes_out_as_it_came_in(dtype, tmp_path):
    text = SHARING | {"dtype": dtype}
    whole = directories.write(tmp_path / "text", text)
    names = {name: name.replace("model.", "model.language_model.", 1) for name in whole}
    vision = dict.fromkeys(OF_PICTURES_AND_SOUND, whole["model.norm.weight"])
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
        {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3},
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


def test_a_check_leaves_out_the_tokens_that_stand_for_pictures_and_sound(tmp_path):
    document = {"text_config": {"eos_token_id": 1}, "image_token_id": 7, "audio_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(document | {"image_token_index": 9}))
    assert placeholders(tmp_path) == [7, 9]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert placeholders(tmp_path) == []
