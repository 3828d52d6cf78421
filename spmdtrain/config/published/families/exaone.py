"""EXAONE 4, dense and with experts."""

from typing import Any

from spmdtrain.config.published.families.expert_keys import (
    experts_of,
    in_layers,
    read_grouped,
    read_sparse,
    write_grouped,
    write_sparse,
)
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.further_layers import read_further, write_further
from spmdtrain.config.published.families.layer_windows import (
    all_but_each,
    layer_types_of,
    read_windows,
    turning_with_a_window,
    window_of,
)
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig

PATTERN = "sliding_window_pattern"
NAMES = ("num_experts", "num_shared_experts")
READ_BY_EXAONE4 = (*WITH_SILU, "layer_types", "sliding_window", PATTERN)


def _exaone4(keys: Keys) -> ModelSettings:
    """Reads windows. Where a model has any, layers without one have no rotary positions."""
    if keys.whole("sliding_window") is None:  # then all layers see all tokens, and turn
        keys.pass_over("layer_types", PATTERN)
        return {}
    return turning_with_a_window(read_windows(keys, _has_window(keys)))


def _has_window(keys: Keys) -> list[bool]:
    """Returns which layers have a window: all but each `sliding_window_pattern`-th."""
    if keys.values.get("layer_types") is not None:
        keys.pass_over(PATTERN)  # letters in older files; the list is what counts
        return all_but_each(keys, 1)
    return all_but_each(keys, keys.some(PATTERN) or 1)


def _write_exaone4(model: TransformerConfig) -> dict[str, Any]:
    window = window_of(model)
    if window is None and any(kind.rope_theta is None for kind in model.layer_kinds):
        window = 4096  # of no layer: with null all layers would turn
    return {"sliding_window": window, "layer_types": layer_types_of(model)}


def _exaone_moe(keys: Keys) -> ModelSettings:
    experts = in_layers(read_grouped(keys, *NAMES), read_sparse(keys))
    return _exaone4(keys) | experts | read_further(keys)


def _write_exaone_moe(model: TransformerConfig) -> dict[str, Any]:
    return {
        **_write_exaone4(model),
        **write_grouped(experts_of(model), *NAMES),
        **write_further(model),
        **write_sparse(model),
    }


WINDOWS = {"sliding_window": 4096, PATTERN: 4}
EXAONE = {
    "exaone4": Family(
        "Exaone4ForCausalLM",
        reads=READ_BY_EXAONE4,
        defaults={"rms_norm_eps": 1e-5, **WINDOWS},
        settings={"norm_places": "after", "query_norm": "head"},
        read=_exaone4,
        write=_write_exaone4,
    ),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM",
        reads=(
            *READ_BY_EXAONE4,
            "first_k_dense_replace",
            "mlp_layer_types",
            "moe_intermediate_size",
            "n_group",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "num_shared_experts",
            "routed_scaling_factor",
            "topk_group",
        ),
        defaults={
            "rms_norm_eps": 1e-5,
            **WINDOWS,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        settings={"query_norm": "head"},
        read=_exaone_moe,
        write=_write_exaone_moe,
    ),
}
