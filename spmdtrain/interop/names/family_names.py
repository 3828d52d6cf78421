"""The names of the tensors of each family, by the parts of its layers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmdtrain.interop import pieces
from spmdtrain.interop.names import expert_parts, kimi_parts, layer_parts, lfm_parts, ssd_parts
from spmdtrain.interop.names.entry import EMBED, HEAD, NORM, POSITIONS, Part, Table, entry
from spmdtrain.interop.names.expert_parts import Layouts
from spmdtrain.interop.names.further_parts import AFTER_THE_LAST, APART, IN_TWO, FurtherNames
from spmdtrain.interop.names.layer_parts import (
    ATTENTION,
    BIAS_OF_LAST_NORM,
    DELTA,
    DELTA_APART,
    DELTA_BY_HEAD,
    FEED_FORWARD,
    FUSED_ATTENTION,
    FUSED_MLP,
    GATED_ATTENTION,
    JOINED,
    KEYS_AS_VALUES,
    LATENT,
    LAYER_SCALE,
    LIKE_LLAMA,
    MLP,
    NORM_BIASES,
    NORM_IN_FRONT,
    NORMS_AFTER,
    NORMS_BEFORE,
    NORMS_BOTH,
    NORMS_OF_AFMOE,
    NORMS_OF_APERTUS,
    NORMS_OF_GLM4,
    PAIRED_ATTENTION,
    PLAIN_MLP,
    QUERIES_ALONE,
    QUERY_NORMS,
    TOKEN_LAYERS,
    TOKEN_PART,
    UNGATED_MLP,
    XIELU_MLP,
)


class FamilyNames(NamedTuple):
    """The names of a family's tensors.

    `layer` has those that all layers have, of attention and norms, and a layer has either those of
    `mlp` or of `experts`, whose names depend on the layout of the files.
    """

    layer: Part
    mlp: Part = MLP
    experts: Layouts = ()
    whole: Table = LIKE_LLAMA  # outside of layers
    prefix: str = layer_parts.PREFIX
    further: FurtherNames = AFTER_THE_LAST
    # (a part of a name, what some files have in its place). An export writes the first.
    renamed: Sequence[tuple[str, str]] = ()
    # (our prefix, the prefix of other files) that transformers reads and writes again for this
    # family. An export does so too.
    kept_spellings: Sequence[tuple[str, str]] = ()


OF_ATTENTION = {**ATTENTION, **NORMS_BEFORE}
WITH_QUERY_NORMS = {**OF_ATTENTION, **QUERY_NORMS}
LLAMA = FamilyNames(OF_ATTENTION)
STARCODER = FamilyNames(
    {**OF_ATTENTION, **NORM_BIASES}, PLAIN_MLP, whole={**LIKE_LLAMA, **BIAS_OF_LAST_NORM}
)
OLMO = FamilyNames({**ATTENTION, **NORMS_AFTER, **QUERY_NORMS})
GPT2 = FamilyNames(
    {
        "attention_norm.scale_e": entry(pieces.copy, "ln_1.weight"),
        "attention_norm.bias_e": entry(pieces.copy, "ln_1.bias"),
        "attention.qkv_eknd": entry(pieces.qkv_fused_columns, "attn.c_attn.weight"),
        "attention.qkv_bias": entry(pieces.qkv_bias_fused, "attn.c_attn.bias"),
        "attention.out_kgde": entry(pieces.heads_out_rows, "attn.c_proj.weight"),
        "attention.out_bias": entry(pieces.copy, "attn.c_proj.bias"),
        "mlp_norm.scale_e": entry(pieces.copy, "ln_2.weight"),
        "mlp_norm.bias_e": entry(pieces.copy, "ln_2.bias"),
    },
    mlp={
        "mlp.up_ef": entry(pieces.copy, "mlp.c_fc.weight"),
        "mlp.up_bias": entry(pieces.copy, "mlp.c_fc.bias"),
        "mlp.down_fe": entry(pieces.copy, "mlp.c_proj.weight"),
        "mlp.down_bias": entry(pieces.copy, "mlp.c_proj.bias"),
    },
    whole={
        EMBED: entry(pieces.copy, "transformer.wte.weight"),
        POSITIONS: entry(pieces.copy, "transformer.wpe.weight"),
        NORM: entry(pieces.copy, "transformer.ln_f.weight"),
        "norm.bias_e": entry(pieces.copy, "transformer.ln_f.bias"),
        HEAD: entry(pieces.copy, "lm_head.weight"),
    },
    prefix="transformer.h.{}.",
)
# Norms stand before the parts of linear layers, and after those of others, where transformers 5.24
# renames one as well.
OLMO_HYBRID = FamilyNames(
    {**ATTENTION, **DELTA_APART, **NORMS_BEFORE, **NORMS_AFTER, **QUERY_NORMS},
    renamed=(
        ("input_layernorm", "attention_layer_norm"),
        ("post_attention_layernorm", "feedforward_layer_norm"),
        *JOINED,
    ),
)
LFM = FamilyNames(lfm_parts.LAYER, lfm_parts.MLP, whole=lfm_parts.WHOLE)
SINKS = {"attention.sinks": entry(pieces.copy, "self_attn.sinks")}


OF_GEMMA4 = {
    **ATTENTION,
    **KEYS_AS_VALUES,
    **QUERIES_ALONE,
    **NORMS_BOTH,
    **QUERY_NORMS,
    **LAYER_SCALE,
}
GEMMA4 = FamilyNames(
    {**OF_GEMMA4, **TOKEN_PART},
    experts=expert_parts.GEMMA4,
    whole={**LIKE_LLAMA, **TOKEN_LAYERS},
)
LLAMA4 = FamilyNames(
    {**PAIRED_ATTENTION, **NORMS_BEFORE},
    mlp=FEED_FORWARD,
    experts=expert_parts.LLAMA4,
)
QWEN_LINEAR = FamilyNames(
    {**ATTENTION, **DELTA, **NORMS_BEFORE, **QUERY_NORMS},
    further=APART,
    kept_spellings=(("model.", "model.language_model."),),
)

NAMES: Mapping[str, FamilyNames] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": FamilyNames(WITH_QUERY_NORMS),
    "gemma2": FamilyNames({**ATTENTION, **NORMS_BOTH}),
    "gemma3_text": FamilyNames({**ATTENTION, **NORMS_BOTH, **QUERY_NORMS}),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "phi3": FamilyNames({**FUSED_ATTENTION, **NORMS_BEFORE}, FUSED_MLP),
    "olmo2": OLMO,
    "olmo3": OLMO,
    "smollm3": LLAMA,
    "granite": LLAMA,
    "deepseek_v3": FamilyNames({**LATENT, **NORMS_BEFORE}, experts=expert_parts.DEEPSEEK),
    "glm": FamilyNames({**PAIRED_ATTENTION, **NORMS_BEFORE}, FUSED_MLP),
    "glm4": FamilyNames({**PAIRED_ATTENTION, **NORMS_OF_GLM4}, FUSED_MLP),
    "glm4_moe": FamilyNames(WITH_QUERY_NORMS, experts=expert_parts.DEEPSEEK),
    "glm4_moe_lite": FamilyNames({**LATENT, **NORMS_BEFORE}, experts=expert_parts.DEEPSEEK),
    "dots1": FamilyNames(WITH_QUERY_NORMS, experts=expert_parts.DEEPSEEK),
    "solar_open": FamilyNames(OF_ATTENTION, experts=expert_parts.DEEPSEEK),
    "hy_v3": FamilyNames(WITH_QUERY_NORMS, experts=expert_parts.HUNYUAN),
    "minimax_m2": FamilyNames(WITH_QUERY_NORMS, experts=expert_parts.MINIMAX),
    "seed_oss": LLAMA,
    "exaone4": OLMO,
    "exaone_moe": FamilyNames(WITH_QUERY_NORMS, experts=expert_parts.EXAONE),
    "granitemoe": FamilyNames(OF_ATTENTION, experts=expert_parts.GRANITE),
    "granitemoeshared": FamilyNames(OF_ATTENTION, experts=ssd_parts.GRANITE_HYBRID_EXPERTS),
    "qwen3_5_text": QWEN_LINEAR,
    "qwen3_5_moe_text": QWEN_LINEAR._replace(experts=expert_parts.GATED_SHARED),
    "qwen3_next": FamilyNames(
        {**ATTENTION, **DELTA_BY_HEAD, **NORMS_BEFORE, **QUERY_NORMS},
        experts=expert_parts.GATED_SHARED,
        further=APART,
    ),
    "olmo_hybrid": OLMO_HYBRID,
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        FamilyNames({**LATENT, **NORMS_BEFORE}, experts=expert_parts.DEEPSEEK),
    ),
    "kimi_linear": FamilyNames(
        kimi_parts.LAYER, experts=expert_parts.KIMI, renamed=kimi_parts.RENAMED
    ),
    "lfm2": LFM,
    "lfm2_moe": LFM._replace(experts=expert_parts.LFM),
    "qwen2_moe": FamilyNames(OF_ATTENTION, experts=expert_parts.GATED_SHARED),
    "ministral": LLAMA,
    "ministral3": LLAMA,
    "cwm": LLAMA,
    "youtu": FamilyNames({**LATENT, **NORMS_BEFORE}),
    "starcoder2": STARCODER,
    "mistral4": FamilyNames({**LATENT, **NORMS_BEFORE}, experts=expert_parts.MISTRAL),
    "arcee": FamilyNames(OF_ATTENTION, UNGATED_MLP),
    "apertus": FamilyNames({**ATTENTION, **NORMS_OF_APERTUS, **QUERY_NORMS}, XIELU_MLP),
    "afmoe": FamilyNames(
        {**GATED_ATTENTION, **NORMS_OF_AFMOE, **QUERY_NORMS}, experts=expert_parts.AFMOE
    ),
    "llama4_text": LLAMA4,
    "ernie4_5": FamilyNames({**PAIRED_ATTENTION, **NORMS_BEFORE}),
    "cohere2": FamilyNames({**PAIRED_ATTENTION, **NORM_IN_FRONT}),
    "ernie4_5_moe": FamilyNames({**PAIRED_ATTENTION, **NORMS_BEFORE}, experts=expert_parts.ERNIE),
    "nemotron_h": FamilyNames(
        ssd_parts.NEMOTRON,
        ssd_parts.NEMOTRON_MLP,
        ssd_parts.NEMOTRON_EXPERTS,
        whole=ssd_parts.NEMOTRON_WHOLE,
        prefix=ssd_parts.NEMOTRON_PREFIX,
        further=IN_TWO,
        kept_spellings=(("backbone.", "model."),),
    ),
    "granitemoehybrid": FamilyNames(
        ssd_parts.GRANITE_HYBRID, ssd_parts.GRANITE_MLP, ssd_parts.GRANITE_HYBRID_EXPERTS
    ),
    "falcon_h1": FamilyNames(ssd_parts.FALCON, ssd_parts.FALCON_MLP, whole=ssd_parts.FALCON_WHOLE),
    "gpt_oss": FamilyNames({**OF_ATTENTION, **SINKS}, experts=expert_parts.GPT_OSS),
    "mixtral": FamilyNames(OF_ATTENTION, experts=expert_parts.MIXTRAL),
    "qwen3_moe": FamilyNames(WITH_QUERY_NORMS, experts=expert_parts.QWEN),
    "olmoe": FamilyNames(WITH_QUERY_NORMS, experts=expert_parts.QWEN),
    "flex_olmo": OLMO._replace(experts=expert_parts.QWEN),
}
