"""Apertus."""

from spmdtrain.config.published.families.activations import PLAIN
from spmdtrain.config.published.families.biases import read_biases, write_biases
from spmdtrain.config.published.families.family import WITH_SILU, Family
from spmdtrain.config.published.rope_keys import ORIGINAL

APERTUS = {
    "apertus": Family(
        "ApertusForCausalLM",
        reads=(*WITH_SILU, "attention_bias"),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 12e6},
        settings={"query_norm": "head"},
        read=read_biases,
        write=write_biases,
        activations={"xielu": "xielu", "relu2": "relu2", **PLAIN},
        default_rope={
            "rope_type": "llama3",
            "rope_theta": 12e6,
            "factor": 8.0,
            ORIGINAL: 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
}
