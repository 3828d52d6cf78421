"""The names of the parts of LFM2's layers."""

from spmdtrain.interop import pieces
from spmdtrain.interop.names.entry import NORM, entry
from spmdtrain.interop.names.layer_parts import ATTENTION, LIKE_LLAMA

LAYER = {
    "attention_norm.scale_e": entry(pieces.copy, "operator_norm.weight"),
    "mlp_norm.scale_e": entry(pieces.copy, "ffn_norm.weight"),
    "attention.qkv_eknd": ATTENTION["attention.qkv_eknd"],
    "attention.out_kgde": entry(pieces.heads_out, "self_attn.out_proj.weight"),
    "attention.query_key_norm.query_scale": entry(pieces.copy, "self_attn.q_layernorm.weight"),
    "attention.query_key_norm.key_scale": entry(pieces.copy, "self_attn.k_layernorm.weight"),
    # The rows of B, of C, and of x.
    "attention.in_e3c": entry(pieces.heads_first, "conv.in_proj.weight"),
    "attention.in_bias_3c": entry(pieces.split_vector, "conv.in_proj.bias"),
    "attention.taps_cw": entry(pieces.taps, "conv.conv.weight"),
    "attention.taps_bias_c": entry(pieces.copy, "conv.conv.bias"),
    "attention.out_ce": entry(pieces.transpose, "conv.out_proj.weight"),
    "attention.out_bias": entry(pieces.copy, "conv.out_proj.bias"),
}
MLP = {
    "mlp.up_ef": entry(pieces.gate_up, "feed_forward.w1.weight", "feed_forward.w3.weight"),
    "mlp.down_fe": entry(pieces.transpose, "feed_forward.w2.weight"),
}
# Its last norm has the name of one behind the embedding.
WHOLE = {**LIKE_LLAMA, NORM: entry(pieces.copy, "model.embedding_norm.weight")}
