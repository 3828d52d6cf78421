"""Reads and writes the keys of experts that several families share."""

from collections.abc import Sequence
from typing import Any

from spmdtrain.config.published.families.family import ModelSettings
from spmdtrain.config.published.families.layer_windows import shortest
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import ExpertsConfig, TransformerConfig

DENSE, SPARSE = "dense", "sparse"
FIRST_DENSE = "first_k_dense_replace"
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
# The keys that say how many experts a layer has, how wide they are and how a token chooses.
OF_ROUTERS = frozenset(
    (
        *READ_BY_ROUTERS,
        *("num_experts", "num_shared_experts", "shared_expert_intermediate_size"),
        *("scoring_func", "topk_method", "route_scale", "router_scaling_factor"),
        *("num_experts_per_token", "num_expert_group", "moe_renormalize", "use_expert_bias"),
        *("moe_num_experts", "moe_k", "moe_num_shared_experts", "moe_norm_min"),
    )
)
# The smallest experts, which a class that may have some is told of where no layer has any.
OF_NO_LAYER = ExpertsConfig(count=1, chosen=1, ffn=1, shared=1, normalise=True)


def experts_of(model: TransformerConfig) -> ExpertsConfig:
    """Returns [model.experts], or `OF_NO_LAYER` for a model without experts."""
    return model.experts or OF_NO_LAYER


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


def read_sparse(keys: Keys) -> list[bool]:
    """Returns whether each layer has experts: by `mlp_layer_types` if there is one, which alone
    counts for the classes of transformers, else from `first_k_dense_replace` on.
    """
    layers, first = keys.count("num_hidden_layers"), keys.whole(FIRST_DENSE) or 0
    kinds = keys.take("mlp_layer_types")
    if kinds is None:
        return from_layer(first, layers)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise keys.refused("mlp_layer_types", kinds, f"a list of {layers} kinds")
    for kind in kinds:
        if kind not in (DENSE, SPARSE):
            raise keys.unknown("mlp_layer_types", kind)
    return [kind == SPARSE for kind in kinds]


def from_layer(first: int, layers: int) -> list[bool]:
    """Gives experts to every layer but the first ones."""
    return [number >= first for number in range(layers)]


def after_first(keys: Keys, experts: dict[str, Any], key: str = FIRST_DENSE) -> ModelSettings:
    """Returns [model.experts] of all layers but the first ones, whose number `key` says."""
    layers = keys.count("num_hidden_layers")
    return in_layers(experts, from_layer(keys.whole(key) or 0, layers))


def first_dense_of(model: TransformerConfig) -> int:
    """Returns the number that `after_first` reads: all layers, for a model without experts."""
    return model.experts.first_dense if model.experts else model.layers


def in_layers(experts: dict[str, Any], sparse: Sequence[bool]) -> ModelSettings:
    """Returns [model.experts] of these layers, with `mlps` if dense ones are not the first ones.

    A model whose layers all are dense has none.
    """
    if True not in sparse:
        return {}
    first = sparse.index(True)
    if all(sparse[first:]):
        return {"experts": experts | {"first_dense": first}}
    return {
        "experts": experts,
        "mlps": shortest(["experts" if has else "mlp" for has in sparse]),
    }


def are_sparse(model: TransformerConfig) -> list[bool]:
    """Returns whether each layer of a model has experts."""
    return [mlp == "experts" for mlp in model.layer_mlps]


def mlp_layer_types_of(model: TransformerConfig) -> list[str]:
    """Returns the key `mlp_layer_types` of a model."""
    return [SPARSE if has else DENSE for has in are_sparse(model)]


def write_sparse(model: TransformerConfig) -> dict[str, Any]:
    """Returns the keys that `read_sparse` reads: the second, of published files, where it can say
    it.
    """
    sparse = are_sparse(model)
    first = sparse.count(False)
    older = {FIRST_DENSE: first} if all(sparse[first:]) else {}
    return {"mlp_layer_types": mlp_layer_types_of(model)} | older


def read_steps(keys: Keys) -> list[bool]:
    """Returns whether each layer has experts, in the keys that began with Qwen1.5-MoE: each
    `decoder_sparse_step`-th, but for those of `mlp_only_layers`.
    """
    layers, step = keys.count("num_hidden_layers"), keys.count("decoder_sparse_step")
    dense = keys.take("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise keys.refused("mlp_only_layers", dense, "a list of numbers of layers")
    return [number not in dense and (number + 1) % step == 0 for number in range(layers)]


def write_steps(model: TransformerConfig) -> dict[str, Any]:
    """Returns the keys that `read_steps` reads."""
    dense = [number for number, has in enumerate(are_sparse(model)) if not has]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
