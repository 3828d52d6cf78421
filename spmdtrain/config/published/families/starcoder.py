"""StarCoder2."""

from typing import Any

from spmdtrain.config.published.families.activations import PLAIN
from spmdtrain.config.published.families.family import WITH_SILU, Family, ModelSettings
from spmdtrain.config.published.families.layer_windows import all_layers, read_windows, window_of
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig

# Keys of published files that no class reads. Other values are those of other models.
OF_STARCODER2 = {
    "mlp_type": "default",
    "norm_type": "layer_norm",
    "scale_attn_weights": True,
    "attention_softmax_in_fp32": True,
    "scale_attention_softmax_in_fp32": True,
}


def _starcoder2(keys: Keys) -> ModelSettings:
    """Reads biases of all linear layers, or of none; those of norms are always there."""
    for name, value in OF_STARCODER2.items():
        keys.agrees(name, value)
    # Left over from the first StarCoder: the class reads neither.
    keys.pass_over("activation_function", "layer_norm_epsilon")
    has_biases = keys.flag("use_bias", True)
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), has_biases)
    return read_windows(keys, all_layers(keys)) | biases


def _write_starcoder2(model: TransformerConfig) -> dict[str, Any]:
    return {"sliding_window": window_of(model), "use_bias": model.qkv_bias}


STARCODER = {
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        reads=(
            *(name for name in WITH_SILU if name != "rms_norm_eps"),
            "norm_epsilon",
            "sliding_window",
            "use_bias",
        ),
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "use_bias": True,
        },
        settings={"norm": "layernorm", "bias": True},
        read=_starcoder2,
        write=_write_starcoder2,
        activations=PLAIN,
        epsilon="norm_epsilon",
    ),
}
