"""The names of the parts of layers that families share: attention, mlp and norms."""

from spmdtrain.interop import delta_mixer, latent_attention, paired_rotation, pieces, xielu
from spmdtrain.interop.names.entry import EMBED, HEAD, NORM, entry

ATTENTION = {
    "attention.qkv_eknd": entry(
        pieces.qkv,
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "attention.qkv_bias": entry(
        pieces.qkv_bias, "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"
    ),
    "attention.out_kgde": entry(pieces.heads_out, "self_attn.o_proj.weight"),
    "attention.out_bias": entry(pieces.copy, "self_attn.o_proj.bias"),
}
MLP = {
    "mlp.up_ef": entry(pieces.gate_up, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.up_bias": entry(pieces.gate_up_bias, "mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.down_fe": entry(pieces.transpose, "mlp.down_proj.weight"),
    "mlp.down_bias": entry(pieces.copy, "mlp.down_proj.bias"),
}
FEED_FORWARD = {
    "mlp.up_ef": entry(
        pieces.gate_up, "feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"
    ),
    "mlp.down_fe": entry(pieces.transpose, "feed_forward.down_proj.weight"),
}
UNGATED_MLP = {
    "mlp.up_ef": entry(pieces.transpose, "mlp.up_proj.weight"),
    "mlp.up_bias": entry(pieces.copy, "mlp.up_proj.bias"),
    "mlp.down_fe": entry(pieces.transpose, "mlp.down_proj.weight"),
    "mlp.down_bias": entry(pieces.copy, "mlp.down_proj.bias"),
}
PLAIN_MLP = {
    "mlp.up_ef": entry(pieces.transpose, "mlp.c_fc.weight"),
    "mlp.up_bias": entry(pieces.copy, "mlp.c_fc.bias"),
    "mlp.down_fe": entry(pieces.transpose, "mlp.c_proj.weight"),
    "mlp.down_bias": entry(pieces.copy, "mlp.c_proj.bias"),
}
# Channels that turn as a pair are adjacent in files.
PAIRED_ATTENTION = {
    **ATTENTION,
    "attention.qkv_eknd": entry(paired_rotation.qkv, *ATTENTION["attention.qkv_eknd"].names),
    "attention.qkv_bias": entry(paired_rotation.qkv_bias, *ATTENTION["attention.qkv_bias"].names),
}
XIELU_MLP = {
    **UNGATED_MLP,
    "mlp.slopes.alpha_p": entry(
        xielu.slope_above, *(f"mlp.act_fn.{name}" for name in ("alpha_p", "beta", "eps"))
    ),
    "mlp.slopes.alpha_n": entry(pieces.copy, "mlp.act_fn.alpha_n"),
}
NORMS_OF_APERTUS = {
    "attention_norm.scale_e": entry(pieces.copy, "attention_layernorm.weight"),
    "mlp_norm.scale_e": entry(pieces.copy, "feedforward_layernorm.weight"),
}
# Attention and mlp read one norm.
NORM_IN_FRONT = {"attention_norm.scale_e": entry(pieces.copy, "input_layernorm.weight")}
NORMS_BEFORE = {
    **NORM_IN_FRONT,
    "mlp_norm.scale_e": entry(pieces.copy, "post_attention_layernorm.weight"),
}

NORM_BIASES = {
    "attention_norm.bias_e": entry(pieces.copy, "input_layernorm.bias"),
    "mlp_norm.bias_e": entry(pieces.copy, "post_attention_layernorm.bias"),
}
BIAS_OF_LAST_NORM = {"norm.bias_e": entry(pieces.copy, "model.norm.bias")}

# In Llama, the norm before the mlp has the name that other families give to the norm after
# attention.
NORMS_BOTH = {
    "attention_norm.scale_e": entry(pieces.copy, "input_layernorm.weight"),
    "attention_out_norm.scale_e": entry(pieces.copy, "post_attention_layernorm.weight"),
    "mlp_norm.scale_e": entry(pieces.copy, "pre_feedforward_layernorm.weight"),
    "mlp_out_norm.scale_e": entry(pieces.copy, "post_feedforward_layernorm.weight"),
}
NORMS_AFTER = {
    "attention_out_norm.scale_e": entry(pieces.copy, "post_attention_layernorm.weight"),
    "mlp_out_norm.scale_e": entry(pieces.copy, "post_feedforward_layernorm.weight"),
}
QUERY_NORMS = {
    "attention.query_key_norm.query_scale": entry(pieces.copy, "self_attn.q_norm.weight"),
    "attention.query_key_norm.key_scale": entry(pieces.copy, "self_attn.k_norm.weight"),
}
# AFMoE's: the gates of attention's output are a tensor of their own.
GATED_ATTENTION = {
    "attention.qkv_eknd": entry(
        pieces.qkv_gates_apart,
        *(f"self_attn.{name}_proj.weight" for name in ("q", "gate", "k", "v")),
    ),
    "attention.out_kgde": entry(pieces.heads_out, "self_attn.o_proj.weight"),
}
NORMS_OF_GLM4 = {
    "attention_norm.scale_e": entry(pieces.copy, "input_layernorm.weight"),
    "attention_out_norm.scale_e": entry(pieces.copy, "post_self_attn_layernorm.weight"),
    "mlp_norm.scale_e": entry(pieces.copy, "post_attention_layernorm.weight"),
    "mlp_out_norm.scale_e": entry(pieces.copy, "post_mlp_layernorm.weight"),
}
NORMS_OF_AFMOE = {
    "attention_norm.scale_e": entry(pieces.copy, "input_layernorm.weight"),
    "attention_out_norm.scale_e": entry(pieces.copy, "post_attention_layernorm.weight"),
    "mlp_norm.scale_e": entry(pieces.copy, "pre_mlp_layernorm.weight"),
    "mlp_out_norm.scale_e": entry(pieces.copy, "post_mlp_layernorm.weight"),
}
# If values are the projected keys.
KEYS_AS_VALUES = {
    "attention.qk_eknd": entry(
        pieces.queries_and_keys, "self_attn.q_proj.weight", "self_attn.k_proj.weight"
    ),
    "attention.qk_bias": entry(
        pieces.queries_and_keys_bias, "self_attn.q_proj.bias", "self_attn.k_proj.bias"
    ),
}
# What each layer has of its own embeddings, and what all layers share of them.
TOKEN_PART = {
    "token_part.gate_ep": entry(pieces.transpose, "per_layer_input_gate.weight"),
    "token_part.out_pe": entry(pieces.transpose, "per_layer_projection.weight"),
    "token_part.norm.scale_e": entry(pieces.copy, "post_per_layer_input_norm.weight"),
}
TOKEN_LAYERS = {
    "blocks.beside.table_vf": entry(pieces.copy, "model.embed_tokens_per_layer.weight"),
    "blocks.beside.project_ef": entry(pieces.transpose, "model.per_layer_model_projection.weight"),
    "blocks.beside.scale_p": entry(pieces.copy, "model.per_layer_projection_norm.weight"),
}
# If keys and values are those of an earlier layer.
QUERIES_ALONE = {
    "attention.q_eknd": entry(pieces.queries, "self_attn.q_proj.weight"),
    "attention.q_bias": entry(pieces.queries_bias, "self_attn.q_proj.bias"),
    "attention.idle.key_ef": entry(pieces.transpose, "self_attn.k_proj.weight"),
    "attention.idle.value_ef": entry(pieces.transpose, "self_attn.v_proj.weight"),
    "attention.idle.key_bias_f": entry(pieces.copy, "self_attn.k_proj.bias"),
    "attention.idle.value_bias_f": entry(pieces.copy, "self_attn.v_proj.bias"),
    "attention.idle.key_scale_d": entry(pieces.copy, "self_attn.k_norm.weight"),
}
LAYER_SCALE = {"layer_scale.scale": entry(pieces.copy, "layer_scalar")}
FUSED_ATTENTION = {
    "attention.qkv_eknd": entry(pieces.qkv_fused, "self_attn.qkv_proj.weight"),
    "attention.out_kgde": entry(pieces.heads_out, "self_attn.o_proj.weight"),
}
FUSED_MLP = {
    "mlp.up_ef": entry(pieces.gate_up_fused, "mlp.gate_up_proj.weight"),
    "mlp.down_fe": entry(pieces.transpose, "mlp.down_proj.weight"),
}
LATENT = {
    "attention.down_eu": entry(
        latent_attention.down, "self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"
    ),
    "attention.query_scale": entry(pieces.copy, "self_attn.q_a_layernorm.weight"),
    "attention.query_rkd": entry(latent_attention.queries, "self_attn.q_b_proj.weight"),
    "attention.latent_scale": entry(pieces.copy, "self_attn.kv_a_layernorm.weight"),
    "attention.key_value_ckd": entry(
        latent_attention.keys_and_values, "self_attn.kv_b_proj.weight"
    ),
    "attention.out_kgde": entry(pieces.heads_out, "self_attn.o_proj.weight"),
}
# If queries are computed from the stream.
PLAIN_QUERIES = {
    "attention.down_eu": entry(latent_attention.down, "self_attn.kv_a_proj_with_mqa.weight"),
    "attention.query_rkd": entry(latent_attention.queries, "self_attn.q_proj.weight"),
}
# The gated delta rule, with the rows of all queries, then of all keys, then of all values.
DELTA = {
    "attention.qkvz_ehn": entry(
        delta_mixer.mixed, "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"
    ),
    "attention.rates_ehn": entry(
        delta_mixer.rates, "linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"
    ),
    "attention.taps_hnw": entry(delta_mixer.taps, "linear_attn.conv1d.weight"),
    "attention.decay_log": entry(pieces.copy, "linear_attn.A_log"),
    "attention.decay_bias": entry(pieces.copy, "linear_attn.dt_bias"),
    "attention.norm_scale_v": entry(pieces.copy, "linear_attn.norm.weight"),
    "attention.out_hrve": entry(pieces.heads_out, "linear_attn.out_proj.weight"),
}
# With those of a key head side by side, as ours are; the taps are in the other order all the same.
DELTA_BY_HEAD = {
    **DELTA,
    "attention.qkvz_ehn": entry(pieces.heads_first, "linear_attn.in_proj_qkvz.weight"),
    "attention.rates_ehn": entry(pieces.heads_first, "linear_attn.in_proj_ba.weight"),
}
# With a tensor for each of them, and a convolution for each of the first three.
CONVOLUTIONS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
JOINED = tuple((name, "conv1d.weight") for name in CONVOLUTIONS)  # as transformers may save them
DELTA_APART = {
    "attention.qkvz_ehn": entry(
        delta_mixer.mixed_apart, *(f"linear_attn.{name}_proj.weight" for name in "qkvg")
    ),
    "attention.rates_ehn": entry(
        delta_mixer.rates, *(f"linear_attn.{name}_proj.weight" for name in "ba")
    ),
    "attention.taps_hnw": entry(
        delta_mixer.taps_apart, *(f"linear_attn.{name}" for name in CONVOLUTIONS)
    ),
    "attention.decay_log": DELTA["attention.decay_log"],
    "attention.decay_bias": DELTA["attention.decay_bias"],
    "attention.norm_scale_v": entry(pieces.copy, "linear_attn.o_norm.weight"),
    "attention.out_hrve": entry(pieces.heads_out, "linear_attn.o_proj.weight"),
}
INDEXER = {
    "indexer.query_nrhc": entry(pieces.heads_first, "self_attn.indexer.wq_b.weight"),
    "indexer.key_nec": entry(pieces.transpose, "self_attn.indexer.wk.weight"),
    "indexer.key_scale_nc": entry(pieces.copy, "self_attn.indexer.k_norm.weight"),
    "indexer.key_bias_nc": entry(pieces.copy, "self_attn.indexer.k_norm.bias"),
    "indexer.weight_neh": entry(pieces.transpose, "self_attn.indexer.weights_proj.weight"),
}
LIKE_LLAMA = {
    EMBED: entry(pieces.copy, "model.embed_tokens.weight"),
    NORM: entry(pieces.copy, "model.norm.weight"),
    HEAD: entry(pieces.copy, "lm_head.weight"),
}
PREFIX = "model.layers.{}."
