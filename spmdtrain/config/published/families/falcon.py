"""Falcon-H1: each layer has attention and Mamba-2 side by side, and many factors."""

import math
from typing import Any

from spmdtrain.config.published.families import ssd_keys
from spmdtrain.config.published.families.biases import read_biases, write_biases
from spmdtrain.config.published.families.family import USUAL, Family, ModelSettings
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig

MLP, SSM, KEY = "mlp_multipliers", "ssm_multipliers", "key_multiplier"
INNER, NORM, NORM_FIRST = "mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate"
# Single factors: ours, by the table that has them, and theirs.
OF_MODEL = {"logit_scale": "lm_head_multiplier", "embed_scale": "embedding_multiplier"}
OF_ATTENTION = {"in_factor": "attention_in_multiplier", "out_factor": "attention_out_multiplier"}
OF_SSD = {"in_factor": "ssm_in_multiplier", "out_factor": "ssm_out_multiplier"}
SINGLE = (*OF_MODEL.values(), *OF_ATTENTION.values(), *OF_SSD.values(), KEY)


def _falcon(keys: Keys) -> ModelSettings:
    keys.must_be("projectors_bias", False, None)
    gate, down = _factors(keys, MLP, 2)
    ssd = ssd_keys.read_ssd(keys, keys.some(INNER))
    ssd |= {"norm": "group" if keys.flag(NORM) else "none", "factors": _factors(keys, SSM, 5)}
    first = keys.flag(NORM_FIRST)
    if keys.flag(NORM):
        ssd["norm_first"] = first
    settings = read_biases(keys) | {ours: _factor(keys, key) for ours, key in OF_MODEL.items()}
    key_factor = _factor(keys, KEY)
    heads = keys.count("num_attention_heads")
    head_dim = keys.some("head_dim") or keys.count("hidden_size") // heads
    if not head_dim:
        raise keys.refused("num_attention_heads", heads, "at most hidden_size")
    return settings | {
        "mixers": ("both",),
        "both": {ours: _factor(keys, key) for ours, key in OF_ATTENTION.items()},
        "ssd": ssd | {ours: _factor(keys, key) for ours, key in OF_SSD.items()},
        "mlp_gate_factor": gate,
        "mlp_out_factor": down,
        "score_scale": None if key_factor == 1 else key_factor * head_dim**-0.5,
    }


def _factor(keys: Keys, name: str) -> float:
    return float(keys.positive(name) or 1)


def _factors(keys: Keys, name: str, count: int) -> tuple[float, ...]:
    factors = keys.take(name)
    if factors is None:
        return (1.0,) * count
    if not isinstance(factors, list) or len(factors) != count:
        raise keys.refused(name, factors, f"a list of {count} factors")
    if not all(type(factor) in (int, float) and factor > 0 for factor in factors):
        raise keys.refused(name, factors, "numbers above 0")
    return tuple(map(float, factors))


def _write_falcon(model: TransformerConfig) -> dict[str, Any]:
    ssd, both = model.ssd, model.both
    if set(model.layer_mixers) != {"both"} or ssd is None:
        return {}
    keys = write_biases(model) | {"mlp_bias": model.mlp_bias, "projectors_bias": False}
    keys |= {theirs: getattr(ssd, ours) for ours, theirs in OF_SSD.items()}
    keys |= {theirs: getattr(both, ours) if both else 1.0 for ours, theirs in OF_ATTENTION.items()}
    return {
        **keys,
        **ssd_keys.write_ssd(ssd),
        "lm_head_multiplier": model.logit_factor,
        "embedding_multiplier": model.embed_factor,
        KEY: _key_factor(model),
        MLP: [model.mlp_gate_factor, model.mlp_out_factor],
        SSM: list(ssd.factors),
        INNER: ssd.heads * ssd.head_dim,
        NORM: ssd.norm == "group",
        NORM_FIRST: ssd.norm_first or ssd.norm == "none",
    }


def _key_factor(model: TransformerConfig) -> float:
    """Returns the factor of keys that gives the factor of scores to the last bit."""
    if model.score_factor is None:
        return 1.0
    near = model.score_factor * model.head_dim**0.5
    tried = (round(near, 12), near, math.nextafter(near, 0), math.nextafter(near, math.inf))
    equal = (factor for factor in tried if factor * model.head_dim**-0.5 == model.score_factor)
    return next(equal, near)


FALCON = {
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        reads=(
            *USUAL,
            *SINGLE,
            *ssd_keys.READS,
            "hidden_act",
            "attention_bias",
            "mlp_bias",
            "projectors_bias",
            INNER,
            NORM,
            NORM_FIRST,
            MLP,
            SSM,
        ),
        defaults={
            **ssd_keys.DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            INNER: 1024,
            NORM_FIRST: True,
        },
        read=_falcon,
        write=_write_falcon,
        activations={"silu": "swiglu", "swish": "swiglu"},
        as_usual=ssd_keys.without_infinity,
    )
}
