"""The indexers of sparse attention come in, stay as they are and go out; attention is dense up to
the tokens that they keep, and longer sequences are refused.
"""

from pathlib import Path

import directories
import jax
import numpy as np
import pytest

from spmdtrain.cli import main
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.load import load
from spmdtrain.config.published.read_config import as_published, read_published
from spmdtrain.config.published.write_config import as_model, function_of
from spmdtrain.inference.sample import Choice, make_generate, make_logits
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.models.abstract import build_model
from spmdtrain.planner.cost import shape
from spmdtrain.running.loop import run
from spmdtrain.running.published.as_run import model_config
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import import_model

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
INDEXER = ".self_attn.indexer."
KEPT = 64


def written(tmp_path, family, **changes):
    """The folder of a tiny model, and its tensors."""
    config = directories.CONFIGS[family] | changes
    return tmp_path / "model", directories.write(tmp_path / "model", config, parts=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_come_in_and_go_out_with_the_same_bits_names_and_files(family, dtype, tmp_path):
    folder, tensors = written(tmp_path, family, dtype=dtype)
    assert any(INDEXER in name for name in tensors)
    import_model(folder, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    after = open_tensors(tmp_path / "out")
    assert after.keys() == tensors.keys()
    for name, x in tensors.items():
        assert after[name].dtype == x.dtype
        assert np.array_equal(after[name].map(), x), name
    names = {path.name for path in folder.glob("*.safetensors")}
    assert names == {path.name for path in (tmp_path / "out").glob("*.safetensors")}


@pytest.mark.long
def test_training_on_a_mesh_changes_all_but_them(tmp_path):
    """Also the biases that only choose stay, as `import` sets them to."""
    folder, tensors = written(tmp_path, "glm_moe_dsa")
    import_model(folder, tmp_path / "run")
    (tmp_path / "config.toml").write_text("")
    overrides = [
        f"model.from={tmp_path / 'run'}",
        f"train.init_from={tmp_path / 'run'}",
        *("data.corpus=synthetic", "train.steps=2", "train.sequence_length=16"),
        *("train.global_batch=2", "optimizer.learning_rate=0.01", "optimizer.weight_decay=0.1"),
        *("mesh.fsdp=2", "mesh.data=1"),
    ]
    config = load(tmp_path / "config.toml", overrides)
    run(config, tmp_path / "trained", devices=jax.devices()[:2])
    export_run(tmp_path / "trained", tmp_path / "out")
    after = open_tensors(tmp_path / "out")
    same = {name for name, x in tensors.items() if np.array_equal(after[name].map(), x)}
    kept = {name for name in tensors if INDEXER in name or "e_score_correction_bias" in name}
    assert same == kept


def test_longer_sequences_are_one_line_wherever_they_come_from(tmp_path, capsys):
    folder, _ = written(tmp_path, "deepseek_v32")
    published = read_published(folder)
    assert published.settings["max_length"] == KEPT
    assert f"attention is dense up to {KEPT} tokens" in published.remarks[0]
    imported = import_model(folder, tmp_path / "run")
    logits = make_logits(imported.setup)
    with pytest.raises(
        ConfigError, match=rf"65 tokens are more .* found model.indexer.kept={KEPT}"
    ):
        logits(imported.params, np.zeros((1, KEPT + 1), np.int32))
    (tmp_path / "config.toml").write_text("")
    longer = [f"model.from={tmp_path / 'run'}", f"train.sequence_length={KEPT + 1}"]
    with pytest.raises(ConfigError, match=rf"train.sequence_length=65: .* set .*_length={KEPT}"):
        load(tmp_path / "config.toml", longer)
    with pytest.raises(ConfigError, match="model.max_length=65: attention would read only"):
        load(tmp_path / "config.toml", [longer[0], f"model.max_length={KEPT + 1}"])
    assert main(["import", str(folder), "--print-config", "--max-length", "65"]) == 4
    assert f"set model.max_length={KEPT}" in capsys.readouterr().err
    key = jax.random.key(0)
    sampled = make_generate(imported.setup, KEPT, Choice())
    with pytest.raises(ConfigError, match="asked 66 tokens; found model.indexer.kept=64"):
        sampled(imported.params, [np.zeros(2, np.int32)], key)
    assert len(sampled(imported.params, [np.zeros(2, np.int32)], key, 1)[0]) == 3


def model_of(**changes):
    """The settings of a GLM-5 with other keys."""
    keys = directories.CONFIGS["glm_moe_dsa"] | changes
    return as_model(as_published(Path(), keys).settings)


BY_PERIOD = {"index_topk_freq": None}


@pytest.mark.parametrize(
    "keys",
    [
        {"index_topk_freq": 2},
        BY_PERIOD | {"index_topk_pattern": "FFSFS"},
        BY_PERIOD | {"indexer_types": ["full", "full", "shared", "full", "shared"]},
    ],
)
def test_layers_of_glm_5_share_indexers_by_a_list_a_pattern_or_a_period(keys):
    model = model_of(**keys)
    assert model.indexer_layers == (0, 1, 3)
    every = model_of(**BY_PERIOD)
    assert every.indexer_layers == (0, 1, 2, 3, 4)
    assert function_of(every) != function_of(model)


@pytest.mark.parametrize("pattern", ["SFSFS", "FFSF", "FFXFS", 3])
def test_a_pattern_that_says_no_choice_for_a_layer_is_refused(pattern):
    with pytest.raises(ConfigError, match="index_topk_pattern=.* for each of 5 layers"):
        model_of(index_topk_pattern=pattern)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planner_counts_their_parameters(family, tmp_path):
    folder, _ = written(tmp_path, family)
    _, config = model_config(folder)
    assert shape.parameters(config.model) == build_model(config).size


def test_no_setting_of_them_is_lost_on_the_way_out():
    model = model_of()
    assert set(type(model.indexer).model_fields) == OTHERS.keys()
    for name, value in OTHERS.items():
        indexer = model.indexer.model_copy(update={name: value})
        assert function_of(model.model_copy(update={"indexer": indexer})) != function_of(model)


OTHERS = {"heads": 2, "dim": 4, "kept": 128, "layers": (True, False)}
