"""Kimi Linear: three layers with Kimi Delta Attention to one with latent attention, and experts."""

from collections.abc import Mapping
from typing import Any

from spmdtrain.config.published.families.activations import SILU
from spmdtrain.config.published.families.deepseek import (
    READ_BY_LATENTS,
    read_latent,
    write_latent,
)
from spmdtrain.config.published.families.expert_keys import (
    BY_SIGMOID,
    experts_of,
    in_layers,
    read_sparse,
    write_sparse,
)
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import shortest
from spmdtrain.config.published.families.listed_kinds import listed_kinds
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import FULL
from spmdtrain.config.schema import DeltaConfig, TransformerConfig

LINEAR = "linear_attention"
MIXERS = {LINEAR: "delta", FULL: "attention"}
OF_LINEAR = "linear_attn_config"  # the table of published files
SIZES = {  # the keys of transformers 5, and those of that table
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
LISTS = {"full_attn_layers": FULL, "kda_layers": LINEAR}  # of layers, counted from 1
ROUTERS = (
    *("num_experts", "num_experts_per_token", "num_shared_experts", "num_expert_group"),
    *("topk_group", "moe_renormalize", "moe_intermediate_size", "routed_scaling_factor"),
)


def _as_usual(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a model with a head of its own, as its class has whatever they say."""
    return dict(values) | {"tie_word_embeddings": False}


def _kimi_linear(keys: Keys) -> ModelSettings:
    _check_repeated(keys)
    table = keys.table(OF_LINEAR) or {}
    mixers = [MIXERS[kind] for kind in _kinds(keys, table)]
    delta = _delta(keys, table)
    experts = in_layers(_experts(keys), read_sparse(keys))
    settings = read_latent(keys) | experts | {"rope_layers": [False]}
    if "delta" in mixers:
        settings |= {"mixers": shortest(mixers), "delta": delta}
    return settings


def _check_repeated(keys: Keys) -> None:
    """Refuses keys of published files that ask for something that the class does not compute."""
    for name, value in (
        ("mla_use_nope", True),
        ("use_grouped_topk", True),
        ("moe_router_activation_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
        ("num_nextn_predict_layers", 0),
        ("max_position_embeddings", keys.count("model_max_length")),
        ("num_key_value_heads", keys.count("num_attention_heads")),
    ):
        keys.agrees(name, value)
    keys.pass_over("head_dim")  # of nothing


def _kinds(keys: Keys, table: Mapping[str, Any]) -> list[str]:
    """Returns the kind of each layer: as listed, or as the table counts them from 1."""
    layers = keys.count("num_hidden_layers")
    listed = listed_kinds(keys, MIXERS)
    counted = _counted(keys, table, layers)
    if listed is None and counted is None:
        return [FULL if number and number % 4 == 0 else LINEAR for number in range(layers)]
    if None not in (listed, counted) and listed != counted:
        raise keys.refused(OF_LINEAR, dict(table), "the layers of layer_types, counted from 1")
    return listed or counted or []


def _counted(keys: Keys, table: Mapping[str, Any], layers: int) -> list[str] | None:
    """Returns the kinds by the two lists of the table, which have each layer once."""
    if not LISTS.keys() <= table.keys():
        return None
    wanted = f"two lists that have each of {layers} layers once, counted from 1"
    lists = [table[name] for name in LISTS]
    if not all(isinstance(numbers, list) for numbers in lists):
        raise keys.refused(OF_LINEAR, dict(table), wanted)
    kinds = {number: LISTS[name] for name in LISTS for number in table[name]}
    is_once = sum(map(len, lists)) == layers
    if not is_once or kinds.keys() != set(range(1, layers + 1)):
        raise keys.refused(OF_LINEAR, dict(table), wanted)
    return [kinds[number] for number in range(1, layers + 1)]


def _delta(keys: Keys, table: Mapping[str, Any]) -> dict[str, Any]:
    inner = Keys(table, {}, f"{keys.where}: {OF_LINEAR}")
    inner.pass_over(*LISTS)
    sizes = {}
    for theirs, name in SIZES.items():
        sizes[theirs] = inner.some(name) or keys.count(theirs)
        keys.agrees(theirs, sizes[theirs])
    inner.check_all_taken()
    heads, width, taps = sizes.values()
    return {
        **dict.fromkeys(("key_heads", "value_heads"), heads),
        **dict.fromkeys(("key_dim", "value_dim", "decay_rank", "gate_rank"), width),
        "taps": taps,
        "decay": "channel",
        "gate": "sigmoid",
    }


def _experts(keys: Keys) -> dict[str, Any]:
    return {
        "count": keys.count("num_experts"),
        "chosen": keys.count("num_experts_per_token"),
        "ffn": keys.count("moe_intermediate_size"),
        "shared": keys.whole("num_shared_experts") or 0,
        "normalise": keys.flag("moe_renormalize"),
        "scale": float(keys.positive("routed_scaling_factor") or 1),
        "groups": keys.some("num_expert_group") or 1,
        "groups_kept": keys.some("topk_group"),
        **BY_SIGMOID,
    }


def _write_kimi_linear(model: TransformerConfig) -> dict[str, Any]:
    if model.latent is None:
        return {}
    theirs = {ours: kind for kind, ours in MIXERS.items()}
    kinds = [theirs.get(mixer) for mixer in model.layer_mixers]
    keys = write_latent(model, model.latent) | _write_experts(model)
    keys |= {"layer_types": kinds, "rope_scaling": None, "rope_parameters": None}
    if model.delta:
        keys |= _write_delta(model.delta, kinds)
    return keys


def _write_experts(model: TransformerConfig) -> dict[str, Any]:
    experts = experts_of(model)
    return {
        "num_experts": experts.count,
        "num_experts_per_token": experts.chosen,
        "moe_intermediate_size": experts.ffn,
        "num_shared_experts": experts.shared,
        "moe_renormalize": experts.normalise,
        "routed_scaling_factor": experts.scale,
        "num_expert_group": experts.groups,
        "topk_group": experts.groups_kept,
        **write_sparse(model),
    }


def _write_delta(delta: DeltaConfig, kinds: list[str | None]) -> dict[str, Any]:
    sizes = dict(zip(SIZES, (delta.key_heads, delta.key_dim, delta.taps), strict=True))
    table: dict[str, Any] = {SIZES[theirs]: size for theirs, size in sizes.items()}
    for name, kind in LISTS.items():
        table[name] = [number for number, own in enumerate(kinds, 1) if own == kind]
    return {OF_LINEAR: table, **sizes}


KIMI = {
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        reads=(
            *(key for key in WITH_SILU if key not in ("head_dim", "tie_word_embeddings")),
            *(key for key in READ_BY_LATENTS if key != "rope_interleave"),
            *ROUTERS,
            *("layer_types", "mlp_layer_types", "first_k_dense_replace"),
            *(OF_LINEAR, *SIZES),
        ),
        defaults={
            "rms_norm_eps": 1e-5,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "num_expert_group": 1,
            "topk_group": 1,
            "moe_renormalize": True,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.446,
            "first_k_dense_replace": 1,
        },
        read=_kimi_linear,
        write=_write_kimi_linear,
        activations=SILU,
        longest="model_max_length",
        as_usual=_as_usual,
    ),
}
