"""Reads and writes the keys of experts that several families share."""

from typing import Any

from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import ExpertsConfig, TransformerConfig

DENSE, SPARSE = "dense", "sparse"
# Of a router that scores each expert alone, by a sigmoid, and adds a bias to choose.
BY_SIGMOID = {"score": "sigmoid", "bias_rate": 0.0}
READ_BY_ROUTERS = (
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "topk_group",
)


def read_experts(keys: Keys, count: str) -> dict[str, Any]:
    """Returns how many experts a layer has, by the key `count`, and how many a token goes to."""
    return {"count": keys.count(count), "chosen": keys.count("num_experts_per_tok")}


def write_experts(experts: ExpertsConfig, count: str) -> dict[str, Any]:
    """Returns the keys that `read_experts` reads."""
    return {count: experts.count, "num_experts_per_tok": experts.chosen}


def read_grouped(
    keys: Keys, count: str = "n_routed_experts", shared: str = "n_shared_experts"
) -> dict[str, Any]:
    """Returns the settings of experts in groups, in the keys that began with DeepSeek-V3.

    `count` and `shared` are the keys of the numbers of experts. The first dense layers are left
    out.
    """
    keys.must_be("scoring_func", "sigmoid")
    keys.must_be("topk_method", "noaux_tc")
    return read_router(keys, count, shared) | BY_SIGMOID


def read_router(
    keys: Keys, count: str = "n_routed_experts", shared: str = "n_shared_experts"
) -> dict[str, Any]:
    """Returns what `read_grouped` does, but for the scores, which are a softmax."""
    return read_experts(keys, count) | {
        "ffn": keys.count("moe_intermediate_size"),
        "shared": keys.whole(shared) or 0,
        "normalise": keys.flag("norm_topk_prob"),
        "scale": float(keys.positive("routed_scaling_factor") or 1),
        "groups": keys.some("n_group") or 1,
        "groups_kept": keys.some("topk_group"),
    }


def write_grouped(
    experts: ExpertsConfig, count: str = "n_routed_experts", shared: str = "n_shared_experts"
) -> dict[str, Any]:
    """Returns the keys that `read_grouped` reads."""
    scores = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return write_router(experts, count, shared) | scores


def write_router(
    experts: ExpertsConfig, count: str = "n_routed_experts", shared: str = "n_shared_experts"
) -> dict[str, Any]:
    """Returns the keys that `read_router` reads."""
    return write_experts(experts, count) | {
        "moe_intermediate_size": experts.ffn,
        shared: experts.shared,
        "norm_topk_prob": experts.normalise,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.groups,
        "topk_group": experts.groups_kept,
    }


def read_first_dense(keys: Keys) -> int:
    """Returns the number of first layers without experts: by `mlp_layer_types` if there is one,
    else by `first_k_dense_replace`.
    """
    layers = keys.count("num_hidden_layers")
    first = keys.whole("first_k_dense_replace") or 0
    kinds = keys.take("mlp_layer_types")
    if kinds is None:
        return first
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise keys.refused("mlp_layer_types", kinds, f"a list of {layers} kinds")
    first = kinds.count(DENSE)
    if kinds != [DENSE] * first + [SPARSE] * (layers - first):
        raise keys.refused("mlp_layer_types", kinds, f"first {DENSE!r}, then {SPARSE!r}")
    return first


def mlp_layer_types_of(model: TransformerConfig) -> list[str]:
    """Returns the key `mlp_layer_types` of a model."""
    return [SPARSE if mlp == "experts" else DENSE for mlp in model.layer_mlps]
