"""Llama 4: which layers have what by its keys, and models of odd patterns in and out."""

import re
from pathlib import Path

import directories
import ml_dtypes
import numpy as np
import pytest

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.published.read_config import as_published
from spmdtrain.config.published.write_config import as_model
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import import_model

CONFIG = directories.CONFIGS["llama4_text"]
FULL, CHUNKED = directories.FULL, "chunked_attention"


def model(**changes):
    return as_model(as_published(Path(), CONFIG | changes).settings)


def kinds(read) -> list[tuple[int, bool]]:
    """For each layer, the tokens of its blocks, and whether it has rotary positions."""
    return [(kind.chunk, kind.rope_theta is not None) for kind in read.layer_kinds]


@pytest.mark.parametrize(
    ("changes", "blocks", "routed"),
    [
        ({}, [(12, True)] * 3 + [(0, False)], [1, 3]),
        ({"no_rope_layers": [1, 0, 1, 1]}, [(12, True), (0, False), *[(12, True)] * 2], [1, 3]),
        ({"no_rope_layers": []}, [(12, True)] * 3 + [(0, False)], [1, 3]),
        ({"attention_chunk_size": None}, [(0, True)] * 3 + [(0, False)], [1, 3]),
        ({"layer_types": [FULL] * 3 + [CHUNKED]}, [(0, True)] * 3 + [(12, False)], [1, 3]),
        ({"interleave_moe_layer_step": 1}, [(12, True)] * 3 + [(0, False)], [0, 1, 2, 3]),
        ({"interleave_moe_layer_step": 3}, [(12, True)] * 3 + [(0, False)], [2]),
        ({"moe_layers": [0, 3]}, [(12, True)] * 3 + [(0, False)], [0, 3]),
        ({"moe_layers": []}, [(12, True)] * 3 + [(0, False)], []),
    ],
)
def test_layers_are_what_their_keys_say(changes, blocks, routed):
    read = model(**changes)
    assert kinds(read) == blocks
    assert [number for number, mlp in enumerate(read.layer_mlps) if mlp == "experts"] == routed
    assert read.ffn == 40
    assert (read.experts and read.experts.ffn) == (24 if routed else None)


def test_temperature_and_norm_belong_to_layers_that_exist():
    heat = model().temperature
    assert heat is not None
    assert (heat.weight, heat.length, heat.offset, heat.layers) == (0.1, 8, 1, "no_rope")
    assert model(attn_temperature_tuning=4).temperature == heat  # as older files say it
    for without in ({"attn_temperature_tuning": False}, {"no_rope_layers": [1] * 4}):
        assert model(**without).temperature is None
    assert model(use_qk_norm=False).query_norm == "none"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"no_rope_layers": [1, 1]}, "no_rope_layers=.* must be a list of 4 times 0 or 1"),
        ({"layer_types": [FULL]}, "layer_types=.* must be a list of 4 kinds"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types='sliding_attention' has no"),
        ({"moe_layers": [4]}, "moe_layers=.* must be a list of layers from 0 to 3"),
    ],
)
def test_keys_that_describe_no_model_are_refused(changes, line):
    with pytest.raises(ConfigError, match=line):
        model(**changes)


@pytest.mark.seconds
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_odd_patterns_come_in_and_go_out(is_wrapped, tmp_path):
    """In bfloat16 and three files; as the text part of a model with a vision tower too."""
    config = CONFIG | {"num_hidden_layers": 6, "moe_layers": [0, 3, 4], "dtype": "bfloat16"}
    config |= {"no_rope_layers": [1, 0, 1, 1, 0, 1], "attention_bias": True}
    config |= {"head_dim": 10, "num_experts_per_tok": 2}
    shapes = directories.tensors_of(config)
    tensors = directories.drawn(shapes, ml_dtypes.bfloat16)
    stored, outer = tensors, config
    if is_wrapped:
        stored = {re.sub("^", "language_model.", name): x for name, x in tensors.items()}
        stored["vision_model.class_embedding"] = np.ones(3, ml_dtypes.bfloat16)
        stored["multi_modal_projector.linear_1.weight"] = np.ones((2, 2), ml_dtypes.bfloat16)
        outer = {"model_type": "llama4", "text_config": config, "vision_config": {}}
    directories.write(tmp_path / "model", outer, stored, parts=3)
    import_model(tmp_path / "model", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    after = open_tensors(tmp_path / "out")
    assert after.keys() == tensors.keys()
    for name, x in tensors.items():
        assert after[name].dtype == x.dtype
        assert np.array_equal(after[name].map(), x), name
    assert len({tensor.path for tensor in after.values()}) == 3
