"""The names of the parts of Kimi Linear's layers: both kinds of attention have one prefix."""

from spmdtrain.interop import delta_mixer, pieces
from spmdtrain.interop.names.entry import entry
from spmdtrain.interop.names.layer_parts import CONVOLUTIONS, JOINED, LATENT, NORMS_BEFORE

DELTA = {
    "attention.qkvz_ehn": entry(
        delta_mixer.without_gates, *(f"self_attn.{name}_proj.weight" for name in "qkv")
    ),
    "attention.rates_ehn": entry(pieces.heads_first, "self_attn.b_proj.weight"),
    "attention.taps_hnw": entry(
        delta_mixer.taps_apart, *(f"self_attn.{name}" for name in CONVOLUTIONS)
    ),
    "attention.narrow_decay.down_el": entry(pieces.transpose, "self_attn.f_a_proj.weight"),
    "attention.narrow_decay.up_lhn": entry(pieces.heads_first, "self_attn.f_b_proj.weight"),
    "attention.narrow_gate.down_el": entry(pieces.transpose, "self_attn.g_a_proj.weight"),
    "attention.narrow_gate.up_lhn": entry(pieces.heads_first, "self_attn.g_b_proj.weight"),
    "attention.decay_log": entry(delta_mixer.log_decays, "self_attn.A_log"),
    "attention.decay_bias": entry(pieces.copy, "self_attn.dt_bias"),
    "attention.norm_scale_v": entry(pieces.copy, "self_attn.o_norm.weight"),
    "attention.out_hrve": entry(pieces.heads_out, "self_attn.o_proj.weight"),
}
LAYER = {**LATENT, **DELTA, **NORMS_BEFORE}
# transformers 5.24 saves the mlp of a dense layer under the name of experts, or all by the names
# that its class has.
RENAMED = (
    (".mlp.", ".block_sparse_moe."),
    (".self_attn.", ".self_attn.forget_gate."),
    *JOINED,
)
