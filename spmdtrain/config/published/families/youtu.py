"""Youtu-LLM: latent attention, and an mlp in every layer."""

from typing import Any

from spmdtrain.config.published.families.deepseek import (
    LATENT_SIZES,
    READ_BY_LATENTS,
    read_latent,
    write_latent,
)
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig


def _youtu(keys: Keys) -> ModelSettings:
    keys.pass_over("embedding_initializer_range")  # with what a training begins
    return read_latent(keys)


def _write_youtu(model: TransformerConfig) -> dict[str, Any]:
    return write_latent(model, model.latent) if model.latent else {}


YOUTU = {
    "youtu": Family(
        "YoutuForCausalLM",
        reads=(*WITH_SILU, *READ_BY_LATENTS),
        defaults={
            "rms_norm_eps": 1e-6,
            **LATENT_SIZES,
            "tie_word_embeddings": True,
        },
        read=_youtu,
        write=_write_youtu,
    ),
}
