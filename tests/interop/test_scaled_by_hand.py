"""What a person writes over the positions of a published model is exported, or named before
training as what no family computes.
"""

from pathlib import Path

import directories
import drawn_models
import jax
import pytest

from spmdtrain.config import load
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.published.read_config import as_published, read_published
from spmdtrain.config.published.write_config import (
    as_model,
    function_of,
    remarks_on_export,
    write_config,
)
from spmdtrain.running.published.import_model import import_model
from spmdtrain.running.start.init_from import weights_of
from spmdtrain.train.shard import shard

FACTOR = "rope_scaling.factor=3.0 belongs to no family"  # in Phi-3's class: the ratio of lengths


NO_CLASS = {
    **dict.fromkeys(("deepseek_v3", "mistral4"), ["linear", "llama3", "longrope"]),
    "ministral3": ["llama3"],  # of another original length than that of its temperature
    # They have a rope of their own.
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"),
        [name for name in drawn_models.SCALINGS if name != "linear"],
    ),
    # Windows and yarn: transformers 5 always truncates the ramp.
    **dict.fromkeys(("gemma3_text", "olmo2", "olmo3"), ["yarn, not truncated"]),
}


@pytest.mark.parametrize("scaling", drawn_models.SCALINGS)
@pytest.mark.parametrize("name", drawn_models.TURNING)
def test_a_refusal_names_what_was_written_and_nothing_else(name, scaling, tmp_path):
    directories.write(tmp_path, directories.CONFIGS[name], {})
    base, model = read_published(tmp_path), drawn_models.scaled_by_hand(name, scaling)
    lines = remarks_on_export(model, base)
    try:
        write_config(model, base, dtype="float32", tokens={}, run=tmp_path)
    except ConfigError as error:
        refusal = error.what.removeprefix(f"{tmp_path} ")
        assert lines == [f"a run of this model {refusal}"]
        named = refusal.partition(": ")[2].removesuffix(" belongs to no family")
        assert all(part.startswith("rope_scaling.") for part in named.split(" with "))
        assert "None" not in named and "{" not in named
        assert scaling in NO_CLASS[name]
    else:
        assert lines == [] and scaling not in NO_CLASS.get(name, ())


def test_another_scaling_of_a_share_of_channels_goes_out_as_glm_4():
    model = drawn_models.scaled_by_hand("phi3", "llama3")
    for base in (as_published(Path(), directories.CONFIGS["phi3"]), None):
        family, keys = write_config(model, base, dtype="float32", tokens={}, run=Path())
        assert (family, keys["partial_rotary_factor"]) == ("glm", 0.75)


NEW_FORM = ("rope_parameters",)
OLD_FORM = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq")


@pytest.mark.parametrize("scaling", ["linear", "yarn with a scale", "llama3", "longrope"])
@pytest.mark.parametrize("name", drawn_models.TURNING)
def test_both_forms_say_the_same_where_the_import_had_the_newer_one(name, scaling):
    """transformers 5 takes the older one if both are there, and then nothing of the newer one."""
    model = drawn_models.scaled_by_hand(name, scaling)
    try:
        _, keys = write_config(model, None, dtype="float32", tokens={}, run=Path())
    except ConfigError:
        assert scaling in NO_CLASS[name]
        return
    newer = without(OLD_FORM, keys)
    if function_in(newer) != function_of(model):
        return  # its class has no newer form
    base = as_published(Path(), newer)
    _, keys = write_config(model, base, dtype="float32", tokens={}, run=Path())
    for form in (OLD_FORM, NEW_FORM) if keys.get("rope_scaling") else (OLD_FORM,):
        assert function_in(without(form, keys)) == function_of(model)


@pytest.mark.parametrize("scaling", drawn_models.SCALINGS)
def test_what_only_transformers_5_scales_stays_and_is_not_made(scaling):
    """OLMo 2's class refuses all but linear in version 4. OLMo 3's loads in both."""
    model = drawn_models.scaled_by_hand("olmo2", scaling)
    _, keys = write_config(
        drawn_models.scaled_by_hand("qwen3", scaling), None, dtype="float32", tokens={}, run=Path()
    )
    of_rope = {name: keys[name] for name in ("rope_theta", "rope_scaling")}
    published = as_published(Path(), directories.CONFIGS["olmo2"] | of_rope)
    assert (
        function_of(as_model(published.settings))["rope_scaling"]
        == (function_of(model)["rope_scaling"])
    )
    family, keys = write_config(
        as_model(published.settings), published, dtype="float32", tokens={}, run=Path()
    )
    assert family == "olmo2" and keys["rope_scaling"] == of_rope["rope_scaling"]
    assert function_in(without(OLD_FORM, keys)) == function_in(without(NEW_FORM, keys))
    if scaling not in NO_CLASS["olmo2"]:
        family, _ = write_config(model, None, dtype="float32", tokens={}, run=Path())
        assert family == ("olmo2" if scaling == "linear" else "olmo3")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({}, "rope_theta=1000000.0"),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6}}, "rope_type='default'"),
        ({"rope_theta": 1e6, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.25"),
    ],
)
def test_two_tables_that_differ_are_refused(more, named):
    """transformers 5 would read the older one, and nothing of the other."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    newer = scaling | {"rope_theta": 1e6, "partial_rotary_factor": 0.25}
    keys = directories.CONFIGS["qwen3_5_text"] | {"rope_theta": None, "rope_scaling": scaling}
    with pytest.raises(
        ConfigError, match=f"rope_scaling=.* must be of {named}, as rope_parameters"
    ):
        as_published(Path(), keys | {"rope_parameters": newer} | more)
    same = {"rope_theta": 1e6, "partial_rotary_factor": 0.25}
    read = as_published(Path(), keys | same | {"rope_parameters": newer})
    assert read.settings["rope_share"] == 0.25


def without(names, keys):
    return {key: value for key, value in keys.items() if key not in names}


def function_in(keys):
    """What the model of a config.json computes; None if it is none."""
    try:
        return function_of(as_model(as_published(Path(), keys).settings))
    except ConfigError:
        return None


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phi")
    # GLM-4's class takes any scaling of a share of channels, but has no windows.
    directories.write(folder, directories.CONFIGS["phi3"] | {"sliding_window": 7})
    return folder


def test_an_import_says_what_cannot_go_out_again(phi, tmp_path):
    one = jax.devices()[:1]
    more = ["model.rope_scaling.factor=3"]
    lines = import_model(phi, tmp_path / "odd", overrides=more, devices=one).lines
    assert lines[0] == f"a run of this model cannot be written for transformers: {FACTOR}"


@pytest.mark.parametrize(("text", "line"), [("factor = 3.0", FACTOR), ('use = "long"', None)])
def test_a_run_says_before_training_what_cannot_go_out(text, line, phi, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        f"[model]\nfrom = {str(phi)!r}\n[model.rope_scaling]\n{text}\n"
        "[train]\nsequence_length = 8\n[data]\ncorpus = 'synthetic'\n"
    )
    lines = []
    weights_of(phi, shard(load(file), devices=jax.devices()[:1]), lines.append)
    assert lines == (
        [f"a run of this model cannot be written for transformers: {line}"] * bool(line)
    )
