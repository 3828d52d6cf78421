"""Every number of a config.json has bounds, and a 0 is a 0: each odd value is read or one line."""

import copy
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import directories
import pytest

from spmdtrain.cli import main
from spmdtrain.config.errors import UserError
from spmdtrain.config.published.class_keys import unread_by_class
from spmdtrain.config.published.keys import Keys, is_harmless
from spmdtrain.config.published.read_config import as_published
from spmdtrain.config.published.rope_keys import FULL
from spmdtrain.config.published.write_config import as_model, function_of

CONFIGS = directories.CONFIGS | directories.VARIANTS
WRAPPED = {"model_type": "mistral3", "text_config": dict(directories.CONFIGS["ministral3"])}
NAN, INFINITY = float("nan"), float("inf")
ODD = (
    *(NAN, INFINITY, -INFINITY, 10**400, 2**40, 10**6, 0, -1, 0.5, True, None),
    *("x", [], {}, [NAN], {"a": [INFINITY]}),
)
# Keys of which transformers itself takes a 0 for absent.
ZERO_IS_ABSENT = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
# Keys whose number is 0 where they are absent, in all families or in one.
ZERO_BY_DEFAULT = {
    "num_kv_shared_layers",
    "num_nextn_predict_layers",
    "router_jitter_noise",
}
ZERO_BY_DEFAULT_IN = {
    "granitemoeshared": {"shared_intermediate_size"},
    "dots1": {"n_shared_experts", "first_k_dense_replace"},
    "mistral4": {"first_k_dense_replace"},
}
# Keys that change nothing, or are the older name of another key.
SAY_NOTHING = {"torch_dtype", "dtype", "pad_token_id", "type", "load_balance_coeff"}


def says_nothing(config: dict, path: tuple) -> bool:
    """True for a key that the family's class does not look at."""
    if path[-1] == "sliding_window":
        is_of_no_layer = set(config.get("layer_types") or ()) == {FULL}
        return is_of_no_layer or not config.get("use_sliding_window", True)
    if path[-1] in ("layer_types", "max_window_layers"):
        return config.get("sliding_window", 0) is None
    if path[-1] == "sliding_window_pattern":
        return "layer_types" in config
    if path[-1] == "num_experts_per_tok" and config.get("num_local_experts") == 0:
        return True
    if path == ("rope_parameters", "max_position_embeddings"):
        return True
    if path[-1] in SAY_NOTHING or is_harmless(path[-1]):
        return True
    return path[0] in unread_by_class(config["model_type"])


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of each key of a config, in its tables too."""
    for name, inner in value.items():
        yield (*path, name)
        if isinstance(inner, dict):
            yield from places(inner, (*path, name))


def changed(config: dict, path: tuple, *value: Any) -> dict:
    """A config with another value at a path, or without it."""
    config = copy.deepcopy(config)
    table = config
    for name in path[:-1]:
        table = table[name]
    del table[path[-1]]
    if value:
        (table[path[-1]],) = value
    return config


def function(config: dict) -> dict | None:
    """What a model computes; None if its config is refused."""
    try:
        return function_of(as_model(as_published(Path(), config).settings))
    except UserError:
        return None


@pytest.mark.parametrize("name", [*CONFIGS, "wrapped"])
def test_an_odd_value_is_read_or_one_line(name):
    config = CONFIGS.get(name, WRAPPED)
    assert function(config) is not None
    for path, odd in itertools.product(places(config), ODD):
        started = time.process_time()
        function(changed(config, path, odd))  # raises nothing but a UserError
        assert time.process_time() - started < 1, (path, odd)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_number_that_is_not_finite_is_read(name):
    config = CONFIGS[name]
    for path, odd in itertools.product(places(config), (NAN, INFINITY, -INFINITY, 10**400)):
        if not says_nothing(config, path):
            assert function(changed(config, path, odd)) is None, (path, odd)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_zero_is_not_taken_for_an_absent_number(name):
    """It is refused, or computes something else than the model without the key."""
    config = CONFIGS[name]
    for path in places(config):
        zero, absent = (function(changed(config, path, *value)) for value in ((0,), ()))
        if path[-1] in ZERO_IS_ABSENT or says_nothing(config, path):
            continue
        if path[-1] in ZERO_BY_DEFAULT | ZERO_BY_DEFAULT_IN.get(config["model_type"], set()):
            continue
        if zero is not None:
            assert zero != absent, path


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_more_layers_than_any_model_has_are_refused_at_once(family, tmp_path, capsys):
    config = directories.CONFIGS[family]
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    (tmp_path / "config.json").write_text(json.dumps(config | {name: 10**6}))
    assert main(["import", str(tmp_path), "--print-config"]) == 4
    assert f"{name}=1000000 must be at most 10,000" in capsys.readouterr().err


def test_more_experts_than_could_be_counted_are_refused(tmp_path, capsys):
    config = directories.CONFIGS["qwen3_moe"]
    more = {"num_hidden_layers": 9000, "num_experts": 9000}
    (tmp_path / "config.json").write_text(json.dumps(config | more))
    assert main(["import", str(tmp_path), "--print-config"]) == 4
    assert "9000 layers of 9000 experts are too many" in capsys.readouterr().err


@pytest.mark.parametrize("family", directories.CONFIGS)
def test_as_many_layers_as_are_read_take_no_time(family):
    config = dict(directories.CONFIGS[family])
    listing = ("layer_types", "mlp_layer_types", "no_rope_layers", "linear_attn_config")
    for name in (*listing, "sliding_window_pattern"):
        config.pop(name, None)
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    if "hybrid_override_pattern" in config:  # which is as long as the model is deep
        config["hybrid_override_pattern"] = "ME*E" * 2500
    started = time.process_time()
    assert function(config | {name: 10_000}) is not None
    assert time.process_time() - started < 1


def test_a_long_value_is_cut_visibly_and_the_line_says_what_to_try():
    keys = Keys({"layer_types": ["sliding_attention"] * 9}, {}, "config.json")
    line = str(keys.refused("layer_types", keys.take("layer_types"), "a list of 8 kinds"))
    assert " ... must be a list of 8 kinds" in line
    assert line.endswith("; try the config.json that the weights were published with")
    assert "layer_types=3 must" in str(keys.refused("layer_types", 3, "a list"))
