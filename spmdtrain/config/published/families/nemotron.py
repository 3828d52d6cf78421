"""Nemotron-H and Nemotron 3: each layer is one part, Mamba-2, attention, an mlp, or experts."""

from collections.abc import Mapping
from typing import Any

from spmdtrain.config.published.families.expert_keys import BY_SIGMOID, read_router, write_router
from spmdtrain.config.published.families.family import SIZES, Family, ModelSettings
from spmdtrain.config.published.families.further_layers import DEPTH, apart, write_further
from spmdtrain.config.published.families.layer_windows import shortest
from spmdtrain.config.published.families.ssd_keys import (
    LIMIT,
    read_limit,
    without_infinity,
    write_limit,
)
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import LayerParts, TransformerConfig

PATTERN, LISTED = "hybrid_override_pattern", "layers_block_type"
# A letter of the pattern, its names in lists, and the parts of such a layer here.
KINDS: tuple[tuple[str, tuple[str, ...], LayerParts], ...] = (
    ("M", ("linear_attention", "mamba"), LayerParts("ssd", "none")),
    ("*", ("full_attention", "attention"), LayerParts("attention", "none")),
    ("-", ("mlp",), LayerParts("none", "mlp")),
    ("E", ("moe",), LayerParts("none", "experts")),
)
LETTERS = {name: letter for letter, names, _ in KINDS for name in names}
PARTS = {letter: parts for letter, _, parts in KINDS}
BY_DEFAULT = "ME*-"
# The layers of the block that predicts a further token, in the same two forms.
OF_FURTHER = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
OF_SSD = {
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "groups": "n_groups",
    "state": "ssm_state_size",
    "taps": "conv_kernel",
}
OLDER = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_limit": LIMIT,
    "mamba_conv_bias": "use_conv_bias",
    "layer_types": LISTED,
    "num_local_experts": "n_routed_experts",
}
SHARED_FFN, LATENT = "moe_shared_expert_intermediate_size", "moe_latent_size"


def _as_usual(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys under their newer names, with the number of layers that a pattern gives."""
    renamed = {OLDER.get(name, name): value for name, value in values.items()} | {
        name: value for name, value in values.items() if name in OLDER.values()
    }
    renamed = without_infinity(renamed) | {"tie_word_embeddings": False}  # whatever the key says
    pattern = renamed.get(LISTED) or renamed.get(PATTERN) or BY_DEFAULT
    layers = len(pattern) if isinstance(pattern, str | list) else None
    return {"num_hidden_layers": layers} | renamed


def _letters(keys: Keys) -> str:
    """Returns the letter of each layer, by the list of kinds or the older text."""
    layers, listed, pattern = keys.count("num_hidden_layers"), keys.take(LISTED), keys.take(PATTERN)
    name = PATTERN if listed is None else LISTED
    kinds = pattern if listed is None else listed
    if kinds is None:
        kinds = BY_DEFAULT
    if not isinstance(kinds, str if listed is None else list):
        raise keys.refused(name, kinds, "a text" if listed is None else "a list")
    if len(kinds) != layers:
        raise keys.refused(name, kinds, f"the kinds of {layers} layers")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in (PARTS if listed is None else LETTERS):
            raise keys.unknown(name, kind)
    letters = "".join(LETTERS.get(kind, kind) for kind in kinds)
    if pattern not in (None, letters):
        raise keys.refused(PATTERN, pattern, f"as {LISTED} says, {letters!r}")
    return letters


def _nemotron(keys: Keys) -> ModelSettings:
    keys.must_be("mamba_hidden_act", "silu")
    for name in ("use_bias", "mamba_proj_bias", "attention_bias"):
        keys.must_be(name, False, None)
    keys.must_be("sliding_window", None)
    keys.pass_over("expand", "n_shared_experts", *OF_FURTHER)  # whose layers the tensors tell
    parts = [PARTS[letter] for letter in _letters(keys)]
    mixers, mlps = ([part[at] for part in parts] for at in (0, 1))
    settings: ModelSettings = {
        "rope_layers": (False,),
        "mixers": shortest(mixers),
        "mlps": shortest(mlps),
        "mlp_bias": keys.flag("mlp_bias"),
        "multi_token": apart() if keys.whole(DEPTH) else None,
    }
    ssd, experts = _ssd(keys), _routed(keys)
    if "ssd" in mixers:
        settings["ssd"] = ssd
    if "experts" in mlps:
        settings["experts"] = experts
        if settings["mlp_bias"]:
            raise keys.refused("mlp_bias", True, "false: the experts have no biases")
    return settings


def _ssd(keys: Keys) -> dict[str, Any]:
    sizes = {ours: keys.count(theirs) for ours, theirs in OF_SSD.items()}
    return sizes | {"taps_bias": keys.flag("use_conv_bias")} | read_limit(keys)


def _routed(keys: Keys) -> dict[str, Any]:
    return (
        read_router(keys)
        | BY_SIGMOID
        | {"shared": 1, "shared_ffn": keys.count(SHARED_FFN), "width": keys.some(LATENT)}
    )


def _write_nemotron(model: TransformerConfig) -> dict[str, Any]:
    letters = {parts: letter for letter, parts in PARTS.items()}
    if not all(parts in letters for parts in model.layer_parts):
        return {}
    keys: dict[str, Any] = {
        PATTERN: "".join(letters[parts] for parts in model.layer_parts),
        "mlp_bias": model.mlp_bias,
        "attention_bias": model.qkv_bias,
    }
    if model.ssd:
        keys |= {theirs: getattr(model.ssd, ours) for ours, theirs in OF_SSD.items()}
        keys |= {"use_conv_bias": model.ssd.taps_bias} | write_limit(model.ssd)
    if model.experts:
        keys |= write_router(model.experts) | {LATENT: model.experts.width}
        keys[SHARED_FFN] = model.experts.shared_width
    return keys | _write_further(model)


def _write_further(model: TransformerConfig) -> dict[str, Any]:
    """Returns the keys of the block that predicts a further token, which are two layers."""
    keys = write_further(model)
    if model.multi_token is None:
        return keys
    layers = (PARTS["*"], LayerParts("none", model.further_parts.mlp))
    letters, kinds = zip(
        *((letter, names[-1]) for at in layers for letter, names, parts in KINDS if parts == at),
        strict=True,
    )
    return keys | dict(zip(OF_FURTHER, ("".join(letters), list(kinds)), strict=True))


NEMOTRON = {
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        reads=(
            *SIZES,
            *OF_SSD.values(),
            "layer_norm_epsilon",
            "mlp_hidden_act",
            "mlp_bias",
            "mamba_hidden_act",
            "use_bias",
            "use_conv_bias",
            LIMIT,
            LISTED,
            PATTERN,
            "moe_intermediate_size",
            "n_group",
            "n_routed_experts",
            "norm_topk_prob",
            "num_experts_per_tok",
            "routed_scaling_factor",
            "topk_group",
            SHARED_FFN,
            LATENT,
        ),
        defaults={
            "layer_norm_epsilon": 1e-5,
            "intermediate_size": 21504,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mlp_hidden_act": "relu2",
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            SHARED_FFN: 7688,
            "norm_topk_prob": True,
        },
        read=_nemotron,
        write=_write_nemotron,
        activation="mlp_hidden_act",
        activations={"relu2": "relu2"},
        epsilon="layer_norm_epsilon",
        as_usual=_as_usual,
        further_apart=2,
    )
}
