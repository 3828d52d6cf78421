"""The names of the parts of layers with the state space of Mamba-2."""

from functools import partial

from spmdtrain.interop import pieces, ssd_mixer
from spmdtrain.interop.names.entry import EMBED, HEAD, NORM, Part, entry
from spmdtrain.interop.names.expert_parts import GRANITE, LOAD_BIAS
from spmdtrain.interop.names.layer_parts import ATTENTION, LIKE_LLAMA, MLP, NORMS_BEFORE


def _state_space(place: str, ours: str = "attention") -> Part:
    """Returns the mixer at `place` of a layer; `ours` is the path of it here."""
    return {
        f"{ours}.zxt_ehrn": entry(ssd_mixer.of_heads, f"{place}.in_proj.weight"),
        f"{ours}.kq_ehn": entry(ssd_mixer.of_groups, f"{place}.in_proj.weight"),
        f"{ours}.taps_hrvw": entry(ssd_mixer.taps_of_heads, f"{place}.conv1d.weight"),
        f"{ours}.taps_hnw": entry(ssd_mixer.taps_of_groups, f"{place}.conv1d.weight"),
        f"{ours}.taps_bias_hrv": entry(ssd_mixer.bias_of_heads, f"{place}.conv1d.bias"),
        f"{ours}.taps_bias_hn": entry(ssd_mixer.bias_of_groups, f"{place}.conv1d.bias"),
        f"{ours}.decay_log": entry(pieces.copy, f"{place}.A_log"),
        f"{ours}.time_bias": entry(pieces.copy, f"{place}.dt_bias"),
        f"{ours}.skip": entry(pieces.copy, f"{place}.D"),
        f"{ours}.norm_scale": entry(pieces.copy, f"{place}.norm.weight"),
        f"{ours}.out_hrve": entry(pieces.heads_out, f"{place}.out_proj.weight"),
    }


def _renamed(part: Part, old: str, new: str, ours: str = "") -> Part:
    """Returns a part whose names begin with `new`, for those that begin with `old`."""
    return {
        ours + path: one._replace(names=tuple(new + name.removeprefix(old) for name in one.names))
        for path, one in part.items()
    }


# A layer of Nemotron-H is one part, whose name and norm are the same whatever it is.
NEMOTRON = {
    "attention_norm.scale_e": entry(pieces.copy, "norm.weight"),
    "mlp_norm.scale_e": entry(pieces.copy, "norm.weight"),
    **_renamed(ATTENTION, "self_attn.", "mixer."),
    **_state_space("mixer"),
    "mlp.narrow_in_el": entry(pieces.transpose, "mixer.fc1_latent_proj.weight"),
    "mlp.narrow_out_le": entry(pieces.transpose, "mixer.fc2_latent_proj.weight"),
}
NEMOTRON_MLP = {
    "mlp.up_ef": entry(pieces.transpose, "mixer.up_proj.weight"),
    "mlp.up_bias": entry(pieces.copy, "mixer.up_proj.bias"),
    "mlp.down_fe": entry(pieces.transpose, "mixer.down_proj.weight"),
    "mlp.down_bias": entry(pieces.copy, "mixer.down_proj.bias"),
}
_NEMOTRON_OTHERS = {
    "mlp.router.weight_ex": entry(pieces.transpose, "mixer.gate.weight"),
    LOAD_BIAS: entry(pieces.copy, "mixer.gate.e_score_correction_bias"),
    "mlp.shared.up_ef": entry(pieces.transpose, "mixer.shared_experts.up_proj.weight"),
    "mlp.shared.down_fe": entry(pieces.transpose, "mixer.shared_experts.down_proj.weight"),
}
_OF_EACH = partial(pieces.of_each_expert, rule=pieces.transpose)
NEMOTRON_EXPERTS = (
    {
        **_NEMOTRON_OTHERS,
        "mlp.up_xeu": entry(_OF_EACH, "mixer.experts.{x}.up_proj.weight"),
        "mlp.down_xfe": entry(_OF_EACH, "mixer.experts.{x}.down_proj.weight"),
    },
    {
        **_NEMOTRON_OTHERS,
        "mlp.up_xeu": entry(pieces.transpose_stacked, "mixer.experts.up_proj"),
        "mlp.down_xfe": entry(pieces.transpose_stacked, "mixer.experts.down_proj"),
    },
)
NEMOTRON_PREFIX = "backbone.layers.{}."
NEMOTRON_WHOLE = {
    EMBED: entry(pieces.copy, "backbone.embeddings.weight"),
    NORM: entry(pieces.copy, "backbone.norm_f.weight"),
    HEAD: entry(pieces.copy, "lm_head.weight"),
}

GRANITE_HYBRID = {**ATTENTION, **NORMS_BEFORE, **_state_space("mamba")}
GRANITE_MLP = {
    "mlp.up_ef": entry(pieces.gate_up_fused, "shared_mlp.input_linear.weight"),
    "mlp.down_fe": entry(pieces.transpose, "shared_mlp.output_linear.weight"),
}
GRANITE_HYBRID_EXPERTS = tuple(
    {**layout, **{path.replace("mlp.", "mlp.shared."): one for path, one in GRANITE_MLP.items()}}
    for layout in GRANITE
)

FALCON = {
    **_renamed(ATTENTION, "", "", "attention."),
    **_state_space("mamba", "attention.ssd"),
    "attention_norm.scale_e": NORMS_BEFORE["attention_norm.scale_e"],
    "mlp_norm.scale_e": entry(pieces.copy, "pre_ff_layernorm.weight"),
}
FALCON_MLP = _renamed(MLP, "mlp.", "feed_forward.")
FALCON_WHOLE = {**LIKE_LLAMA, NORM: entry(pieces.copy, "model.final_layernorm.weight")}
