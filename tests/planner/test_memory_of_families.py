"""The memory of small models of each family with other layers than attention and an mlp, or with
attention of its own, against the real step compiled for GPUs that are not there.

The estimate differs from XLA's account by a share that is known for each family. A small band
around it shows the loss of a single term, which a bound for all families cannot.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from compiled_estimates import compiled_estimate

from spmdtrain.compiled.step_memory import memory_in
from spmdtrain.config import RunConfig, to_toml

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs jax's CUDA plugin"
    ),
]

WIDTH: dict[str, Any] = {"embed": 512, "heads": 8, "ffn": 1536, "vocab": 8192, "layers": 4}
HEADS = WIDTH | {"kv_heads": 4, "head_dim": 64}
LATENT = {"rank": 128, "plain_dim": 64, "rope_dim": 32, "value_dim": 64}
DELTA = {"key_heads": 4, "value_heads": 8, "key_dim": 64, "value_dim": 64}
OF_CHANNELS = DELTA | {"key_heads": 8, "decay": "channel", "gate": "sigmoid", "gate_rank": 64}
SSD = {"heads": 16, "head_dim": 64, "groups": 4, "state": 64}
EXPERTS = {"count": 16, "chosen": 4, "ffn": 256}
BY_SIGMOID = EXPERTS | {"score": "sigmoid", "bias_rate": 0.001}
QUARTER = ["delta", "delta", "delta", "attention"]
QWEN = HEADS | {
    "mixers": QUARTER,
    "delta": DELTA,
    "output_gate": "channel",
    "query_norm": "head",
    "norm_offset": 1.0,
}
GEMMA = HEADS | {
    "norm_places": "both",
    "query_norm": "head",
    "value_norm": True,
    "layer_scale": True,
    "embed_scale": "sqrt",
    "score_scale": 1.0,
    "mlp": "geglu",
    "tied": True,
    "windows": [128, 0],
    "full": {"head_dim": 128, "kv_heads": 2, "keys_are_values": True},
}
FAMILIES = {
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN | {"experts": EXPERTS | {"shared": 1, "shared_gate": True}},
    "gemma4": GEMMA,
    "gemma4 with shared keys": GEMMA
    | {"full": {"head_dim": 128}, "token_layers": {"dim": 64}, "shared_keys": 2},
    "gemma4 with experts": GEMMA
    | {"experts": EXPERTS | {"shared": 1, "own_norms": True, "learned_scale": True}},
    "nemotron_h": HEADS
    | {
        "layers": 8,
        "mixers": ["ssd", "none", "attention", "none"],
        "mlps": ["none", "experts"],
        "mlp": "relu2",
        "ssd": SSD,
        "rope_layers": [False],
        "experts": BY_SIGMOID | {"shared": 1, "shared_ffn": 512},
    },
    "kimi_linear": WIDTH
    | {
        "layers": 5,
        "mixers": ["delta", "delta", "delta", "attention", "delta"],
        "delta": OF_CHANNELS,
        "latent": LATENT,
        "rope_layers": [False],
        "experts": BY_SIGMOID | {"shared": 1, "first_dense": 1},
    },
    "lfm2_moe": HEADS
    | {
        "layers": 5,
        "mixers": ["conv", "conv", "attention", "conv", "attention"],
        "conv": {"taps": 3},
        "query_norm": "head",
        "experts": BY_SIGMOID | {"first_dense": 1},
    },
    "granitemoehybrid": HEADS
    | {
        "mixers": ["ssd", "ssd", "ssd", "attention"],
        "ssd": SSD,
        "rope_layers": [False],
        "experts": EXPERTS | {"shared": 1, "shared_ffn": 512},
    },
    "falcon_h1": HEADS | {"mixers": ["both"], "ssd": SSD},
    "llama4": HEADS
    | {
        "chunks": [128, 128, 128, 0],
        "rope_layers": [True, True, True, False],
        "mlps": ["mlp", "experts"],
        "query_norm": "after",
        "temperature": {"weight": 0.1, "length": 128, "layers": "no_rope", "offset": 1},
        "experts": {
            **{"count": 16, "chosen": 1, "ffn": 768, "shared": 1},
            **{"score": "sigmoid", "normalise": False, "gate_input": True},
        },
    },
    "olmo_hybrid": HEADS
    | {
        "mixers": QUARTER,
        "delta": DELTA | {"rate": 2, "norm_places": "before"},
        "norm_places": "after",
        "query_norm": "all",
        "rope_layers": [False],
    },
    "mistral4": WIDTH
    | {
        "latent": LATENT | {"query_rank": 192},
        "temperature": {"weight": 0.1, "length": 128},
        "experts": EXPERTS | {"shared": 1},
    },
}


BAND = 0.01
# The estimate over XLA's account, less one, with jax 0.12.0.
OFF = {
    "qwen3_5": -0.047,
    "qwen3_5_moe": 0.027,
    "gemma4": -0.043,
    "gemma4 with shared keys": 0.046,
    "gemma4 with experts": -0.001,
    "nemotron_h": -0.020,
    "kimi_linear": 0.042,
    "lfm2_moe": 0.075,
    "granitemoehybrid": 0.030,
    # XLA keeps the float32 products that sum up to the gradients of taps, skips and norms until the
    # end of the backward pass: 34 MB of all layers, and 31 MB more of the last two. In a model with
    # the state space alone it keeps less, and the deviation is -7.9 %.
    "falcon_h1": -0.125,
    "llama4": 0.030,
    "olmo_hybrid": -0.034,
    "mistral4": 0.005,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_total_memory_of_a_family(family: str, tmp_path: Path):
    config = RunConfig(
        model={"name": "llama"} | FAMILIES[family],
        train={
            **{"global_batch": 16, "microbatch": 1, "sequence_length": 512},
            **{"zero": 1, "remat": "dots"},
        },
        mesh={"data": 8},
        precision={"compute": "bfloat16"},
    )
    path = tmp_path / "family.toml"
    path.write_text(to_toml(config))
    found = compiled_estimate([str(path), "--hardware", "h100"])
    held = memory_in(found["compiled"]).held
    off = found["memory_bytes_per_device"]["total"] / held - 1
    assert off == pytest.approx(OFF[family], abs=BAND)
