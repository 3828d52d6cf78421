"""What tools write around and instead of plain weights is read as they read it, or refused."""

import shutil

import directories
import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import tiny
from safetensors.numpy import save_file

from spmdtrain.config.errors import CheckpointError
from spmdtrain.interop import published_weights
from spmdtrain.running.published.as_run import model_config
from spmdtrain.running.published.read_weights import read_weights
from spmdtrain.running.start.init_from import check_source
from spmdtrain.train.shard import shard

SAY_NOTHING = {
    "gpt2": ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"),
    "llama": ("model.layers.0.self_attn.rotary_emb.inv_freq",),
    "gemma2": ("model.vision_tower.embeddings.position_ids",),
}
# What masks and positions have been stored as: by transformers 4.28, older ones, and others.
KINDS = (np.bool_, np.uint8, np.int64)


def read(folder, *ignored):
    published, config = model_config(folder)
    return read_weights(shard(config, devices=jax.devices()[:1]), published, ignored)


def written(folder, family, change, **config):
    """A directory of a family whose tensors were changed; returns its tensors as they were."""
    config = directories.CONFIGS[family] | config
    tensors = directories.write(folder, config)
    changed = dict(tensors)
    change(changed)
    directories.write(folder, config, changed)
    return tensors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", SAY_NOTHING)
def test_what_says_nothing_may_have_any_dtype(family, kind, tmp_path):
    """Its name decides, before the type of its numbers."""
    more = {name: np.ones((1, 4), kind) for name in SAY_NOTHING[family]}
    tensors = written(tmp_path, family, lambda tensors: tensors.update(more))
    assert len(read(tmp_path)[1].tensors) == len(tensors)


def test_what_is_ignored_may_have_any_dtype(tmp_path):
    more = {"model.extra": np.ones(3, np.int64)}
    written(tmp_path, "llama", lambda tensors: tensors.update(more))
    with pytest.raises(CheckpointError, match="model.extra of .* has dtype I64; found quantised"):
        read(tmp_path)
    read(tmp_path, "model.ext*")


def test_weights_of_another_dtype_are_refused_before_a_run_starts(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    written(tmp_path, "llama", lambda tensors: tensors.update({name: tensors[name].astype("i1")}))
    with pytest.raises(CheckpointError, match=f"{name} of .* has dtype I8; found quantised"):
        check_source(tiny(f"train.init_from={tmp_path}"), None, tmp_path / "run", False)


def test_a_single_file_beside_shards_is_two_models(tmp_path):
    config = directories.CONFIGS["llama"]
    tensors = directories.write(tmp_path, config, parts=2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="holds two models: model.safetensors, which trans"):
        read(tmp_path)


@pytest.mark.parametrize("untied", [False, True])
def test_a_shared_matrix_may_have_the_name_of_the_head(untied, tmp_path):
    """transformers 5 reads such a folder so."""

    def renamed(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    tensors = written(tmp_path, "llama", renamed, tie_word_embeddings=True)
    published, config = model_config(tmp_path, ["model.tied=false"] if untied else [])
    params, _ = read_weights(shard(config, devices=jax.devices()[:1]), published)
    for path in ("tokens.table_ve", *(["unembed_ve"] if untied else [])):
        assert np.array_equal(params[path], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_no_place_of_a_number_that_is_not_finite_escapes(dtype, value, monkeypatch):
    monkeypatch.setattr(published_weights, "AT_ONCE", 8)
    numbers = np.full((3, 7), ml_dtypes.finfo(dtype).min, dtype)
    assert published_weights._is_finite(numbers)
    assert published_weights._is_finite(numbers[:0])
    for place in range(numbers.size):
        spoilt = numbers.copy()
        spoilt.flat[place] = value
        assert not published_weights._is_finite(spoilt)
        assert not published_weights._is_finite(spoilt.T)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(name, dtype, value, tmp_path):
    def spoilt(tensors):
        for each in tensors:
            tensors[each] = tensors[each].astype(dtype)
        tensors[name] = tensors[name].copy()
        tensors[name].flat[3] = value

    written(tmp_path, "llama", spoilt)
    with pytest.raises(CheckpointError, match=f"holds a NaN or an infinity; found {name};"):
        read(tmp_path)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    largest = ml_dtypes.finfo(dtype).max
    written(tmp_path, "llama", lambda tensors: tensors[name].__setitem__((0, 0), largest))
    read(tmp_path)
