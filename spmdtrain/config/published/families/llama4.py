"""Llama 4: most layers have rotary positions and attend within blocks, the others to all tokens."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases, write_biases
from spmdtrain.config.published.families.expert_keys import read_experts, write_experts
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import shortest
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import FULL
from spmdtrain.config.schema import TransformerConfig

CHUNKED = "chunked_attention"
COUNT = "num_local_experts"
# A gate is the sigmoid of one logit, and multiplies what the expert reads.
ROUTED = {
    "score": "sigmoid",
    "normalise": False,
    "gate_input": True,
    "shared": 1,
}


def _read(keys: Keys) -> ModelSettings:
    turns = _turns(keys)
    settings = read_biases(keys) | _chunks(keys, turns) | _temperature(keys, turns) | _mlps(keys)
    if not all(turns):
        settings |= {"rope_layers": shortest(turns)}
    has_norm = keys.flag("use_qk_norm")
    return settings | ({"query_norm": "after"} if has_norm and any(turns) else {})


def _turns(keys: Keys) -> list[bool]:
    """Returns the layers with rotary positions: 1 in `no_rope_layers`, or all but each fourth."""
    layers = keys.count("num_hidden_layers")
    interval = keys.some("no_rope_layer_interval") or layers + 1
    listed = keys.take("no_rope_layers")
    if not listed:
        return [(number + 1) % interval != 0 for number in range(layers)]
    is_list = isinstance(listed, list) and len(listed) >= layers
    if not is_list or any(flag not in (0, 1) for flag in listed):
        raise keys.refused("no_rope_layers", listed, f"a list of {layers} times 0 or 1")
    return [bool(flag) for flag in listed[:layers]]


def _chunks(keys: Keys, turns: list[bool]) -> ModelSettings:
    """Returns `chunks`: by `layer_types` if there is one, else of layers with rotary positions."""
    size = keys.some("attention_chunk_size")
    kinds = keys.take("layer_types")
    if kinds is None:
        kinds = [CHUNKED if rope and size else FULL for rope in turns]
    if not isinstance(kinds, list) or len(kinds) != len(turns):
        raise keys.refused("layer_types", kinds, f"a list of {len(turns)} kinds")
    for kind in kinds:
        if kind not in (CHUNKED, FULL) or (kind == CHUNKED and not size):
            raise keys.unknown("layer_types", kind)
    chunks = [size if kind == CHUNKED else 0 for kind in kinds]
    return {"chunks": shortest(chunks)} if any(chunks) else {}


def _temperature(keys: Keys, turns: list[bool]) -> ModelSettings:
    """Returns [model.temperature], of the layers without rotary positions."""
    tuned = keys.take("attn_temperature_tuning")  # a number in older files
    weight, length = keys.number("attn_scale"), keys.some("floor_scale")
    if not isinstance(tuned, bool | int):
        raise keys.refused("attn_temperature_tuning", tuned, "true or false")
    if not tuned or not weight or all(turns):
        return {}
    if weight < 0:
        raise keys.refused("attn_scale", weight, "at least 0")
    scale = {"weight": float(weight), "length": length, "offset": 1, "layers": "no_rope"}
    return {"temperature": scale}


def _mlps(keys: Keys) -> ModelSettings:
    """Returns the widths, and which layers have experts: `moe_layers`, or one in each step."""
    layers = keys.count("num_hidden_layers")
    step = keys.count("interleave_moe_layer_step")
    routed = keys.take("moe_layers")
    if routed is None:
        routed = list(range(step - 1, layers, step))
    if not isinstance(routed, list) or not set(routed) <= set(range(layers)):
        raise keys.refused("moe_layers", routed, f"a list of layers from 0 to {layers - 1}")
    experts = read_experts(keys, COUNT) | {"ffn": keys.count("intermediate_size")} | ROUTED
    settings: ModelSettings = {"ffn": keys.count("intermediate_size_mlp")}
    if not routed:
        return settings
    settings["experts"] = experts
    mlps = ["experts" if number in routed else "mlp" for number in range(layers)]
    return settings if "mlp" not in mlps else settings | {"mlps": shortest(mlps)}


def _write(model: TransformerConfig) -> dict[str, Any]:
    kinds = model.layer_kinds
    chunk = max(kind.chunk for kind in kinds)
    heat, experts = model.temperature, model.experts
    keys = write_biases(model) | {
        "no_rope_layers": [int(kind.rope_theta is not None) for kind in kinds],
        "layer_types": [CHUNKED if kind.chunk else FULL for kind in kinds],
        "attention_chunk_size": chunk or None,
        "use_qk_norm": model.query_norm == "after",
        "attn_temperature_tuning": heat is not None,
        "intermediate_size_mlp": model.ffn,
        "moe_layers": [n for n, mlp in enumerate(model.layer_mlps) if mlp == "experts"],
    }
    if heat is not None:
        keys |= {"attn_scale": heat.weight, "floor_scale": heat.length}
    if experts is not None:
        keys |= write_experts(experts, COUNT) | {"intermediate_size": experts.ffn}
    return keys


LLAMA4 = {
    "llama4_text": Family(
        "Llama4ForCausalLM",
        reads=(
            *WITH_SILU,
            "attention_bias",
            "attention_chunk_size",
            "attn_scale",
            "attn_temperature_tuning",
            "floor_scale",
            "interleave_moe_layer_step",
            "intermediate_size_mlp",
            "layer_types",
            "moe_layers",
            "no_rope_layer_interval",
            "no_rope_layers",
            COUNT,
            "num_experts_per_tok",
            "use_qk_norm",
        ),
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            COUNT: 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        read=_read,
        write=_write,
    ),
}
