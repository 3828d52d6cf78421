"""GPT-2."""

from spmdtrain.config.published.families.family import Family, ModelSettings
from spmdtrain.config.published.keys import Keys


def _gpt2(keys: Keys) -> ModelSettings:
    keys.must_be("scale_attn_weights", True)
    keys.must_be("scale_attn_by_inverse_layer_idx", False)
    keys.must_be("add_cross_attention", False)
    return {}


GPT2 = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        reads=(
            "activation_function",
            "add_cross_attention",
            "layer_norm_epsilon",
            "n_inner",
            "scale_attn_by_inverse_layer_idx",
            "scale_attn_weights",
            "tie_word_embeddings",
        ),
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        read=_gpt2,
        activation="activation_function",
        is_gpt2=True,
    ),
}
