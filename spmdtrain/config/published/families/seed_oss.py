"""Seed-OSS."""

from typing import Any

from spmdtrain.config.published.families.biases import read_biases
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.llama import write_llama
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig

OUT_BIAS = "attention_out_bias"


def _seed_oss(keys: Keys) -> ModelSettings:
    return read_biases(keys) | {"out_bias": keys.flag(OUT_BIAS)}


def _write_seed_oss(model: TransformerConfig) -> dict[str, Any]:
    return write_llama(model) | {OUT_BIAS: model.out_bias}


SEED_OSS = {
    "seed_oss": Family(
        "SeedOssForCausalLM",
        reads=(*WITH_SILU, "attention_bias", OUT_BIAS, "mlp_bias"),
        defaults={"rms_norm_eps": 1e-6, "head_dim": 128, "attention_bias": True},
        read=_seed_oss,
        write=_write_seed_oss,
    ),
}
