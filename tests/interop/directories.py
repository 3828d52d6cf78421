"""Tiny directories of published models, named and shaped as transformers writes them.

The shapes follow the files of each family, not our tables: the tests compare the two.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gemma4_files
import mixer_directories
import ml_dtypes
import numpy as np
import pytest
import ssd_directories
from safetensors.numpy import save_file

from spmdtrain.interop.pieces import Rows

VOCAB, LAYERS = 131, 3
FULL, WINDOW = "full_attention", "sliding_attention"
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": LAYERS,
    "n_head": 6,
    "n_positions": 64,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "torch_dtype": "float32",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LIKE_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 72,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}
OWN_HEAD_DIM = LIKE_LLAMA | {"hidden_size": 96}  # where transformers takes hidden / heads
GEMMA = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 7,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": LIKE_LLAMA
    | {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": LIKE_LLAMA | {"model_type": "mistral", "sliding_window": 7},
    "qwen2": LIKE_LLAMA
    | {"model_type": "qwen2", "hidden_size": 96, "use_sliding_window": False, "sliding_window": 7},
    "qwen3": LIKE_LLAMA | {"model_type": "qwen3", "attention_bias": False},
    "gemma2": LIKE_LLAMA
    | GEMMA
    | {
        "model_type": "gemma2",
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": LIKE_LLAMA
    | GEMMA
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,  # no multiple of the six kinds of layers
        "rope_local_base_freq": 90.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": OWN_HEAD_DIM
    | {
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
        },
        "sliding_window": None,
        "pad_token_id": 0,
    },
    "olmo2": OWN_HEAD_DIM | {"model_type": "olmo2"},
    "olmo3": OWN_HEAD_DIM
    | {
        "model_type": "olmo3",
        # Of any other, transformers 5.24 gives layers with a window 500,000 all the same.
        "rope_theta": 500000.0,
        "num_hidden_layers": 4,
        "sliding_window": 7,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "smollm3": OWN_HEAD_DIM
    | {
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "pad_token_id": 0,
    },
    "granite": OWN_HEAD_DIM
    | {
        "model_type": "granite",
        "attention_multiplier": 0.1,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    },
    "gpt_oss": LIKE_LLAMA
    | {
        "model_type": "gpt_oss",
        "intermediate_size": 32,
        "hidden_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "mixtral": LIKE_LLAMA
    | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": LIKE_LLAMA
    | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v3": LIKE_LLAMA
    | {
        "model_type": "deepseek_v3",
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 6,
        "kv_lora_rank": 20,
        "q_lora_rank": 28,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}

# Of families with experts whose router has a sigmoid, a bias that chooses, and mostly groups. With
# an epsilon of this size, an error of it shows.
ROUTED = LIKE_LLAMA | {
    "rms_norm_eps": 1e-3,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
GROUPED = ROUTED | {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
SEPARATE_WIDTH = {"hidden_size": 96, "head_dim": 16}  # of classes that take hidden / heads
EXAONE = {"sliding_window": 7, "layer_types": [WINDOW, WINDOW, WINDOW, FULL, WINDOW]}
CONFIGS |= {
    "glm": LIKE_LLAMA
    | {
        "model_type": "glm",
        "rms_norm_eps": 1e-3,
        "attention_bias": True,
        "partial_rotary_factor": 0.75,
        "pad_token_id": 0,
    },
    "glm4": LIKE_LLAMA
    | {
        "model_type": "glm4",
        "rms_norm_eps": 1e-3,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "glm4_moe": GROUPED
    | {
        "model_type": "glm4_moe",
        "num_hidden_layers": 5,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.75,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe_lite": {
        name: value
        for name, value in CONFIGS["deepseek_v3"].items()
        if name not in ("head_dim", "first_k_dense_replace")
    }
    | {
        "model_type": "glm4_moe_lite",
        "rms_norm_eps": 1e-3,
        "rope_scaling": None,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "dots1": GROUPED
    | {
        "model_type": "dots1",
        "num_hidden_layers": 5,
        "first_k_dense_replace": 1,
        "sliding_window": 7,
        "max_window_layers": 2,
    },
    "solar_open": GROUPED | {"model_type": "solar_open", "attention_bias": True},
    "hy_v3": ROUTED
    | {
        "model_type": "hy_v3",
        "num_experts": 8,
        "num_shared_experts": 1,
        "router_scaling_factor": 2.826,
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "mlp_bias": False,
        "enable_moe_fp32_combine": True,
    },
    "minimax_m2": LIKE_LLAMA
    | {
        "model_type": "minimax_m2",
        "rms_norm_eps": 1e-3,
        "intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rotary_dim": 6,
        "router_jitter_noise": 0.0,
    },
    "seed_oss": LIKE_LLAMA
    | {
        "model_type": "seed_oss",
        "rms_norm_eps": 1e-3,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "residual_dropout": 0.1,
    },
    "cohere2": {name: value for name, value in OWN_HEAD_DIM.items() if name != "rms_norm_eps"}
    | {
        "model_type": "cohere2",
        "layer_norm_eps": 1e-3,
        "num_hidden_layers": 5,
        "logit_scale": 0.7,
        "sliding_window": 7,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        # Published files have these keys, and no class reads them.
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_parallel_block": True,
    },
    "exaone4": LIKE_LLAMA
    | EXAONE
    | {
        "model_type": "exaone4",
        "rms_norm_eps": 1e-3,
        "num_hidden_layers": 5,
        "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": True,
    },
    "exaone_moe": ROUTED
    | EXAONE
    | {
        "model_type": "exaone_moe",
        "num_hidden_layers": 5,
        "num_experts": 8,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    },
    "olmoe": LIKE_LLAMA
    | SEPARATE_WIDTH
    | {
        "model_type": "olmoe",
        "rms_norm_eps": 1e-3,
        "intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "clip_qkv": None,
    },
    "flex_olmo": LIKE_LLAMA
    | SEPARATE_WIDTH
    | {
        "model_type": "flex_olmo",
        "rms_norm_eps": 1e-3,
        "intermediate_size": 24,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "pad_token_id": 0,  # or that of the class, which is beyond this vocabulary
    },
}
# Rotary positions of Ministral 3 and Mistral Small 4, with the temperature of queries. The tests'
# sequences are longer than its length: up to there it is 1.
COOLED = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
CONFIGS |= {
    "granitemoe": CONFIGS["granite"]
    | {
        "model_type": "granitemoe",
        "rms_norm_eps": 1e-3,
        "intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
    },
    "qwen2_moe": ROUTED
    | SEPARATE_WIDTH
    | {
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
        "qkv_bias": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 3,  # every second layer up to that one
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "granitemoeshared": CONFIGS["granite"]
    | {
        "model_type": "granitemoeshared",
        "rms_norm_eps": 1e-3,
        "intermediate_size": 24,
        "shared_intermediate_size": 40,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
    },
    "ministral": LIKE_LLAMA
    | {
        "model_type": "ministral",
        "rms_norm_eps": 1e-3,
        "sliding_window": 7,
        "layer_types": [WINDOW, FULL, WINDOW],
    },
    "cwm": OWN_HEAD_DIM
    | {
        "model_type": "cwm",
        "rms_norm_eps": 1e-3,
        "num_hidden_layers": 5,
        "sliding_window": 7,
        "mlp_bias": True,
        "rope_scaling": CONFIGS["llama"]["rope_scaling"],
        "pretraining_tp": 1,
    },
    "starcoder2": {name: value for name, value in OWN_HEAD_DIM.items() if name != "rms_norm_eps"}
    | {
        "model_type": "starcoder2",
        "norm_epsilon": 1e-3,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "sliding_window": 7,
        "tie_word_embeddings": True,
        # Published files have these keys, and no class reads them.
        "activation_function": "gelu_pytorch_tanh",
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "scale_attn_weights": True,
        "attention_softmax_in_fp32": True,
        "scale_attention_softmax_in_fp32": True,
    },
    "youtu": LIKE_LLAMA
    | {
        "model_type": "youtu",
        "rms_norm_eps": 1e-3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 6,
        "kv_lora_rank": 20,
        "q_lora_rank": 28,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "tie_word_embeddings": True,
    },
    "ministral3": LIKE_LLAMA
    | {
        "model_type": "ministral3",
        "rms_norm_eps": 1e-3,
        "rope_theta": None,
        "rope_parameters": COOLED,
        "sliding_window": None,
        "pad_token_id": 0,
    },
    "mistral4": CONFIGS["deepseek_v3"]
    | {
        "model_type": "mistral4",
        "rms_norm_eps": 1e-3,
        "head_dim": 16,
        **dict.fromkeys(("rope_theta", "rope_scaling", "scoring_func", "topk_method")),
        "rope_parameters": COOLED | {"partial_rotary_factor": 6 / 16},
        "pad_token_id": 0,
    },
    "arcee": LIKE_LLAMA
    | {
        "model_type": "arcee",
        "rms_norm_eps": 1e-3,
        "hidden_act": "relu2",
        "mlp_bias": True,
    },
    "apertus": OWN_HEAD_DIM
    | {
        "model_type": "apertus",
        "rms_norm_eps": 1e-3,
        "hidden_act": "xielu",
        "rope_scaling": CONFIGS["llama"]["rope_scaling"],
        "pad_token_id": 0,
    },
    "ernie4_5": LIKE_LLAMA
    | {
        "model_type": "ernie4_5",
        "rms_norm_eps": 1e-3,
        "use_bias": True,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "ernie4_5_moe": OWN_HEAD_DIM
    | {
        "model_type": "ernie4_5_moe",
        "rms_norm_eps": 1e-3,
        "num_hidden_layers": 5,
        "moe_intermediate_size": 24,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 2,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 0.6,  # or it would not show
        "use_bias": False,
        "pad_token_id": 0,
    },
}
# Most layers have the gated delta rule; the depth is no multiple of their period.
LINEAR = LIKE_LLAMA | {
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
LINEAR_ROUTED = LINEAR | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
CONFIGS |= {
    "qwen3_5_text": LINEAR
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
        "layer_types": ["linear_attention", FULL] * 2,
        "mrope_section": [2, 1, 1],
    },
    "qwen3_5_moe_text": LINEAR_ROUTED | {"model_type": "qwen3_5_moe_text"},
    "qwen3_next": LINEAR_ROUTED
    | {"model_type": "qwen3_next", "full_attention_interval": 3, "mlp_only_layers": []},
}
CONFIGS |= mixer_directories.CONFIGS
CONFIGS |= gemma4_files.CONFIGS
CONFIGS |= ssd_directories.CONFIGS
# Three layers in four have rotary positions and attend within blocks.
CONFIGS["llama4_text"] = LIKE_LLAMA | {
    "model_type": "llama4_text",
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 12,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8,
    "use_qk_norm": True,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 32,
    },
}
CONFIGS["afmoe"] = LIKE_LLAMA | {
    "model_type": "afmoe",
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 5,
    "num_dense_layers": 1,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "route_scale": 2.826,
    "route_norm": True,
    "score_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "load_balance_coeff": 0.001,
    "global_attn_every_n_layers": 3,
    "sliding_window": 7,
    "mup_enabled": True,
}
# The names of a layer's experts in published files: the router, its bias, the matrices of expert X,
# and the mlp of the shared experts.
NEWER = ("mlp.experts.X.gate_proj", "mlp.experts.X.up_proj", "mlp.experts.X.down_proj")
OLDER = tuple(f"block_sparse_moe.experts.X.{name}" for name in ("w1", "w3", "w2"))
LIKE_DEEPSEEK = (
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
    NEWER,
    "mlp.shared_experts",
)
EXPERTS: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "mixtral": ("block_sparse_moe.gate.weight", "", OLDER, ""),
    "qwen3_moe": ("mlp.gate.weight", "", NEWER, ""),
    "olmoe": ("mlp.gate.weight", "", NEWER, ""),
    "flex_olmo": ("mlp.gate.weight", "", NEWER, ""),
    "minimax_m2": (
        "block_sparse_moe.gate.weight",
        "block_sparse_moe.e_score_correction_bias",
        OLDER,
        "",
    ),
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "dots1", "solar_open"), LIKE_DEEPSEEK
    ),
    "hy_v3": ("mlp.router.gate.weight", "mlp.expert_bias", NEWER, "mlp.shared_mlp"),
    "afmoe": ("mlp.router.gate.weight", "mlp.expert_bias", NEWER, "mlp.shared_experts"),
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared"), ("block_sparse_moe.router.layer.weight", "", (), "")
    ),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next"),
        ("mlp.gate.weight", "", NEWER, "mlp.shared_expert"),
    ),
    "mistral4": ("mlp.gate.weight", "", (), "mlp.shared_experts"),
    "ernie4_5_moe": (
        "mlp.gate.weight",
        "mlp.moe_statics.e_score_correction_bias",
        NEWER,
        "mlp.shared_experts",
    ),
    "exaone_moe": (
        "mlp.gate.weight",
        "mlp.e_score_correction_bias",
        NEWER,
        "mlp.shared_experts",
    ),
}
QUERY_NORM_OF_HEAD = (
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "dots1",
    "hy_v3",
    "exaone4",
    "exaone_moe",
    "apertus",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "afmoe",
)
QUERY_NORM_OF_ALL = ("olmo2", "olmo3", "olmoe", "flex_olmo", "minimax_m2")
# The matrices of all experts in one tensor each, in families that have no other layout.
STACKED = {
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared"),
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
    "mistral4": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
}
UNGATED = ("arcee", "apertus")
FUSED_MLP = ("phi3", "glm", "glm4")
# In float32, torch's own gradient of a slope of xIELU, a sum over all tokens, is off by 6e-6, and
# those of eight layers of Gemma 4 by 4e-6, where ours are by 3e-6.
IN_DOUBLE = ("apertus", "gemma4_text with shared keys")
XIELU_CONSTANTS = {"act_fn.beta": 0.5, "act_fn.eps": -1e-6}
LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
NORMS_AFTER = ("olmo2", "olmo3", "flex_olmo", "exaone4")

COHERE_BY_LAYERS = {
    name: value for name, value in CONFIGS["cohere2"].items() if name != "layer_switch"
}

# The same families with settings that only some of their models have.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama, tied, by rope_parameters": LIKE_LLAMA
    | {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "qwen2 with windows": LIKE_LLAMA
    | {
        "model_type": "qwen2",
        "hidden_size": 96,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3 with yarn": LIKE_LLAMA
    | {
        "model_type": "qwen3",
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "olmo2 with yarn, by rope_parameters": CONFIGS["olmo2"]
    | {
        "rope_theta": None,
        "rope_parameters": YARN,
    },
    "phi3, short": CONFIGS["phi3"]
    | {"max_position_embeddings": 16, "original_max_position_embeddings": 16},
    "phi3 without longrope, with a window": CONFIGS["phi3"]
    | {"rope_scaling": None, "partial_rotary_factor": 1.0, "sliding_window": 7},
    "glm4_moe, tied, by rope_parameters": CONFIGS["glm4_moe"]
    | {
        "use_qk_norm": False,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "partial_rotary_factor": None,
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
        },
        "first_k_dense_replace": 0,
        "num_key_value_heads": 6,
    },
    "starcoder2 without biases": CONFIGS["starcoder2"]
    | {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False},
    "granitemoeshared without a shared mlp": CONFIGS["granitemoeshared"]
    | {"shared_intermediate_size": 0, "tie_word_embeddings": False},
    "youtu with yarn": CONFIGS["youtu"]
    | {"q_lora_rank": None, "rope_scaling": CONFIGS["deepseek_v3"]["rope_scaling"]},
    "afmoe, windows by a list, not scaled": CONFIGS["afmoe"]
    | {
        "num_dense_layers": 2,
        "num_shared_experts": 1,
        "mup_enabled": False,
        "tie_word_embeddings": True,
        "layer_types": [WINDOW, FULL, FULL, WINDOW, WINDOW],
        "num_key_value_heads": 6,
    },
    "glm4_moe_lite with yarn": CONFIGS["glm4_moe_lite"]
    | {
        "q_lora_rank": None,
        "num_hidden_layers": 5,
        "rope_scaling": CONFIGS["deepseek_v3"]["rope_scaling"],
        "mlp_layer_types": None,
    },
    "deepseek_v3 with another epsilon": CONFIGS["deepseek_v3"] | {"rms_norm_eps": 1e-3},
    "dots1 without windows": CONFIGS["dots1"]
    | {"sliding_window": None, "attention_bias": True, "n_group": 1, "topk_group": 1},
    "solar_open, tied": CONFIGS["solar_open"]
    | {"attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 3},
    "hy_v3 with biases": CONFIGS["hy_v3"]
    | {"attention_bias": True, "mlp_layer_types": None, "num_shared_experts": 2},
    "minimax_m2, all channels": {
        name: value for name, value in CONFIGS["minimax_m2"].items() if name != "rotary_dim"
    },
    "seed_oss, all biases": CONFIGS["seed_oss"]
    | {"attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "cohere2 without windows": COHERE_BY_LAYERS
    | {"layer_types": [FULL] * 5, "tie_word_embeddings": False},
    "cohere2 with biases": COHERE_BY_LAYERS | {"layer_types": [WINDOW] * 5, "attention_bias": True},
    "exaone4 without windows": CONFIGS["exaone4"]
    | {"sliding_window": None, "layer_types": [FULL] * 5, "tie_word_embeddings": False},
    "exaone_moe by a period": CONFIGS["exaone_moe"]
    | {
        "layer_types": None,
        "mlp_layer_types": None,
        "sliding_window_pattern": 3,
        "first_k_dense_replace": 2,
    },
    "olmoe, normalised": CONFIGS["olmoe"] | {"norm_topk_prob": True, "attention_bias": True},
    "llama with linear scaling": LIKE_LLAMA
    | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen3_moe in steps": CONFIGS["qwen3_moe"] | {"num_hidden_layers": 4, "decoder_sparse_step": 2},
    "qwen3_next with an mlp": CONFIGS["qwen3_next"] | {"mlp_only_layers": [1, 3]},
    "ernie4_5_moe from a first layer to a last": CONFIGS["ernie4_5_moe"]
    | {"num_hidden_layers": 6, "moe_layer_start_index": 2, "moe_layer_end_index": 4},
    "exaone_moe in any order": CONFIGS["exaone_moe"]
    | {"mlp_layer_types": ["sparse", "dense", "dense", "sparse", "dense"]},
    # The share of channels that turn differs from the default of the class.
    **{
        f"{family} with yarn, by rope_parameters": CONFIGS[family]
        | {
            "partial_rotary_factor": None,
            "rope_theta": None,
            "rope_parameters": YARN | {"partial_rotary_factor": share},
        }
        for family, share in (("glm4_moe", 0.25), ("qwen3_5_text", 0.5))
    },
    **gemma4_files.VARIANTS,
}


VARIANTS |= mixer_directories.VARIANTS | ssd_directories.VARIANTS


def tensors_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors in the files of a family."""
    kind = config["model_type"]
    if kind in mixer_directories.CONFIGS:
        return mixer_directories.tensors_of(config)
    if kind in ssd_directories.CONFIGS:
        return ssd_directories.tensors_of(config)
    if kind == "gpt2":
        return _of_gpt2(config)
    embed, layers = config["hidden_size"], config["num_hidden_layers"]
    found = {"model.embed_tokens.weight": (config["vocab_size"], embed)}
    has_latents = "kv_lora_rank" in config
    further = config.get("num_nextn_predict_layers", 0)
    for layer in range(layers + further):
        of_layer = _of_latents(config) if has_latents else _of_attention(config)
        if _is_linear(config, layer):
            of_layer = _of_delta(config)
        is_dense = kind not in EXPERTS or layer < layers and not _is_sparse(config, layer)
        if kind.startswith("gemma4"):
            of_layer = gemma4_files.layer_tensors(config, layer)
        elif kind == "gpt_oss":
            of_layer |= _of_gpt_oss(config)
        elif kind == "llama4_text":
            of_layer |= _of_llama4(config, layer)
        else:
            of_layer |= _of_mlp(config) if is_dense else _of_experts(config)
        if not kind.startswith("gemma4"):
            parts = ("weight", "bias") if kind == "starcoder2" else ("weight",)
            of_layer |= {f"{name}.{part}": (embed,) for name in _norms(kind) for part in parts}
        if layer >= layers:
            of_layer |= {f"{x}.weight": (embed,) for x in ("enorm", "hnorm", "shared_head.norm")}
            of_layer["eh_proj.weight"] = (embed, 2 * embed)
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    if kind.startswith("gemma4"):
        found |= gemma4_files.whole_tensors(config)
    found["model.norm.weight"] = (embed,)
    if kind == "starcoder2":
        found["model.norm.bias"] = (embed,)
    if config.get("mtp_num_hidden_layers"):
        found |= _of_mtp(config)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], embed)
    return found


def _of_mtp(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Qwen's block of a further token: a layer with attention, apart from the others."""
    embed, kind = config["hidden_size"], config["model_type"]
    of_layer = _of_attention(config) | (_of_experts if kind in EXPERTS else _of_mlp)(config)
    of_layer |= {f"{name}.weight": (embed,) for name in _norms(kind)}
    found = {f"mtp.layers.0.{name}": shape for name, shape in of_layer.items()}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    found |= {f"mtp.{name}.weight": (embed,) for name in norms}
    return found | {"mtp.fc.weight": (embed, 2 * embed)}


def _norms(kind: str) -> list[str]:
    """The norms of a layer that are as wide as the stream."""
    if kind in NORMS_AFTER:
        return ["post_attention_layernorm", "post_feedforward_layernorm"]
    if kind == "cohere2":
        return ["input_layernorm"]
    if kind == "apertus":
        return ["attention_layernorm", "feedforward_layernorm"]
    if kind == "glm4":
        return [*LLAMA_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"]
    if kind == "afmoe":
        return [*LLAMA_NORMS, "pre_mlp_layernorm", "post_mlp_layernorm"]
    around = ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    more = around if kind in ("gemma2", "gemma3_text") else []
    return [*LLAMA_NORMS, *more]


def _first_dense(config: dict[str, Any]) -> int:
    if "num_dense_layers" in config:
        return config["num_dense_layers"]
    if "mlp_layer_types" in config:
        return config.get("first_k_dense_replace", 1)
    return config.get("moe_layer_start_index", config.get("first_k_dense_replace", 0))


def _is_sparse(config: dict[str, Any], layer: int) -> bool:
    """True if a layer has experts: by a list, a step, an interval, or the number of dense ones."""
    if kinds := config.get("mlp_layer_types"):
        return kinds[layer] == "sparse"
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    last = config.get("moe_layer_end_index", -1)
    step = config.get("moe_layer_interval", config.get("decoder_sparse_step", 1))
    within = _first_dense(config) <= layer and last in (-1, max(last, layer))
    return within and (layer + 1) % step == 0


def _of_attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Queries, keys, values, the way back, and their biases and norms."""
    kind, embed, dim = config["model_type"], config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    has_bias = kind in ("qwen2", "qwen2_moe") or config.get("attention_bias")
    has_bias = has_bias or config.get("use_bias")
    found = {"self_attn.o_proj.weight": (embed, heads * dim)}
    if kind == "phi3":
        found["self_attn.qkv_proj.weight"] = ((heads + 2 * kv_heads) * dim, embed)
    else:
        gated = 2 if "linear_key_head_dim" in config else 1
        for name, count in (("q", gated * heads), ("k", kv_heads), ("v", kv_heads)):
            found[f"self_attn.{name}_proj.weight"] = (count * dim, embed)
            if has_bias:
                found[f"self_attn.{name}_proj.bias"] = (count * dim,)
    if kind == "afmoe":
        found["self_attn.gate_proj.weight"] = (heads * dim, embed)
    # Their way back has no bias, or one by a key of its own.
    apart = ("glm", "glm4", "glm4_moe", "solar_open", "seed_oss")
    usual = config.get("use_bias") or config.get("attention_bias") and kind not in apart
    if config.get("attention_out_bias", usual):
        found["self_attn.o_proj.bias"] = (embed,)
    has_weights = config.get("use_qk_norm") and kind != "llama4_text"
    if kind in QUERY_NORM_OF_HEAD or has_weights:
        found |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    if kind in QUERY_NORM_OF_ALL:
        found["self_attn.q_norm.weight"] = (heads * dim,)
        found["self_attn.k_norm.weight"] = (kv_heads * dim,)
    return found


def _is_linear(config: dict[str, Any], layer: int) -> bool:
    if "linear_key_head_dim" not in config:
        return False
    if kinds := config.get("layer_types"):
        return kinds[layer] == "linear_attention"
    return (layer + 1) % config.get("full_attention_interval", 4) != 0


def _of_delta(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The gated delta rule, in Qwen3-Next with the rows of a key head side by side."""
    embed = config["hidden_size"]
    heads, value_heads = (config[f"linear_num_{kind}_heads"] for kind in ("key", "value"))
    keys = heads * config["linear_key_head_dim"]
    values = value_heads * config["linear_value_head_dim"]
    mixed = 2 * keys + values
    found = {"in_proj_qkv": mixed, "in_proj_z": values}
    found |= {"in_proj_b": value_heads, "in_proj_a": value_heads}
    if config["model_type"] == "qwen3_next":
        found = {"in_proj_qkvz": mixed + values, "in_proj_ba": 2 * value_heads}
    shapes: dict[str, tuple[int, ...]] = {f"{x}.weight": (rows, embed) for x, rows in found.items()}
    shapes["conv1d.weight"] = (mixed, 1, config["linear_conv_kernel_dim"])
    shapes["out_proj.weight"] = (embed, values)
    shapes["norm.weight"] = (config["linear_value_head_dim"],)
    shapes |= dict.fromkeys(("A_log", "dt_bias"), (value_heads,))
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _of_latents(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Latent attention."""
    embed, heads, rank = (
        config[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    plain, turned, value = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    found = {
        "kv_a_proj_with_mqa": (rank + turned, embed),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (plain + value), rank),
        "o_proj": (embed, heads * value),
    }
    if of_queries := config["q_lora_rank"]:
        found["q_a_proj"] = (of_queries, embed)
        found["q_a_layernorm"] = (of_queries,)
    name = "q_b_proj" if of_queries else "q_proj"
    found[name] = (heads * (plain + turned), of_queries or embed)
    return {f"self_attn.{name}.weight": shape for name, shape in found.items()}


def _of_mlp(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The three matrices of an mlp, of which some families join two."""
    embed, ffn = config["hidden_size"], config["intermediate_size"]
    found = {"mlp.down_proj.weight": (embed, ffn)}
    if config["model_type"] in FUSED_MLP:
        return found | {"mlp.gate_up_proj.weight": (2 * ffn, embed)}
    if config["model_type"] == "starcoder2":
        found = {"mlp.c_fc.weight": (ffn, embed), "mlp.c_proj.weight": (embed, ffn)}
        biases = {"mlp.c_fc.bias": (ffn,), "mlp.c_proj.bias": (embed,)}
        return found | (biases if config["use_bias"] else {})
    if config["model_type"] in UNGATED:
        found["mlp.up_proj.weight"] = (ffn, embed)
        if config.get("mlp_bias"):
            found |= {"mlp.up_proj.bias": (ffn,), "mlp.down_proj.bias": (embed,)}
        if config["hidden_act"] == "xielu":
            found |= {"mlp.act_fn.alpha_p": (1,), "mlp.act_fn.alpha_n": (1,)}
            found |= {f"mlp.{name}": () for name in XIELU_CONSTANTS}
        return found
    found |= {f"mlp.{name}_proj.weight": (ffn, embed) for name in ("gate", "up")}
    if config.get("mlp_bias") or config.get("use_bias"):
        found |= {f"mlp.{name}_proj.bias": (ffn,) for name in ("gate", "up")}
        found["mlp.down_proj.bias"] = (embed,)
    return found


def _of_experts(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The router of a layer, three matrices of each expert, and the shared ones."""
    embed, kind = config["hidden_size"], config["model_type"]
    router, bias, matrices, shared = EXPERTS[kind]
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count = next(config[name] for name in counts if name in config)
    ffn = config.get("moe_intermediate_size", config["intermediate_size"])
    shapes = ((ffn, embed), (ffn, embed), (embed, ffn))
    found: dict[str, tuple[int, ...]] = {router: (count, embed)}
    if bias:
        found[bias] = (1, count) if kind == "ernie4_5_moe" else (count,)
    if wide := config.get("shared_intermediate_size"):
        found["shared_mlp.input_linear.weight"] = (2 * wide, embed)
        found["shared_mlp.output_linear.weight"] = (embed, wide)
    if kind in STACKED:
        gate_up, down = STACKED[kind]
        found |= {gate_up: (count, 2 * ffn, embed), down: (count, embed, ffn)}
    for number in range(count if matrices else 0):
        for name, shape in zip(matrices, shapes, strict=True):
            found[f"{name.replace('X', str(number))}.weight"] = shape
    if shared:
        counts = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        wide = ffn * next((config[name] for name in counts if name in config), 0)
        if shared == "mlp.shared_expert":
            wide = config["shared_expert_intermediate_size"]
            found["mlp.shared_expert_gate.weight"] = (1, embed)
        for name, shape in zip(
            ("gate", "up", "down"), ((wide, embed), (wide, embed), (embed, wide)), strict=True
        ):
            found[f"{shared}.{name}_proj.weight"] = shape
    return found


def _of_gpt_oss(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The sinks and the router of a layer, and a tensor of each kind for all experts."""
    embed, ffn, count = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    return {
        "self_attn.sinks": (config["num_attention_heads"],),
        "mlp.router.weight": (count, embed),
        "mlp.router.bias": (count,),
        "mlp.experts.gate_up_proj": (count, embed, 2 * ffn),
        "mlp.experts.gate_up_proj_bias": (count, 2 * ffn),
        "mlp.experts.down_proj": (count, ffn, embed),
        "mlp.experts.down_proj_bias": (count, embed),
    }


def _of_llama4(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """The mlp of a layer, or its router, its experts in two tensors and the shared one."""
    embed, ffn, count = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    step = config["interleave_moe_layer_step"]
    routed = config.get("moe_layers")
    is_routed = (layer + 1) % step == 0 if routed is None else layer in routed
    width = ffn if is_routed else config["intermediate_size_mlp"]
    place = "feed_forward.shared_expert" if is_routed else "feed_forward"
    found: dict[str, tuple[int, ...]] = {
        f"{place}.{name}_proj.weight": (width, embed) for name in ("gate", "up")
    }
    found[f"{place}.down_proj.weight"] = (embed, width)
    if is_routed:
        found["feed_forward.router.weight"] = (count, embed)
        found["feed_forward.experts.gate_up_proj"] = (count, embed, 2 * ffn)
        found["feed_forward.experts.down_proj"] = (count, ffn, embed)
    return found


def _of_gpt2(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    embed = config["n_embd"]
    found = {
        "wte.weight": (config["vocab_size"], embed),
        "wpe.weight": (config["n_positions"], embed),
    }
    matrices = {
        "attn.c_attn": (embed, 3 * embed),
        "attn.c_proj": (embed, embed),
        "mlp.c_fc": (embed, 4 * embed),
        "mlp.c_proj": (4 * embed, embed),
    }
    for layer in range(config["n_layer"]):
        for name, shape in matrices.items():
            found[f"h.{layer}.{name}.weight"] = shape
            found[f"h.{layer}.{name}.bias"] = shape[1:]
        for name in ("ln_1", "ln_2"):
            found |= {f"h.{layer}.{name}.{part}": (embed,) for part in ("weight", "bias")}
    found |= {f"ln_f.{part}": (embed,) for part in ("weight", "bias")}
    return {f"transformer.{name}": shape for name, shape in found.items()}


def drawn(
    shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32, scale: float = 1.0
) -> dict[str, np.ndarray]:
    """Numbers for tensors: every one is random, norms and biases too, in sorted order.

    Norms are drawn around `scale`.
    """
    random = np.random.default_rng(7)
    found = {}
    for name in sorted(shapes):
        shape = shapes[name]
        values = random.standard_normal(shape)
        constants = [x for end, x in XIELU_CONSTANTS.items() if name.endswith(end)]
        if constants:
            found[name] = np.array(constants[0], dtype)
            continue
        if len(shape) == 1:
            own = 1.0 if "linear_attn" in name else scale
            around = any(part in name for part in ("norm", "ln_", "scalar", "scale"))
            values = 0.2 * values + (own if around else 0.0)
        else:
            width = 4.0 if "embed" in name or "wte" in name or "wpe" in name else shape[-1]
            values = values * 0.8 / width**0.5
        found[name] = values.astype(dtype)
    return found


def put(
    tensors: dict[str, np.ndarray], names: Sequence[str], written: Sequence[np.ndarray | Rows]
) -> None:
    """Puts what a parameter becomes under its names: of some tensors only its own rows."""
    for name, one in zip(names, written, strict=True):
        if not isinstance(one, Rows):
            tensors[name] = one
            continue
        whole = tensors.setdefault(name, np.empty_like(one.tensor))
        for cut in one.rows:
            whole[cut] = one.tensor[cut]


def apart(got: np.ndarray, want: np.ndarray) -> float:
    """The rms of the difference over that of `want`; for an expert that no token chose, both are
    0.
    """
    if not want.any():
        return float(np.abs(got).max())
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def skip_unless_known(family: str) -> None:
    """Skips a test of a family that the installed transformers has no class for."""
    import transformers  # pyright: ignore[reportMissingImports]

    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")


def learn_all_tokens(model: Any) -> None:
    """Makes torch give the input of every token a gradient, that of padding too.

    transformers makes the embedding of some families, Gemma and Phi-3 among them, with the padding
    id of its config: torch leaves the input's part out of the gradient of that row.
    """
    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "embed_tokens_per_layer", "wte", "embeddings")):
            module.padding_idx = None


def gradients_in_torch(model: Any) -> dict[str, np.ndarray]:
    """The gradients that a model of transformers holds, by the names of its files."""
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    try:  # transformers 5 holds all experts of a layer in one tensor
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        pass
    else:
        found = revert_weight_conversion(model, found)
    gradients = {name: gradient.double().numpy() for name, gradient in found.items()}
    as_published = mixer_directories.AS_PUBLISHED.get(model.config.model_type, dict)
    return as_published(gradients)


def write(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray] | None = None,
    *,
    parts: int = 1,
) -> dict[str, np.ndarray]:
    """Writes a directory, in several files where `parts` asks for it; returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    narrow = config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    if tensors is None:
        holds_less = (
            config["model_type"] in ("gemma2", "gemma3_text") or "linear_key_head_dim" in config
        )
        scale = 0.0 if holds_less else 1.0  # files that hold scale - 1
        dtype = ml_dtypes.bfloat16 if narrow else np.float32
        tensors = drawn(tensors_of(config), dtype, scale)
        if config["model_type"].startswith("gemma4"):
            tensors = gemma4_files.with_small_scores(tensors)
    names = sorted(tensors)
    if parts == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return tensors
    said = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        said |= dict.fromkeys(names[part::parts], file)
        save_file({name: tensors[name] for name in names[part::parts]}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": said}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return tensors
