"""Settings of a tiny model of each family, in which every setting shows.

Windows are shorter than a sequence, the original length of a rope scaling too; caps bend logits of
this size; where a family fixes no head_dim, heads x head_dim is not embed.
"""

import jax.numpy as jnp
import numpy as np

from spmdtrain.config import RunConfig
from spmdtrain.models.abstract import AbstractModel

T = 40
VOCAB = 131  # odd: padded over tensor and pipeline
GIVEN_HEAD = {"heads": 6, "kv_heads": 2, "head_dim": 16, "embed": 48}
FIXED_HEAD = {"heads": 6, "kv_heads": 2, "embed": 96}
GEMMA = {
    **GIVEN_HEAD,
    "mlp": "geglu",
    "norm_places": "both",
    "norm_offset": 1.0,
    "embed_scale": "sqrt",
    "tied": True,
    "score_scale": 24**-0.5,
    "norm_epsilon": 1e-6,
}
GEMMA4 = {
    **GEMMA,
    "norm_offset": 0.0,
    "norm_epsilon": 1e-3,
    "score_scale": 1.0,
    "query_norm": "head",
    "value_norm": True,
    "layer_scale": True,
    "logit_cap": 3.0,
    "rope_theta": 300.0,
    "rope_theta_window": 90.0,
    "rope_scaling": {"kind": "proportional", "factor": 1.0, "share": 0.25},
}
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 32}
LONG = tuple(1.0 + 0.75 * n for n in range(8))
SHORT = tuple(1.0 + 0.05 * n for n in range(8))
BY_SIGMOID = {
    "count": 8,
    "chosen": 3,
    "ffn": 24,
    "score": "sigmoid",
    "scale": 2.5,
    "bias_rate": 0.001,
}
FAMILIES = {
    "gpt2": {"name": "gpt", "heads": 4, "embed": 48},
    "llama": {
        **GIVEN_HEAD,
        "rope_theta": 500.0,
        "rope_scaling": {
            "kind": "llama3",
            "factor": 8.0,
            "low_factor": 1.0,
            "high_factor": 4.0,
            "original_length": 32,
        },
    },
    "mistral": {**GIVEN_HEAD, "windows": [7]},
    "qwen2": {**FIXED_HEAD, "qkv_bias": True, "norm_epsilon": 1e-6},
    "qwen3": {**GIVEN_HEAD, "query_norm": "head", "rope_scaling": YARN, "norm_epsilon": 1e-6},
    "qwen3_5": {
        **GIVEN_HEAD,
        "layers": 4,
        "mixers": ["delta", "attention"],
        "delta": {"key_heads": 2, "value_heads": 6, "key_dim": 8, "value_dim": 12},
        "output_gate": "channel",
        "query_norm": "head",
        "norm_offset": 1.0,
        "norm_epsilon": 1e-3,
        "rope_share": 0.5,
    },
    "gemma2": {**GEMMA, "windows": [7, 0], "score_cap": 5.0, "logit_cap": 3.0},
    "gemma3": {
        **GEMMA,
        "layers": 7,
        "windows": [7, 7, 7, 7, 7, 0],
        "query_norm": "head",
        "rope_theta": 1e6,
        "rope_theta_window": 1e4,
        "rope_scaling": {"kind": "linear", "factor": 8.0},
    },
    "gemma4": {
        **GEMMA4,
        "layers": 7,
        "windows": [7, 7, 0],
        "full": {"head_dim": 24, "kv_heads": 1, "keys_are_values": True},
    },
    "gemma4 alike": {
        **GEMMA4,
        "rope_theta_window": None,
        "full": {"head_dim": 24},
    },  # no layer has a window
    "gemma4 with tokens": {
        **GEMMA4,
        "layers": 5,
        "windows": [7, 0],
        "full": {"head_dim": 24},
        "token_layers": {"dim": 10, "vocab": 140},
    },
    "gemma4 with shared keys": {
        **GEMMA4,
        "layers": 8,
        "windows": [7, 7, 0],
        "score_scale": 0.5,  # sharper, rounding shows in so many layers
        "full": {"head_dim": 24, "kv_heads": 1},
        "shared_keys": 3,
        "shared_ffn": 100,
        "token_layers": {"dim": 10},
    },
    "gemma4 with experts": {
        **GEMMA4,
        "windows": [7, 0],
        "full": {"head_dim": 24, "kv_heads": 1, "keys_are_values": True},
        "experts": {
            "count": 8,
            "chosen": 3,
            "ffn": 24,
            "shared": 1,
            "shared_ffn": 72,
            "own_norms": True,
            "learned_scale": True,
        },
    },
    "phi3": {
        **FIXED_HEAD,
        "windows": [7],
        "rope_scaling": {
            "kind": "longrope",
            "factor": 4.0,
            "original_length": 16,
            "short": SHORT,
            "long": LONG,
            "use": "long",
        },
    },
    "phi4": {**FIXED_HEAD, "rope_share": 0.75, "tied": True},
    "olmo2": {**FIXED_HEAD, "norm_places": "after", "query_norm": "all", "norm_epsilon": 1e-6},
    "olmo3": {
        **FIXED_HEAD,
        "norm_places": "after",
        "query_norm": "all",
        "windows": [7, 7, 7, 0],
        "rope_theta": 5e5,
        "rope_theta_window": 5e5,
        "rope_scaling": {**YARN, "scale": 1.2},
        "norm_epsilon": 1e-6,
    },
    "smollm3": {**FIXED_HEAD, "rope_layers": [True, True, True, False], "tied": True},
    "granite": {
        **GIVEN_HEAD,
        "score_scale": 0.3,
        "embed_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 0.125,
        "norm_epsilon": 1e-6,
    },
    "gpt_oss": {
        **GIVEN_HEAD,
        "qkv_bias": True,
        "out_bias": True,
        "windows": [7, 0],
        "sinks": True,
        "rope_theta": 1.5e5,
        "rope_scaling": {**YARN, "truncate": False},
        "mlp": "swiglu_clamped",
        "mlp_bias": True,
        "experts": {"count": 4, "chosen": 2, "ffn": 36, "logit_bias": True},
    },
    "mixtral": {**GIVEN_HEAD, "experts": {"count": 4, "chosen": 2}},
    "qwen3_moe": {
        **GIVEN_HEAD,
        "query_norm": "head",
        "experts": {"count": 8, "chosen": 3, "ffn": 24, "normalise": False},
    },
    "deepseek_v3": {
        "heads": 3,
        "embed": 40,
        "latent": {
            "rank": 20,
            "query_rank": 28,
            "plain_dim": 10,
            "rope_dim": 6,
            "value_dim": 14,
        },
        "rope_scaling": {**YARN, "scale": 1.0},
        "score_scale": 1.3 * 16**-0.5,
        "norm_epsilon": 1e-6,
        "experts": {
            "count": 8,
            "chosen": 3,
            "ffn": 24,
            "shared": 1,
            "first_dense": 2,
            "score": "sigmoid",
            "scale": 2.5,
            "groups": 4,
            "groups_kept": 2,
            "bias_rate": 0.001,
        },
    },
    "glm4_moe": {
        **GIVEN_HEAD,
        "rope_share": 0.5,
        "query_norm": "head",
        "qkv_bias": True,
        "norm_epsilon": 1e-5,
        "experts": BY_SIGMOID | {"shared": 1, "first_dense": 1, "groups": 4, "groups_kept": 2},
    },
    "glm4_moe_lite": {
        "heads": 3,
        "embed": 40,
        "latent": {
            "rank": 20,
            "query_rank": 28,
            "plain_dim": 10,
            "rope_dim": 6,
            "value_dim": 14,
            "epsilon": 1e-6,
        },
        "norm_epsilon": 1e-3,
        "experts": BY_SIGMOID | {"shared": 1, "first_dense": 1, "groups": 4, "groups_kept": 2},
    },
    "minimax_m2": {
        **GIVEN_HEAD,
        "rope_share": 0.375,
        "query_norm": "all",
        "norm_epsilon": 1e-6,
        "experts": BY_SIGMOID | {"scale": 1.0},
    },
    "exaone4": {
        **GIVEN_HEAD,
        "layers": 5,
        "norm_places": "after",
        "query_norm": "head",
        "windows": [7, 7, 7, 0],
        "rope_layers": [True, True, True, False],
    },
    "cohere2": {
        **GIVEN_HEAD,
        "layers": 5,
        "norm": "layernorm",
        "norm_places": "parallel",
        "norm_epsilon": 1e-3,
        "logit_scale": 0.7,
        "tied": True,
        "windows": [7, 7, 0],
        "rope_layers": [True, True, False],
    },
    "every second layer, grouped": {
        **GIVEN_HEAD,
        "layers": 5,
        "windows": [7, 0, 0],
        "experts": {
            "count": 8,
            "chosen": 3,
            "ffn": 24,
            "shared": 2,
            "first_dense": 1,
            "every": 2,
            "score": "sigmoid",
            "scale": 2.5,
            "groups": 4,
            "groups_kept": 2,
            "bias_rate": 0.001,
        },
    },
    "gated channels": {
        **GIVEN_HEAD,
        "query_norm": "head",
        "norm_offset": 1.0,
        "rope_share": 0.25,
        "output_gate": "channel",
        "norm_epsilon": 1e-3,
    },
    "gated heads": {**GIVEN_HEAD, "output_gate": "head"},
    "arcee": {**GIVEN_HEAD, "mlp": "relu2"},
    "afmoe": {
        **GIVEN_HEAD,
        "norm_places": "both",
        "query_norm": "head",
        "output_gate": "channel",
        "embed_scale": "sqrt",
        "norm_epsilon": 1e-3,
        "windows": [7, 7, 0],
        "rope_layers": [True, True, False],
        "experts": {**BY_SIGMOID, "shared": 1, "first_dense": 1},
    },
    "apertus": {**GIVEN_HEAD, "query_norm": "head", "mlp": "xielu"},
    "ministral3": {
        **GIVEN_HEAD,
        "rope_scaling": {**YARN, "scale": 1.0},
        "temperature": {"weight": 0.1, "length": 12},
    },
    "cooled without rope": {
        **GIVEN_HEAD,
        "rope_layers": [True, True, False],
        "temperature": {"weight": 0.3, "length": 12, "offset": 1, "layers": "no_rope"},
    },
    "qwen2_moe": {
        **FIXED_HEAD,
        "qkv_bias": True,
        "norm_epsilon": 1e-3,
        "experts": {
            "count": 8,
            "chosen": 3,
            "ffn": 24,
            "shared": 1,
            "shared_ffn": 40,
            "shared_gate": True,
            "normalise": False,
        },
    },
    "ernie4_5_moe": {
        **GIVEN_HEAD,
        "norm_epsilon": 1e-3,
        "experts": {
            "count": 8,
            "chosen": 3,
            "ffn": 24,
            "shared": 2,
            "first_dense": 1,
            "bias_rate": 0.0,
            "smallest_sum": 0.5,
        },
    },
    "olmo_hybrid": {
        **FIXED_HEAD,
        "layers": 5,
        "mixers": ["delta", "delta", "delta", "attention"],
        "delta": {
            "key_heads": 2,
            "value_heads": 6,
            "key_dim": 8,
            "value_dim": 12,
            "taps": 2,
            "rate": 2,
            "epsilon": 1e-5,
            "norm_places": "before",
        },
        "norm_places": "after",
        "query_norm": "all",
        "norm_epsilon": 1e-3,
        "rope_layers": [False],
    },
    "kimi_linear": {
        "heads": 3,
        "embed": 40,
        "layers": 5,
        "mixers": ["delta", "attention", "delta", "delta", "attention"],
        "delta": {
            "key_heads": 4,
            "value_heads": 4,
            "key_dim": 6,
            "value_dim": 6,
            "taps": 3,
            "decay": "channel",
            "gate": "sigmoid",
            "gate_rank": 6,
        },
        "latent": {
            "rank": 20,
            "plain_dim": 10,
            "rope_dim": 6,
            "value_dim": 14,
            "epsilon": 1e-6,
        },
        "rope_layers": [False],
        "norm_epsilon": 1e-3,
        "experts": BY_SIGMOID | {"shared": 1, "first_dense": 1, "groups": 4, "groups_kept": 2},
    },
    "nemotron_h": {
        **GIVEN_HEAD,
        "layers": 7,
        "mixers": ["ssd", "none", "none", "ssd", "attention", "none", "ssd"],
        "mlps": ["none", "experts", "mlp", "none", "none", "experts", "none"],
        "ssd": {"heads": 6, "head_dim": 10, "groups": 2, "state": 9, "taps": 3},
        "rope_layers": [False],
        "mlp": "relu2",
        "norm_epsilon": 1e-5,
        "experts": BY_SIGMOID
        | {"shared": 1, "shared_ffn": 28, "groups": 4, "groups_kept": 2, "width": 20},
    },
    "nemotron_h, clamped": {
        **GIVEN_HEAD,
        "layers": 3,
        "mixers": ["ssd", "none"],
        "mlps": ["none", "mlp"],
        "ssd": {
            **{"heads": 4, "head_dim": 9, "groups": 1, "state": 8, "taps": 2},
            **{"taps_bias": False, "smallest_step": 0.5, "largest_step": 1.2},
        },
        "mlp": "relu2",
    },
    "granitemoehybrid": {
        **GIVEN_HEAD,
        "layers": 5,
        "mixers": ["ssd", "ssd", "attention", "ssd", "attention"],
        "ssd": {"heads": 6, "head_dim": 8, "groups": 2, "state": 9},
        "rope_layers": [False],
        "score_scale": 0.3,
        "embed_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 0.125,
        "experts": {"count": 8, "chosen": 3, "ffn": 24, "shared": 1, "shared_ffn": 28},
    },
    "falcon_h1": {
        **GIVEN_HEAD,
        "layers": 3,
        "mixers": ["both"],
        "both": {"in_factor": 1.2, "out_factor": 0.8},
        "ssd": {
            **{"heads": 6, "head_dim": 10, "groups": 3, "state": 9},
            **{"in_factor": 1.3, "out_factor": 0.75, "factors": [0.7, 1.3, 0.8, 1.2, 0.9]},
        },
        "score_scale": 0.7 * 16**-0.5,
        "embed_scale": 1.7,
        "logit_scale": 0.5,
        "mlp_gate_factor": 1.4,
        "mlp_out_factor": 0.6,
        "norm_epsilon": 1e-3,
    },
    "llama4": {
        **GIVEN_HEAD,
        "layers": 5,
        "norm_epsilon": 1e-3,
        "query_norm": "after",
        "rope_theta": 500.0,
        "rope_scaling": {
            "kind": "llama3",
            "factor": 8.0,
            "low_factor": 1.0,
            "high_factor": 1.0,
            "original_length": 32,
        },
        "rope_layers": [True, True, False],
        "chunks": [12, 12, 0],
        "temperature": {"weight": 0.3, "length": 8, "offset": 1, "layers": "no_rope"},
        "mlps": ["mlp", "experts"],
        "experts": {
            "count": 4,
            "chosen": 1,
            "ffn": 24,
            "shared": 1,
            "score": "sigmoid",
            "normalise": False,
            "gate_input": True,
        },
    },
    "lfm2": {
        **GIVEN_HEAD,
        "layers": 5,
        "mixers": ["conv", "attention", "conv", "conv", "attention"],
        "conv": {"taps": 3, "bias": True},
        "query_norm": "head",
        "norm_epsilon": 1e-3,
        "tied": True,
    },
    "lfm2_moe": {
        **GIVEN_HEAD,
        "layers": 5,
        "mixers": ["conv", "conv", "attention", "attention", "conv"],
        "conv": {"taps": 4},
        "query_norm": "head",
        "norm_epsilon": 1e-3,
        "experts": BY_SIGMOID | {"first_dense": 1, "sum_epsilon": 0.3},
    },
    "exact": {"name": "gpt", "heads": 4, "embed": 48, "mlp": "gelu_exact", "mlp_bias": False},
}


def family_config(name: str, **changes) -> RunConfig:
    """The tiny run of a family."""
    model = {"name": "llama", "layers": 4, "ffn": 72, "vocab": VOCAB, **FAMILIES[name], **changes}
    return RunConfig(model=model, train={"sequence_length": T, "global_batch": 8, "steps": 3})


def draw_params(model: AbstractModel, offset: float = 0.0, seed: int = 0) -> dict[str, np.ndarray]:
    """Every parameter at random, layers in order: no norm is 1, no bias 0.

    Matrices are N(0, 0.8 / sqrt(in)), vectors N(0, 0.2) about what they begin with, tables
    N(0, 0.5).
    """
    random = np.random.default_rng(seed)
    drawn = {}
    for path, parameter in sorted(model.parameters.items()):
        noise = random.standard_normal(parameter.shape)
        if "scale" in path:
            drawn[path] = 1 - offset + 0.2 * noise
        elif path.endswith(("bias", "bias_e", "bias_x", "sinks", "alpha_p", "alpha_n")):
            drawn[path] = 0.2 * noise
        elif path.endswith(("table_vf", "table_ve", "unembed_ve", "positions_te")):
            drawn[path] = 0.5 * noise
        else:
            inputs = parameter.shape[1:4] if path.endswith("out_kgde") else parameter.shape[1:2]
            if path.endswith(("up_xeu", "down_xfe")):
                inputs = parameter.shape[2:3]
            drawn[path] = 0.8 * np.prod(inputs) ** -0.5 * noise
    return {path: jnp.asarray(x, jnp.float32) for path, x in drawn.items()}


OWN_EXPERTS = (
    *("model.experts.count=4", "model.experts.chosen=2", "model.experts.ffn=24"),
    *("model.experts.shared=1", "model.experts.own_norms=true"),
    *("model.experts.learned_scale=true", "model.mlp=geglu"),
)
# Models that have every setting between them, in sizes that a mesh of eight splits. No depth is a
# multiple of its patterns, nor of two stages.
RICH = {
    "capped": (
        *("model.layers=5", "model.windows=3,3,0", "model.rope_theta_window=100"),
        *("model.rope_scaling.kind=llama3", "model.rope_scaling.factor=8"),
        *("model.rope_scaling.original_length=12", "model.query_norm=head", "model.mlp=geglu"),
        *("model.norm_places=both", "model.norm_offset=1", "model.embed_scale=sqrt"),
        *("model.score_scale=0.3", "model.score_cap=5", "model.logit_cap=3", "model.tied=true"),
        "model.output_gate=head",
    ),
    "sunk": (
        *("model.layers=3", "model.windows=5,0", "model.sinks=true", "model.query_norm=all"),
        *("model.qkv_bias=true", "model.out_bias=true", "model.norm_places=after"),
        *("model.rope_layers=true,true,false", "model.rope_share=0.5"),
        *("model.rope_scaling.kind=yarn", "model.rope_scaling.factor=4"),
        *("model.rope_scaling.original_length=12", "model.rope_scaling.truncate=false"),
        *("model.residual_scale=0.5", "model.logit_scale=0.4", "model.embed_scale=3"),
        *("model.output_gate=channel", "model.temperature.weight=0.3"),
        *("model.temperature.length=3", "model.temperature.layers=no_rope"),
    ),
    "routed": (
        *("model.layers=5", "model.windows=5,0,0", "model.mlp_bias=true"),
        *("model.experts.count=4", "model.experts.chosen=2", "model.experts.shared=1"),
        *("model.experts.first_dense=1", "model.experts.every=2", "model.experts.ffn=24"),
        *("model.mlp=relu2", "model.experts.bias_rate=0.01", "model.experts.smallest_sum=0.6"),
    ),
    "own": (
        *("model.layers=3", "model.windows=5,0", "model.full.head_dim=16", "model.full.kv_heads=4"),
        *("model.full.keys_are_values=true", "model.value_norm=true", "model.layer_scale=true"),
        *("model.rope_theta_window=100", "model.rope_scaling.kind=proportional"),
        *("model.rope_scaling.factor=2", "model.rope_scaling.share=0.5", "model.score_scale=0.3"),
        *("model.query_norm=head", "model.norm_places=both", "model.embed_scale=sqrt"),
        *("model.token_layers.dim=6", "model.norm_epsilon=1e-3", "model.qkv_bias=true"),
    ),
    "sharing": (
        *("model.layers=3", "model.windows=5,0", "model.shared_keys=1", "model.shared_ffn=64"),
        *("model.full.head_dim=16", "model.full.kv_heads=4", "model.value_norm=true"),
        *("model.query_norm=head", "model.norm_places=both", "model.qkv_bias=true"),
        *("model.token_layers.dim=6", "model.norm_epsilon=1e-2"),
    ),
    "beside": (
        *("model.layers=4", "model.windows=5,0", "model.full.head_dim=16", "model.value_norm=true"),
        *("model.norm_places=both", "model.query_norm=head", "model.norm_epsilon=1e-3"),
        *OWN_EXPERTS,
        "model.experts.shared_ffn=20",
    ),
    "beside, sharing": (
        *("model.layers=3", "model.windows=5,0", "model.shared_keys=1", "model.shared_ffn=64"),
        *("model.full.head_dim=16", "model.full.kv_heads=4", "model.value_norm=true"),
        *("model.norm_places=both", "model.query_norm=head", "model.norm_epsilon=1e-2"),
        *("model.token_layers.dim=6", "model.layer_scale=true", "model.score_scale=0.15"),
        *OWN_EXPERTS,
    ),
    "latent": (
        *("model.layers=3", "model.windows=5,0", "model.sinks=true", "model.out_bias=true"),
        *("model.latent.rank=16", "model.latent.query_rank=8", "model.latent.plain_dim=6"),
        *("model.latent.rope_dim=4", "model.latent.value_dim=5", "model.score_cap=5"),
        *("model.rope_scaling.kind=yarn", "model.rope_scaling.factor=4"),
        *("model.rope_scaling.original_length=12", "model.rope_scaling.scale=1"),
        *("model.temperature.weight=0.3", "model.temperature.length=3", "model.mlp=xielu"),
    ),
    "further": (
        *("model.layers=3", "model.windows=5,0", "model.embed_scale=3", "model.tied=true"),
        *("model.experts.count=4", "model.experts.chosen=2", "model.experts.ffn=24"),
        *("model.experts.first_dense=1", "model.experts.balance=0.1"),
        *("model.experts.shared=1", "model.experts.shared_ffn=16"),
        "model.experts.shared_gate=true",
        *("model.multi_token.depth=2", "model.multi_token.weight=0.5"),
    ),
    "one part": (
        *("model.layers=8", "model.mixers=ssd,none,attention,none", "model.rope_layers=false"),
        "model.mlps=none,experts,none,mlp",
        *("model.ssd.heads=8", "model.ssd.head_dim=6", "model.ssd.groups=4", "model.ssd.state=5"),
        *("model.mlp=relu2", "model.experts.count=4", "model.experts.chosen=2"),
        *(
            "model.norm_epsilon=1e-3",
            "model.experts.ffn=24",
            "model.experts.width=16",
            "model.experts.bias_rate=0.01",
        ),
        *("model.experts.score=sigmoid", "model.experts.shared=1", "model.experts.shared_ffn=20"),
    ),
    "side by side": (
        *("model.layers=2", "model.mixers=both", "model.ssd.heads=8", "model.ssd.head_dim=6"),
        *("model.ssd.state=5", "model.ssd.factors=0.7,1.3,0.8,1.2,0.9", "model.ssd.in_factor=1.3"),
        *("model.both.in_factor=1.2", "model.both.out_factor=0.8", "model.mlp_gate_factor=1.4"),
        *("model.mlp_out_factor=0.6", "model.score_scale=0.3", "model.ssd.norm=none"),
    ),
    "chunked": (
        *("model.layers=5", "model.chunks=6,0,5", "model.rope_layers=true,false"),
        *("model.query_norm=after", "model.qkv_bias=true", "model.sinks=true"),
        *("model.temperature.weight=0.3", "model.temperature.length=3"),
        *("model.temperature.layers=no_rope", "model.temperature.offset=1"),
        *("model.mlps=['mlp', 'experts']", "model.experts.count=4", "model.experts.chosen=2"),
        *("model.experts.ffn=24", "model.experts.shared=1", "model.experts.normalise=false"),
        *("model.experts.score=sigmoid", "model.experts.gate_input=true"),
    ),
    "convolved": (
        *("model.layers=5", "model.mixers=['conv', 'attention', 'conv', 'conv', 'attention']"),
        *("model.conv.taps=3", "model.conv.bias=true", "model.query_norm=head"),
        *("model.experts.count=4", "model.experts.chosen=2", "model.experts.ffn=24"),
        *("model.experts.first_dense=1", "model.experts.bias_rate=0.01"),
        *("model.experts.score=sigmoid", "model.experts.sum_epsilon=0.4"),
    ),
}
# What a model with latent attention has no use for.
OF_HEADS = ("model.kv_heads", "model.head_dim")
RICH_SIZES = (
    *("model.name=llama", "model.embed=32", "model.heads=4", "model.kv_heads=2"),
    *("model.head_dim=12", "model.ffn=48", "model.vocab=32", "train.sequence_length=16"),
    *("data.corpus=synthetic", "train.global_batch=8", "train.steps=2", "optimizer.warmup=0"),
)


def rich(name: str, *placement: str) -> tuple[str, ...]:
    """The `--set` strings of one of them."""
    sizes = RICH_SIZES
    if name == "latent":
        sizes = tuple(each for each in sizes if not each.startswith(OF_HEADS))
    return (*sizes, *RICH[name], *placement)
