"""The kind of each parameter of each mixer, by its sizes in a model of twice the width."""

import math

import pytest
from helpers import tiny

from spmdtrain.models.abstract import build_model
from spmdtrain.train.updates.parameter_kinds import is_matrix, is_table, kind_of

# Settings of a model, and those that grow with its width.
DELTA = {"key_heads": 2, "value_heads": 4}
SSD = {"heads": 4, "groups": 2}
MODELS = {
    "attention, with gates of heads": ({"output_gate": "head", "query_norm": "all"}, {}),
    "latent": (
        {"head_dim": "none", "latent.plain_dim": 8, "latent.rope_dim": 4, "latent.value_dim": 6}
        | {"kv_heads": "none"},
        {"latent.rank": 16, "latent.query_rank": 24},
    ),
    "delta": (
        {"mixers": "delta", "delta.key_dim": 8, "delta.value_dim": 6},
        {f"delta.{name}": size for name, size in DELTA.items()},
    ),
    "decays of channels": (
        {"mixers": "delta", "delta.decay": "channel", "delta.key_dim": 8, "delta.value_dim": 6},
        {
            "delta.gate_rank": 8,
            "delta.decay_rank": 8,
            **{f"delta.{name}": size for name, size in DELTA.items()},
        },
    ),
    "state space": (
        {"mixers": "ssd", "ssd.head_dim": 6, "ssd.state": 8},
        {f"ssd.{name}": size for name, size in SSD.items()},
    ),
    "state space of one group": (
        {"mixers": "ssd", "ssd.head_dim": 6, "ssd.groups": 1},
        {"ssd.heads": 4, "ssd.state": 8},
    ),
    "convolution": ({"mixers": "conv", "conv.taps": 3}, {}),
    "both": (
        {"mixers": "both", "ssd.head_dim": 6, "ssd.state": 8},
        {f"ssd.{name}": size for name, size in SSD.items()},
    ),
    "embeddings of layers": ({}, {"token_layers.dim": 6}),
    "experts": (
        {"experts.count": 4, "experts.chosen": 2, "experts.shared": 1, "experts.shared_gate": True},
        {"experts.ffn": 16},
    ),
    "narrow experts": ({"experts.count": 4, "experts.chosen": 2}, {"experts.width": 8}),
    "heads of two widths": ({"windows": "5,0", "full.head_dim": 12}, {"full.kv_heads": 2}),
}
WIDE = {"embed": 16, "heads": 2, "kv_heads": 2, "ffn": 24}


@pytest.mark.parametrize("name", MODELS)
def test_a_kind_is_by_the_sides_that_grow_with_the_width(name):
    """Hidden between two that grow; and no taps, decays or scales are a matrix."""
    settings, growing = MODELS[name]
    fixed = {"name": "llama", "layers": 2, "vocab": 64, "tied": False, "head_dim": 8} | settings
    narrow, wide = (
        build_model(
            tiny(
                *(f"model.{key}={times * value}" for key, value in (WIDE | growing).items()),
                *(f"model.{key}={value}" for key, value in fixed.items()),
            )
        ).parameters
        for times in (1, 2)
    )
    assert narrow.keys() == wide.keys()
    for path, parameter in narrow.items():
        if is_table(parameter) or not is_matrix(path, parameter):
            assert kind_of(path, parameter) in ("table", "vector"), path
            continue
        before, after = (parameters[path].shape[parameter.apart :] for parameters in (narrow, wide))
        # The stream is first or last.
        rows = len(before) - 1 if path.endswith("e") and before[-1] == WIDE["embed"] else 1
        grows_in = math.prod(after[:rows]) > math.prod(before[:rows])
        grows_out = math.prod(after[rows:]) > math.prod(before[rows:])
        expected = {(True, True): "hidden", (True, False): "readout", (False, True): "input"}
        assert kind_of(path, parameter) == expected[grows_in, grows_out], path
    for path, parameter in narrow.items():
        if path.rsplit(".", 1)[-1].startswith(("taps", "decay", "skip", "time", "norm", "scale")):
            assert kind_of(path, parameter) == "vector", path
