"""Draws a config.json of a published family by a seed, in the terms of transformers 5.

Sizes are such as nobody chooses: depths that no period divides, heads that no device divides, odd
widths and vocabularies, layers of different kinds in any order.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import transformers

FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"
Config = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """A model that a seed draws: its config.json, and how its files are written."""

    name: str
    seed: int
    config: Config
    dtype: str
    parts: int  # files of tensors
    is_older: bool  # config.json stays as drawn; else it is as transformers 5 writes it


WITHIN = {"hidden_size": 16, "intermediate_size": 18, "num_hidden_layers": 1}
SIGLIP = WITHIN | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
OF_QWEN = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 18}
OF_GEMMA4 = WITHIN | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
OF_LLAMA4 = SIGLIP | {
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
# Families of text parts: the type of the wrapper, and its other tables.
WRAPPERS: dict[str, tuple[str, Config]] = {
    "qwen3_5_text": ("qwen3_5", {"vision_config": OF_QWEN}),
    "qwen3_5_moe_text": ("qwen3_5_moe", {"vision_config": OF_QWEN}),
    "gemma3_text": ("gemma3", {"vision_config": SIGLIP, "mm_tokens_per_image": 4}),
    "gemma4_text": ("gemma4", {"vision_config": OF_GEMMA4}),
    "gemma4_unified_text": ("gemma4_unified", {"vision_config": {}, "audio_config": {}}),
    "llama4_text": ("llama4", {"vision_config": OF_LLAMA4}),
    **dict.fromkeys(
        ("ministral3", "mistral"),
        ("mistral3", {"vision_config": SIGLIP | {"model_type": "pixtral", "head_dim": 8}}),
    ),
}
# Families whose layers may be of other kinds than all with full attention, and their kinds.
KINDS = {
    **dict.fromkeys(("gpt_oss", "gemma2", "gemma3_text", "olmo3", "cohere2"), (WINDOW, FULL)),
    **dict.fromkeys(("exaone4", "exaone_moe", "afmoe", "gemma4_text"), (WINDOW, FULL)),
    **dict.fromkeys(("gemma4_unified_text", "qwen2", "qwen3", "smollm3"), (WINDOW, FULL)),
    **dict.fromkeys(("qwen2_moe", "dots1", "ministral", "cwm"), (WINDOW, FULL)),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), (LINEAR, FULL)),
    **dict.fromkeys(("olmo_hybrid", "kimi_linear"), (LINEAR, FULL)),
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("conv", FULL)),
    "granitemoehybrid": ("mamba", "attention"),
}
PERIODS = {
    "gemma3_text": "sliding_window_pattern",
    "cohere2": "sliding_window_pattern",
    "exaone4": "sliding_window_pattern",
    "exaone_moe": "sliding_window_pattern",
    "afmoe": "global_attn_every_n_layers",
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), "full_attention_interval"),
}
DENSE_OR_SPARSE = ("glm4_moe_lite", "hy_v3", "exaone_moe", "kimi_linear", "deepseek_v32")
DENSE_OR_SPARSE += ("glm_moe_dsa",)
# Keys that classes read although their defaults lack them.
FURTHER = {
    "qwen3_moe": ("num_experts",),
    "gemma3_text": ("sliding_window_pattern",),
    "qwen2_moe": ("layer_types",),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), ("full_attention_interval",)
    ),
    **dict.fromkeys(("cohere2", "afmoe"), ("sliding_window_pattern",)),
}
# Classes that want a width that the heads divide, although the width of a head is another.
STRICT = ("llama", "arcee", "gemma2", "gemma3_text", "cwm")
# Biases that classes have and no published model does: their import is refused.
UNBIASED = {
    "attention_bias": (
        *("deepseek_v3", "glm4_moe_lite", "mistral4", "kimi_linear", "deepseek_v32", "youtu"),
        *("glm_moe_dsa", "afmoe", "nemotron_h"),
    ),
    "mlp_bias": ("hy_v3", "deepseek_v32", "glm_moe_dsa"),
    "use_bias": ("ernie4_5_moe",),
}
LATENT = ("deepseek_v3", "glm4_moe_lite", "mistral4", "kimi_linear", "deepseek_v32", "glm_moe_dsa")
LATENT += ("youtu",)
SHARES = ("glm", "glm4", "glm4_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "minimax_m2")
FACTORS = (
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "logit_scale"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
    *("routed_scaling_factor", "route_scale", "router_scaling_factor"),
)
SWITCHES = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "conv_bias", "qkv_bias"),
    *("use_qk_norm", "norm_topk_prob", "mamba_conv_bias", "use_conv_bias", "mamba_rms_norm"),
    *("mamba_norm_before_gate", "linear_allow_neg_eigval", "mup_enabled", "use_expert_bias"),
    *("moe_renormalize", "attn_temperature_tuning", "attention_out_bias", "attention_k_eq_v"),
    *("use_double_wide_mlp", "enable_moe_block", "enable_moe_fp32_combine"),
    *("block_auto_adjust_ff_dim",),
)


def draw(family: str, seed: int, *, is_wrapped: bool = False) -> Drawn:
    """Returns the model of a family that a seed draws."""
    random = Random(f"{family} {seed}")
    usual = transformers.AutoConfig.for_model(family).to_dict()
    known = {*usual, *FURTHER.get(family, ())}
    config = {name: value for name, value in _drawn(random, family).items() if name in known}
    if family in STRICT:
        config["hidden_size"] = config["num_attention_heads"] * random.choice((4, 7, 10))
    elif "num_attention_heads" in config and ("head_dim" not in known or family in LATENT):
        config.pop("head_dim", None)
        config["hidden_size"] = config["num_attention_heads"] * random.choice((6, 8, 10, 14))
    config |= {name: x for name, x in _layers(random, family, config).items() if name in known}
    config |= _rope(random, family, config)
    config |= OWN.get(family, lambda *_: {})(random, config)
    if "num_experts" in config:  # or both, of which one is another name of the other
        config.pop("num_local_experts", None)
    config |= {name: False for name, families in UNBIASED.items() if family in families}
    config = {name: value for name, value in config.items() if value is not None}
    config |= {"model_type": family, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "youtu":  # transformers 5.24 loads it with a row of zeros for the padding
        del config["pad_token_id"]
    dtype = random.choice(("float32", "float32", "bfloat16"))
    parts, is_older = random.choice((1, 1, 3)), random.random() < 0.5
    if is_wrapped:
        kind, others = WRAPPERS[family]
        others = json.loads(json.dumps(others))
        if kind.startswith("qwen3_5"):
            others["vision_config"]["out_hidden_size"] = config["hidden_size"]
        ties = {"tie_word_embeddings": config["tie_word_embeddings"]}
        config = {"model_type": kind, "text_config": config, **others, **ties}
    name = " ".join((family, str(seed), dtype, *(["3 files"] if parts > 1 else [])))
    name += (", older keys" if is_older else "") + (", wrapped" if is_wrapped else "")
    return Drawn(name, seed, config, dtype, parts, is_older)


def _drawn(random: Random, family: str) -> Config:
    """Returns values of the keys that mean one thing in every family."""
    any_of = random.choice
    kv_heads, groups, each = any_of((1, 2, 3)), any_of((1, 1, 2, 3)), any_of((2, 3, 4))
    of_groups = random.randint(1, groups)
    count, chosen = groups * each, random.randint(1, min(4, of_groups * each))
    heads = kv_heads * any_of((1, 2, 3, 5))
    states, key_heads = any_of((1, 2, 3)), any_of((1, 2, 3))
    ffn, narrow = any_of((37, 44, 60, 90)), any_of((10, 17, 24, 33))
    is_latent = family in LATENT
    return {
        "vocab_size": any_of((97, 113, 131, 257)),
        "hidden_size": any_of((36, 42, 60, 70)),
        "num_hidden_layers": any_of((1, 2, 3, 4, 5, 6, 7)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if is_latent else kv_heads,
        "head_dim": any_of((6, 8, 10, 14, 16, 20)),
        **dict.fromkeys(("max_position_embeddings", "model_max_length"), any_of((64, 80, 200))),
        "intermediate_size": ffn,
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps"), any_of((1e-3, 3e-3))),
        **dict.fromkeys(("layer_norm_epsilon", "norm_epsilon"), any_of((1e-3, 3e-3))),
        "sliding_window": any_of((3, 5, 9, 16)),
        **{f"{name}_intermediate_size": narrow for name in ("moe", "shared")},
        "moe_shared_expert_intermediate_size": any_of((11, 26)),
        "shared_expert_intermediate_size": any_of((11, 26)),
        **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), count),
        **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k"), chosen),
        "moe_num_experts": count,
        "top_k_experts": chosen,
        **dict.fromkeys(("n_shared_experts", "num_shared_experts"), any_of((1, 2, 3))),
        "moe_num_shared_experts": any_of((1, 2)),
        **dict.fromkeys(("n_group", "num_expert_group"), groups),
        "topk_group": of_groups,
        "kv_lora_rank": any_of((9, 12, 20)),
        "q_lora_rank": any_of((None, 11, 28)),
        "qk_nope_head_dim": any_of((5, 8, 10)),
        "qk_rope_head_dim": any_of((4, 6, 8)),
        "v_head_dim": any_of((7, 10, 14)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * any_of((1, 2, 3)),
        "linear_key_head_dim": any_of((4, 6, 8)),
        "linear_value_head_dim": any_of((5, 7, 12)),
        "linear_conv_kernel_dim": any_of((2, 3, 4)),
        "linear_head_dim": any_of((5, 6, 8)),
        "linear_num_heads": any_of((1, 3, 5)),
        **dict.fromkeys(("mamba_n_groups", "n_groups"), states),
        **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), states * any_of((1, 2, 3))),
        **dict.fromkeys(("mamba_d_state", "ssm_state_size"), any_of((3, 8, 9))),
        **dict.fromkeys(("mamba_d_conv", "conv_kernel", "conv_L_cache"), any_of((2, 3, 4))),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), any_of((4, 7, 10))),
        **{name: any_of((0.3, 0.7, 1.0, 2.5)) for name in FACTORS},
        **{name: any_of((True, False)) for name in SWITCHES},
    }


def _layers(random: Random, family: str, config: Config) -> Config:
    """Returns the keys that say what each layer is: lists, periods or first layers."""
    layers = config.get("num_hidden_layers", 1)
    found: Config = {}
    if family in KINDS:
        kinds = [random.choice(KINDS[family]) for _ in range(layers)]
        if random.random() < 0.6 or family in ("lfm2_moe", "granitemoehybrid"):
            found["layer_types"] = kinds
        elif family in PERIODS:
            found[PERIODS[family]] = random.choice((2, 3, 4))
    if family in ("qwen2", "qwen3", "qwen2_moe", "smollm3", "qwen3_moe"):
        found["use_sliding_window"] = WINDOW in found.get("layer_types", [WINDOW])
        found["max_window_layers"] = random.randint(0, layers)
        if not found["use_sliding_window"]:
            found["sliding_window"] = None
    if family in DENSE_OR_SPARSE and random.random() < 0.6:
        found["mlp_layer_types"] = [random.choice(("dense", "sparse")) for _ in range(layers)]
    elif family in DENSE_OR_SPARSE or "n_routed_experts" in config:
        found["first_k_dense_replace"] = random.randint(0, layers - 1)
    if family in ("qwen3_moe", "qwen2_moe", "qwen3_next"):
        found["decoder_sparse_step"] = random.choice((1, 1, 2))
        found["mlp_only_layers"] = sorted(random.sample(range(layers), random.choice((0, 0, 1))))
    return found


SCALED = ("linear", "llama3", "yarn")
NO_SCALING = ("gemma2", "olmo3", "lfm2", "lfm2_moe")
OWN_ROPE = ("phi3", "gemma3_text", "gemma4_text", "gemma4_unified_text", "ministral3", "mistral4")


def _rope(random: Random, family: str, config: Config) -> Config:
    """Returns the keys of rotary positions, as transformers 4 or 5 writes them."""
    if family in ("nemotron_h", "kimi_linear", "gpt2", *OWN_ROPE):
        return {}
    theta = 500_000.0 if family == "olmo3" else random.choice((150.0, 500.0, 10_000.0, 3e6))
    kind = "default" if family in NO_SCALING else random.choice(("default", *SCALED))
    kind = {"linear": "llama3"}.get(kind, kind) if family == "llama4_text" else kind
    scaling = _scaling(random, kind)
    if kind == "yarn" and family in LATENT:
        scaling |= {"mscale": random.choice((0.7, 1.0)), "mscale_all_dim": 1.0}
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = _share(random, width) if family in SHARES else None
    if random.random() < 0.5:
        table = {"rope_type": "default", "rope_theta": theta, **(scaling or {})}
        return {"rope_parameters": table | ({"partial_rotary_factor": share} if share else {})}
    if scaling and random.random() < 0.5:
        scaling["type"] = scaling.pop("rope_type")
    older = {"rope_theta": theta, "rope_scaling": scaling}
    if share and family == "minimax_m2":
        return older | {"rotary_dim": int(width * share)}
    return older | ({"partial_rotary_factor": share} if share else {})


def _share(random: Random, width: int) -> float:
    """Returns the share of a head's channels that turn: an even number of them."""
    return (
        random.choice([n for n in range(2, width + 1, 2) if int(width * (n / width)) == n]) / width
    )


def _scaling(random: Random, kind: str) -> Config | None:
    if kind == "default":
        return None
    scaling: Config = {"rope_type": kind, "factor": random.choice((2.0, 4.0, 7.5))}
    if kind == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = random.choice((16, 24, 32))
    if kind == "llama3":
        return scaling | {"low_freq_factor": 1.0, "high_freq_factor": random.choice((2.0, 4.0))}
    if random.random() < 0.4:
        scaling |= {"beta_fast": random.choice((8.0, 20.0)), "beta_slow": random.choice((1.0, 2.0))}
    if random.random() < 0.3:
        scaling["attention_factor"] = 1.2
    return scaling


def _cooled(random: Random, config: Config) -> Config:
    """Returns positions with a temperature of queries, of Ministral 3 and Mistral Small 4."""
    table = {"type": "yarn", "rope_theta": random.choice((300.0, 1e6))}
    table |= {"rope_type": "yarn", "factor": random.choice((3.0, 8.0)), "beta_fast": 32.0}
    table |= {"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    table["original_max_position_embeddings"] = random.choice((7, 16))
    table["llama_4_scaling_beta"] = random.choice((0.1, 0.3))
    table["max_position_embeddings"] = config["max_position_embeddings"]
    return {"rope_parameters": table}


def _ministral3(random: Random, config: Config) -> Config:
    return _cooled(random, config) | {"sliding_window": None}


def _mistral4(random: Random, config: Config) -> Config:
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    rope = _cooled(random, config)
    rope["rope_parameters"]["partial_rotary_factor"] = config["qk_rope_head_dim"] / width
    return rope | {"head_dim": width, "first_k_dense_replace": config["first_k_dense_replace"]}


def _gemma4(random: Random, config: Config) -> Config:
    layers, dim = config["num_hidden_layers"], random.choice((8, 12, 20))
    kinds = [random.choice((WINDOW, FULL)) for _ in range(layers - 1)] + [FULL]
    # A layer that shares keys needs an earlier one of its kind.
    fit = [n for n in range(layers) if {*kinds[layers - n :]} <= {*kinds[: layers - n]}]
    shared = random.choice(fit)
    own: Config = {
        "layer_types": kinds,
        "global_head_dim": dim,
        "num_global_key_value_heads": config["num_key_value_heads"],
        "num_kv_shared_layers": shared,
        "final_logit_softcapping": random.choice((None, 4.0)),
        "rope_parameters": {
            WINDOW: {"rope_type": "default", "rope_theta": random.choice((90.0, 1e4))},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": random.choice((300.0, 1e6)),
                "partial_rotary_factor": random.choice((0.25, 0.5, 1.0)),
            },
        },
    }
    if "enable_moe_block" in config:
        # transformers cuts those of layers with shared keys, without looking whether there are any.
        own["hidden_size_per_layer_input"] = random.choice((7, 12) if shared else (0, 7, 12))
        own["vocab_size_per_layer_input"] = config["vocab_size"] + random.choice((0, 9))
        if not config["enable_moe_block"]:
            own |= dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"))
    return own


def _gemma3(random: Random, _: Config) -> Config:
    found: Config = {"query_pre_attn_scalar": random.choice((5, 24))}
    if random.random() < 0.5:
        found |= {"rope_theta": 700.0, "rope_local_base_freq": random.choice((90.0, 1e4))}
        return found | {"rope_scaling": _scaling(random, random.choice(("default", "linear")))}
    full = {"rope_type": "default", "rope_theta": 3e5, **(_scaling(random, "linear") or {})}
    window = {"rope_type": "default", "rope_theta": random.choice((90.0, 1e4))}
    return found | {"rope_parameters": {FULL: full, WINDOW: window}}


def _gemma2(random: Random, _: Config) -> Config:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    found: Config = {name: random.choice((None, 4.0, 9.0)) for name in caps}
    return found | {"query_pre_attn_scalar": random.choice((5, 24))}


def _phi3(random: Random, config: Config) -> Config:
    dim = config["hidden_size"] // config["num_attention_heads"]
    found: Config = {"rope_theta": random.choice((300.0, 1e4)), "max_position_embeddings": 64}
    found["partial_rotary_factor"] = _share(random, dim)
    pairs = round(dim * found["partial_rotary_factor"]) // 2
    if random.random() < 0.6:
        lists = {"short_factor": [1.0 + 0.1 * n for n in range(pairs)]}
        lists["long_factor"] = [1.0 + 0.5 * n for n in range(pairs)]
        found |= {"rope_scaling": {"type": "longrope", **lists}}
        found["original_max_position_embeddings"] = 16
    return found | {"sliding_window": random.choice((None, 5, 16))}


def _nemotron(random: Random, config: Config) -> Config:
    letters = "".join(random.choice("M*-E") for _ in range(random.choice((1, 3, 5, 7))))
    config["mlp_bias"] &= "E" not in letters
    kinds = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
    config.pop("use_bias")  # of mixers, which no published model has
    own: Config = {"sliding_window": None, "moe_latent_size": random.choice((None, 9))}
    if random.random() < 0.5:
        return own | {"hybrid_override_pattern": letters, "num_hidden_layers": len(letters)}
    return own | {"layers_block_type": [kinds[letter] for letter in letters]}


def _granite_hybrid(random: Random, config: Config) -> Config:
    kinds = [*config["layer_types"]]
    kinds[random.randrange(len(kinds))] = "attention"  # or transformers finds no cache
    heads, dim, wider = (
        2 * config["mamba_n_heads"],
        random.choice((4, 10, 14)),
        random.choice((1, 2)),
    )
    own: Config = {"layer_types": kinds, "position_embedding_type": random.choice((None, "rope"))}
    own |= {"mamba_n_heads": heads, "mamba_d_head": random.choice((dim, "auto"))}
    own |= {"mamba_expand": wider, "hidden_size": heads * dim // wider}
    own |= {"num_attention_heads": 1 if wider == 2 else 2, "num_key_value_heads": 1}
    return own | {"num_local_experts": random.choice((0, config["num_local_experts"]))}


def _falcon(random: Random, config: Config) -> Config:
    own: Config = {"mamba_d_ssm": config["mamba_n_heads"] * config["mamba_d_head"]}
    own["mlp_multipliers"] = [random.choice((0.6, 1.4)), random.choice((0.5, 1.0))]
    own["ssm_multipliers"] = [random.choice((0.7, 1.0, 1.3)) for _ in range(5)]
    return own | {"head_dim": random.choice((None, 8, 12))}


def _llama4(random: Random, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    own: Config = {"num_experts_per_tok": 1, "intermediate_size_mlp": random.choice((29, 40))}
    own |= {"attention_chunk_size": random.choice((5, 12, 16)), "attn_scale": 0.2}
    own |= {"floor_scale": random.choice((3, 8)), "attention_bias": False}
    if random.random() < 0.5:
        own["moe_layers"] = sorted(random.sample(range(layers), random.randint(0, layers)))
        own["no_rope_layers"] = [random.choice((0, 1)) for _ in range(layers)]
    else:
        own["interleave_moe_layer_step"] = random.choice((1, 2, 3))
        own["no_rope_layer_interval"] = random.choice((2, 3, 4))
    return own


def _kimi(random: Random, config: Config) -> Config:
    if random.random() < 0.5 or "layer_types" not in config:
        return {}
    kinds = dict(enumerate(config.pop("layer_types"), start=1))  # as published, from 1
    table = {"full_attn_layers": [layer for layer, kind in kinds.items() if kind == FULL]}
    table["kda_layers"] = [layer for layer in kinds if layer not in table["full_attn_layers"]]
    names = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
    names["linear_conv_kernel_dim"] = "short_conv_kernel_size"
    table |= {older: config.pop(name) for name, older in names.items()}
    return {"linear_attn_config": table}


def _sparse(random: Random, config: Config) -> Config:
    own: Config = {"q_lora_rank": random.choice((11, 28)), "index_topk": random.choice((48, 64))}
    own |= {"index_n_heads": random.choice((3, 5)), "index_head_dim": random.choice((10, 12))}
    return own | {"head_dim": config["qk_rope_head_dim"], "mlp_bias": False}


def _glm_moe_dsa(random: Random, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    others = ["full" if random.random() < 0.5 else "shared" for _ in range(layers - 1)]
    return _sparse(random, config) | random.choice(
        ({"index_topk_freq": 3}, {"indexer_types": ["full", *others]}, {})
    )


def _ernie_moe(random: Random, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    first = random.randrange(layers)
    own: Config = {"moe_layer_start_index": first, "moe_norm_min": random.choice((1e-12, 0.4))}
    own["moe_layer_end_index"] = random.choice((-1, random.randrange(first, layers)))
    return own | {"moe_layer_interval": random.choice((1, 1, 2))}


def _lfm(random: Random, config: Config) -> Config:
    own: Config = {"block_multiple_of": random.choice((8, 12)), "full_attn_idxs": None}
    if "num_experts" in config:
        return {"num_dense_layers": random.randrange(config["num_hidden_layers"])}
    if "layer_types" not in config:
        layers = range(config["num_hidden_layers"])
        own["full_attn_idxs"] = [layer for layer in layers if random.random() < 0.4]
    return own | {"block_ffn_dim_multiplier": random.choice((1.0, 1.3))}


def _gpt2(random: Random, config: Config) -> Config:
    heads = random.choice((1, 3, 5))
    activations = ("gelu_new", "gelu", "relu")
    config.clear()
    own: Config = {
        "vocab_size": random.choice((97, 131)),
        "n_head": heads,
        "n_embd": heads * random.choice((6, 10, 14)),
    }
    own |= {"n_layer": random.choice((1, 3, 5)), "n_positions": 64}
    own |= {"n_inner": random.choice((None, 37)), "activation_function": activations[heads // 2]}
    return own | {f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")}


OWN: dict[str, Callable[[Random, Config], Config]] = {
    "ministral3": _ministral3,
    "mistral4": _mistral4,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "gemma3_text": _gemma3,
    "gemma2": _gemma2,
    "phi3": _phi3,
    "nemotron_h": _nemotron,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon,
    "llama4_text": _llama4,
    "kimi_linear": _kimi,
    "deepseek_v32": _sparse,
    "glm_moe_dsa": _glm_moe_dsa,
    "ernie4_5_moe": _ernie_moe,
    "lfm2": _lfm,
    "lfm2_moe": _lfm,
    "gpt2": _gpt2,
    "flex_olmo": lambda random, _: {"num_experts": random.choice((5, 6))},
    "seed_oss": lambda *_: {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "afmoe": lambda random, config: {
        "num_dense_layers": random.randint(0, config["num_hidden_layers"] - 1)
    },
    "gpt_oss": lambda *_: {"attention_bias": True},
    "smollm3": lambda random, config: {
        "no_rope_layers": [random.choice((0, 1)) for _ in range(config["num_hidden_layers"])]
    },
}
