"""Granite 4: Mamba-2 or attention, then a shared mlp, with or without experts beside it."""

from typing import Any

from spmdtrain.config.published.families import ssd_keys
from spmdtrain.config.published.families.expert_keys import read_experts, write_experts
from spmdtrain.config.published.families.family import USUAL, Family, ModelSettings
from spmdtrain.config.published.families.granite import SCALES, read_granite, write_granite
from spmdtrain.config.published.families.layer_windows import shortest
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig

# As published, and as transformers 5 writes them.
MIXERS = {"mamba": "ssd", "attention": "attention"}
NEWER = {"linear_attention": "ssd", "full_attention": "attention"}
SHARED, POSITIONS = "shared_intermediate_size", "position_embedding_type"


def _granite(keys: Keys) -> ModelSettings:
    mixers = _mixers(keys)
    settings = read_granite(keys) | {"mixers": shortest(mixers)}
    keys.must_be(POSITIONS, None, "nope", "rope")
    if keys.take(POSITIONS) != "rope":
        settings["rope_layers"] = (False,)
    ssd = ssd_keys.read_ssd(keys)
    if "ssd" in mixers:
        settings["ssd"] = ssd
    shared = keys.count(SHARED)
    keys.pass_over("num_experts_per_tok")
    if not keys.whole("num_local_experts"):
        return settings | {"ffn": shared}
    return settings | {
        "experts": read_experts(keys, "num_local_experts") | {"shared": 1, "shared_ffn": shared}
    }


def _mixers(keys: Keys) -> list[str]:
    """Returns the mixer of each layer; without a list all have the state space."""
    layers, kinds = keys.count("num_hidden_layers"), keys.take("layer_types")
    older = keys.take("layers_block_type")
    kinds = older if kinds is None else kinds
    if kinds is None:
        return ["ssd"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise keys.refused("layer_types", kinds, f"a list of {layers} kinds")
    known = MIXERS | NEWER
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise keys.unknown("layer_types", kind)
    return [known[kind] for kind in kinds]


def _write_granite(model: TransformerConfig) -> dict[str, Any]:
    theirs = {ours: kind for kind, ours in MIXERS.items()}
    if not set(model.layer_mixers) <= theirs.keys() or "none" in model.layer_mlps:
        return {}
    turns = {kind.rope_theta is not None for kind in model.layer_kinds}
    keys = write_granite(model) | {
        "layer_types": [theirs[mixer] for mixer in model.layer_mixers],
        POSITIONS: "rope" if turns == {True} else None,
        SHARED: model.ffn,
        "num_local_experts": 0,
    }
    if model.ssd:
        inner = model.ssd.heads * model.ssd.head_dim
        keys |= ssd_keys.write_ssd(model.ssd) | {"mamba_expand": inner // model.embed}
    if model.experts:
        keys |= write_experts(model.experts, "num_local_experts")
        keys |= {"intermediate_size": model.experts.ffn, SHARED: model.experts.shared_width}
    return keys


GRANITE_HYBRID = {
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        reads=(
            *USUAL,
            *SCALES,
            *ssd_keys.READS,
            "hidden_act",
            "attention_bias",
            "layer_types",
            "layers_block_type",
            "num_experts_per_tok",
            "num_local_experts",
            POSITIONS,
            SHARED,
        ),
        defaults={
            **ssd_keys.DEFAULTS,
            "rms_norm_eps": 1e-6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 11008,
            SHARED: 1024,
        },
        read=_granite,
        write=_write_granite,
        activations={"silu": "swiglu", "swish": "swiglu"},
        as_usual=ssd_keys.without_infinity,
    )
}
