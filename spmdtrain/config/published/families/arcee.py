"""Arcee's AFM."""

from spmdtrain.config.published.families.activations import PLAIN
from spmdtrain.config.published.families.biases import read_biases
from spmdtrain.config.published.families.family import WITH_SILU, Family
from spmdtrain.config.published.families.llama import write_llama

ARCEE = {
    "arcee": Family(
        "ArceeForCausalLM",
        reads=(*WITH_SILU, "attention_bias", "mlp_bias"),
        defaults={"rms_norm_eps": 1e-5},
        read=read_biases,
        write=write_llama,
        activations={"relu2": "relu2", **PLAIN},
    ),
}
