"""The keys of families in the spellings that published files have, and values that are refused."""

from pathlib import Path
from typing import Any

import directories
import pytest

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.published import write_config as write_config_module
from spmdtrain.config.published.families.all_families import FAMILIES
from spmdtrain.config.published.read_config import as_published, read_published
from spmdtrain.config.published.write_config import as_model, function_of, write_config

DENSE, SPARSE = "dense", "sparse"


def settings(family: str, **changes: Any) -> dict[str, Any]:
    """The settings of a family's tiny model with other keys; `...` takes a key away."""
    keys = directories.CONFIGS[family] | changes
    return dict(as_published(Path(), {k: v for k, v in keys.items() if v is not ...}).settings)


def test_the_channels_that_turn_are_said_by_three_keys_the_newest_of_which_counts():
    assert settings("minimax_m2", rotary_dim=6)["rope_share"] == 6 / 16
    assert settings("minimax_m2", rotary_dim=6, partial_rotary_factor=0.5)["rope_share"] == 0.5
    newest = {"rope_type": "default", "partial_rotary_factor": 0.25}
    assert settings("minimax_m2", rope_parameters=newest)["rope_share"] == 0.25
    assert "rope_share" not in settings("minimax_m2", rotary_dim=...)
    assert settings("glm4_moe", partial_rotary_factor=...)["rope_share"] == 0.5


OF_A_SHARE = [
    name for name, family in FAMILIES.items() if "partial_rotary_factor" in family.defaults
]


@pytest.mark.parametrize("family", OF_A_SHARE)
def test_all_channels_turn_on_the_way_out_where_the_class_turns_a_share(family):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0, "partial_rotary_factor": 1.0}
    own = {"rope_theta": ..., "rope_scaling": ..., "partial_rotary_factor": ...}
    keys = directories.CONFIGS[family] | own | {"rope_parameters": rope}
    published = as_published(Path(), {name: x for name, x in keys.items() if x is not ...})
    model = as_model(published.settings)
    assert model.rope_share == 1
    for base in (published, None):
        name, keys = write_config(model, base, dtype="float32", tokens={}, run=Path())
        # A new model may be of another family, whose class turns all channels anyway.
        assert name == family or base is None
        turns_a_share = "partial_rotary_factor" in FAMILIES[name].defaults
        assert keys.get("partial_rotary_factor") == (1 if turns_a_share else None)
        assert function_of(as_model(as_published(Path(), keys).settings)) == function_of(model)


def test_layers_without_a_window_do_not_turn_where_there_are_windows():
    of_pattern = settings("exaone4", layer_types=..., sliding_window_pattern=4)
    assert of_pattern == settings("exaone4")
    assert of_pattern["rope_layers"] == [True, True, True, False]
    full = {"layer_types": ["full_attention"] * 5}
    assert settings("exaone4", **full)["rope_layers"] == [False]
    # transformers 5.24 divides by 0 here.
    without = settings("exaone4", sliding_window=None, layer_types=...)
    assert not {"windows", "rope_layers"} & without.keys()


def test_the_period_of_windows_counts_only_without_a_list_of_layers():
    """transformers saves the list, and with it the period of the file that it read."""
    settings_of_period = settings("cohere2")
    kinds = ["full_attention" if not window else "sliding_attention" for window in (7, 7, 7, 0, 7)]
    saved = {"layer_types": kinds, "sliding_window_pattern": ..., "layer_switch": 3}
    assert settings("cohere2", **saved) == settings_of_period
    with pytest.raises(ConfigError, match="layer_switch=3 has no setting"):
        settings("cohere2", layer_switch=3)


def test_the_first_of_four_layers_of_cwm_has_no_window_unless_a_list_says_so():
    assert settings("cwm")["windows"] == [0, 7, 7, 7]  # repeats
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    assert settings("cwm", layer_types=kinds)["windows"] == [7, 7, 7, 7, 0]
    by_class = settings("cwm", rope_scaling=..., rope_theta=...)
    assert (by_class["rope_theta"], by_class["rope_scaling"]["factor"]) == (1e6, 16.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("norm_type", "rms_norm"), ("mlp_type", "gated")],
)
def test_what_published_starcoder2_says_again_must_be_what_its_class_does(key, value):
    assert settings("starcoder2", **{key: ...}) == settings("starcoder2")
    with pytest.raises(ConfigError, match=f"{key}='{value}' has no setting"):
        settings("starcoder2", **{key: value})


def test_keys_of_the_first_starcoder_do_not_count_in_the_second():
    """Its class reads `hidden_act` and `norm_epsilon`, whatever these say."""
    stale = {"activation_function": "gelu", "layer_norm_epsilon": 1e-3}
    assert settings("starcoder2", **stale) == settings("starcoder2")


LAYERS_OF = {
    family: keys.get("num_hidden_layers", 0) for family, keys in directories.CONFIGS.items()
}
LISTING = ["exaone_moe", "glm4_moe_lite", "hy_v3", "kimi_linear", "deepseek_v32", "glm_moe_dsa"]


@pytest.mark.parametrize("family", LISTING)
def test_dense_layers_are_listed_or_counted(family):
    layers = directories.CONFIGS[family]["num_hidden_layers"]
    uncounted = {"first_k_dense_replace": ...}
    listed = [DENSE, DENSE, *[SPARSE] * (layers - 2)]
    assert settings(family, mlp_layer_types=listed, **uncounted)["experts"]["first_dense"] == 2
    counted = settings(family, mlp_layer_types=..., first_k_dense_replace=1)
    assert counted["experts"]["first_dense"] == 1
    odd = [SPARSE, DENSE, *[SPARSE] * (layers - 2)]
    model = as_model(settings(family, mlp_layer_types=odd, **uncounted))
    written = FAMILIES[family].write(model)["mlp_layer_types"]
    assert written == [DENSE if mlp == "mlp" else SPARSE for mlp in model.layer_mlps] == odd
    with pytest.raises(ConfigError, match="mlp_layer_types='Dense' has no setting"):
        settings(family, mlp_layer_types=[*odd[1:], "Dense"])


# Classes that have the number too write that of their defaults beside the list.
@pytest.mark.parametrize("family", ["exaone_moe", "kimi_linear", "deepseek_v32", "glm_moe_dsa"])
def test_the_list_of_dense_layers_counts_before_their_number(family):
    layers = directories.CONFIGS[family]["num_hidden_layers"]
    listed = [DENSE, *[SPARSE] * (layers - 1)]
    read = settings(family, mlp_layer_types=listed, first_k_dense_replace=3)
    assert read["experts"]["first_dense"] == 1


def with_experts(family: str, **keys: Any) -> list[int]:
    """The layers with experts, of the model and of what is written of it."""
    model = as_model(settings(family, num_hidden_layers=6, layer_types=..., **keys))
    _, written = write_config(model, None, dtype="float32", tokens={}, run=Path())
    assert written["model_type"] == family
    models = (model, as_model(dict(as_published(Path(), written).settings)))
    first, again = ([n for n, mlp in enumerate(x.layer_mlps) if mlp == "experts"] for x in models)
    assert first == again
    return first


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"mlp_only_layers": [1, 4]}, [0, 2, 3, 5]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1, 5]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": None}, [2, 5]),
        ({"mlp_only_layers": [0]}, [1, 2, 3, 4, 5]),
    ],
)
def test_a_step_counts_layers_from_1_and_a_list_from_0(family, keys, layers):
    assert with_experts(family, **keys) == layers


@pytest.mark.parametrize(
    ("first", "last", "interval", "layers"),
    [(1, -1, 2, [1, 3, 5]), (1, 3, 1, [1, 2, 3]), (2, 5, 3, [2, 5]), (0, 4, 2, [1, 3])],
)
def test_layers_of_ernie_have_experts_from_a_first_to_a_last(first, last, interval, layers):
    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    keys = dict(zip(names, (first, last, interval), strict=True))
    assert with_experts("ernie4_5_moe", **keys) == layers


# Keys that leave no layer with experts. transformers runs such models with an mlp in all layers.
ALL_DENSE: dict[str, dict[str, Any]] = {
    **{
        name: {
            "mlp_layer_types": [DENSE] * LAYERS_OF[name],
            "first_k_dense_replace": LAYERS_OF[name],
        }
        for name in LISTING
    },
    **dict.fromkeys(("deepseek_v3", "dots1", "mistral4"), {"first_k_dense_replace": 99}),
    "glm4_moe": {"first_k_dense_replace": LAYERS_OF["glm4_moe"], "num_nextn_predict_layers": 0},
    **dict.fromkeys(("lfm2_moe", "afmoe"), {"num_dense_layers": 5}),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), {"mlp_only_layers": [0, 1, 2, 3, 4]}),
    "qwen3_next": {"decoder_sparse_step": 6},
    "ernie4_5_moe": {"moe_layer_start_index": 5},
}
COUNTS = ("num_experts", "n_routed_experts", "moe_num_experts")


@pytest.mark.parametrize("family", ALL_DENSE)
def test_a_family_with_experts_may_have_a_model_without(family, monkeypatch):
    """Its keys of experts stay as they were imported. A new model goes out so only if it has
    latents, which no dense family has; the keys then have the smallest valid values.
    """
    keys = directories.CONFIGS[family] | ALL_DENSE[family]
    imported = as_published(Path(), keys)
    assert not {"experts", "mlps"} & imported.settings.keys()
    model = as_model(imported.settings)
    (count,) = (key for key in COUNTS if key in keys)
    for changed in (model, model.model_copy(update={"vocab": 140})):
        name, written = write_config(changed, imported, dtype="float32", tokens={}, run=Path())
        assert (name, written[count]) == (family, keys[count])
        assert written["vocab_size"] == changed.vocab
    monkeypatch.setattr(write_config_module, "FAMILIES", {family: FAMILIES[family]})
    if model.latent is None:
        with pytest.raises(ConfigError, match="belongs to no family"):
            write_config(model, None, dtype="float32", tokens={}, run=Path())
    else:
        name, written = write_config(model, None, dtype="float32", tokens={}, run=Path())
        assert (name, written[count]) == (family, 1)


def test_a_new_dense_model_with_latents_is_written_as_deepseek_v3():
    model = as_model(settings("deepseek_v3", first_k_dense_replace=3))
    name, written = write_config(model, None, dtype="float32", tokens={}, run=Path())
    assert (name, written["first_k_dense_replace"]) == ("deepseek_v3", model.layers)


def test_a_new_model_with_latents_is_mistral4_only_with_yarn():
    """Without it the class of transformers 5.24 turns all channels of a head, and fails."""
    with_yarn = settings("mistral4")
    without = {key: with_yarn[key] for key in with_yarn.keys() - {"rope_scaling", "score_scale"}}
    write_config(as_model(with_yarn), None, dtype="float32", tokens={}, run=Path())
    with pytest.raises(ConfigError, match="belongs to no family"):
        write_config(as_model(without), None, dtype="float32", tokens={}, run=Path())


def test_norms_of_latents_have_an_epsilon_of_their_own():
    for family in ("deepseek_v3", "glm4_moe_lite"):
        for epsilon in (1e-6, 1e-3):
            model = as_model(settings(family, rms_norm_eps=epsilon))
            assert (model.latent.epsilon, model.norm_epsilon) == (1e-6, epsilon)
    plain = model.model_copy(update={"latent": model.latent.model_copy(update={"epsilon": None})})
    assert function_of(plain) != function_of(model)


def test_layers_of_lfm2_are_listed_or_numbered_and_its_mlps_are_narrower_than_their_key():
    listed = settings("lfm2")
    numbered = settings("lfm2", layer_types=..., full_attn_idxs=[1, 4])
    assert listed == numbered | {"mixers": listed["mixers"]}
    assert settings("lfm2", layer_types=...).get("mixers") is None  # the class then has attention
    assert listed["ffn"] == 72  # a multiple of 12 of at least two thirds of 100
    assert settings("lfm2", block_auto_adjust_ff_dim=False)["ffn"] == 100
    assert settings("lfm2", block_ff_dim=200, block_ffn_dim_multiplier=0.5)["ffn"] == 72
    assert settings("lfm2", block_ffn_dim_multiplier=None)["ffn"] == 66
    assert settings("lfm2", tie_embedding=False)["tied"] is False
    experts = settings("lfm2_moe")["experts"]
    assert (experts["sum_epsilon"], experts["first_dense"]) == (1e-6, 1)


def test_layers_of_olmo_hybrid_turn_only_where_a_theta_is_said():
    """transformers 5.24 takes a table that is null for an absent one, whose theta is 10,000."""
    null = {"rope_theta": None}
    for rope in ({"rope_theta": None}, {"rope_parameters": null}, null | {"rope_parameters": null}):
        without = {"rope_theta": ..., "rope_parameters": ...} | rope
        assert settings("olmo_hybrid", **without)["rope_layers"] == [False]
    for rope in ({}, {"rope_parameters": None}, {"rope_parameters": {"rope_theta": 500.0}}):
        turning = {"rope_theta": ..., "rope_parameters": ...} | rope
        assert "rope_layers" not in settings("olmo_hybrid", **turning)


def test_sizes_of_olmo_hybrid_follow_from_its_heads():
    sizes = dict.fromkeys((key for key in directories.CONFIGS["olmo_hybrid"] if "_dim" in key), ...)
    heads = {"linear_num_key_heads": ..., "linear_num_value_heads": None, "layer_types": ...}
    found = settings("olmo_hybrid", **sizes, **heads)
    assert found["mixers"] == ["delta", "delta", "delta", "attention"]
    wanted = {"key_heads": 6, "value_heads": 6, "key_dim": 6, "value_dim": 12, "taps": 4, "rate": 2}
    wanted |= {"epsilon": 1e-5, "norm_places": "before"}
    assert found["delta"] == wanted
    short = settings("olmo_hybrid", **heads, num_hidden_layers=3)
    assert short["mixers"] == ["delta", "delta", "attention"]


def test_layers_of_kimi_linear_are_listed_or_counted_from_1():
    counted = settings("kimi_linear")
    assert counted["mixers"] == ["delta", "delta", "attention", "delta", "attention"]
    full, linear = "full_attention", "linear_attention"
    kinds = [linear, linear, full, linear, full]
    sizes = {"linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4}
    newer = {"linear_attn_config": ..., "layer_types": kinds, **sizes}
    assert settings("kimi_linear", **newer) == counted
    # As the class does, where a file says nothing.
    by_class = settings("kimi_linear", **newer | {"layer_types": ...})["mixers"]
    assert by_class == ["delta", "delta", "delta", "delta", "attention"]
    assert counted["rope_layers"] == [False]
    assert counted["latent"]["epsilon"] == 1e-6 != counted["norm_epsilon"]
    listed = settings(
        "kimi_linear",
        mlp_layer_types=["dense"] * 2 + ["sparse"] * 3,
        **{"first_k_dense_replace": ...},
    )
    assert listed["experts"]["first_dense"] == 2


def kimi_table(**changes: Any) -> dict[str, Any]:
    return {
        "linear_attn_config": directories.CONFIGS["kimi_linear"]["linear_attn_config"] | changes
    }


@pytest.mark.parametrize("family", ["kimi_linear", "nemotron_h"])
def test_a_class_that_never_ties_its_head_does_not_whatever_the_key_says(family):
    for tied in (True, False, ...):
        assert settings(family, tie_word_embeddings=tied)["tied"] is False


def test_a_refusal_of_a_value_names_its_family_and_its_key():
    wrong = {"mlp_layer_types": [DENSE], "num_attention_heads": "6", "rms_norm_eps": -1}
    for family in ("glm4_moe_lite", "exaone_moe"):
        for key, value in wrong.items():
            with pytest.raises(ConfigError, match=rf"{key}=.* must be .*model_type='{family}'"):
                settings(family, **{key: value})


def test_gates_are_normalised_where_the_class_does_so_by_itself():
    for family, normalised in {"qwen3_next": True, "qwen3_moe": False, "qwen2_moe": False}.items():
        assert as_model(settings(family, norm_topk_prob=...)).experts.normalise is normalised


CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_k")
ROUTED = [name for name, keys in directories.CONFIGS.items() if any(key in keys for key in CHOSEN)]


@pytest.mark.parametrize("family", ROUTED)
def test_a_token_may_go_to_one_expert_also_where_its_gate_is_always_1(family):
    (key,) = (key for key in CHOSEN if key in directories.CONFIGS[family])
    model = as_model(settings(family, **{key: 1}))
    assert model.experts.chosen == 1
    _, written = write_config(model, None, dtype="float32", tokens={}, run=Path())
    again = as_model(as_published(Path(), written).settings)
    assert function_of(again) == function_of(model)


def test_sections_of_pictures_change_nothing_of_text():
    plain = settings("qwen3_5_text")
    rope = {"rope_type": "default", "rope_theta": 500.0}
    for sections in ([11, 11, 10], [1, 2, 1]):
        of_pictures = {"mrope_section": sections, "mrope_interleaved": True}
        assert settings("qwen3_5_text", rope_parameters=rope | of_pictures) == plain


def test_gpt_oss_is_read_as_transformers_5_saves_it():
    assert settings("gpt_oss", swiglu_alpha=1.702, swiglu_limit=7.0) == settings("gpt_oss")


@pytest.mark.parametrize("key", ["router_jitter_noise", "residual_dropout", "z_loss_coef"])
def test_noise_and_losses_of_0_say_nothing(key):
    for family in directories.CONFIGS:
        settings(family, **{key: 0.0})
    if key != "residual_dropout":
        with pytest.raises(ConfigError, match=f"{key}=0.1 has no setting here; found model_type="):
            settings("minimax_m2", **{key: 0.1})


@pytest.mark.parametrize(
    ("family", "changes", "line"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 has no setting here; found model_type='olmoe'"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, r"attn_type_list=\[1, 0, 1\] has no setting"),
        ("minimax_m2", {"rotary_dim": 18}, "rotary_dim=18 must be at most head_dim=16"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm=False has no setting"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax' has no setting"),
        ("glm4_moe_lite", {"head_dim": 16}, "head_dim=16 has no setting"),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 has no"),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias=True has no setting"),
        ("hy_v3", {"first_k_dense_replace": 1}, "first_k_dense_replace=1 has no setting"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace=1 has no setting"),
        ("dots1", {"n_routed_experts": ...}, "lacks n_routed_experts"),
        (
            "olmo_hybrid",
            {"hidden_act": "gelu_pytorch_tanh"},
            "hidden_act='gelu_pytorch_tanh' has no",
        ),
        (
            "qwen3_next",
            {"hidden_act": "gelu_pytorch_tanh"},
            "hidden_act='gelu_pytorch_tanh' has no",
        ),
        ("kimi_linear", kimi_table(kda_layers=[1, 2]), "two lists that have each of 5 layers once"),
        ("kimi_linear", kimi_table(kda_layers=[0, 1, 3]), "once, counted from 1"),
        ("kimi_linear", kimi_table(kda_layers=[1, 2, 3]), "once, counted from 1"),
        ("kimi_linear", kimi_table(gate_lower_bound=-5), "gate_lower_bound=-5 has no setting"),
        ("kimi_linear", {"layer_types": ["full_attention"] * 5}, "the layers of layer_types"),
        ("kimi_linear", {"linear_num_heads": 3}, "linear_num_heads=3 has no setting"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False has no setting"),
        (
            "kimi_linear",
            {"max_position_embeddings": 32},
            "max_position_embeddings=32 has no setting",
        ),
        ("kimi_linear", {"model_max_length": ...}, "lacks model_max_length"),
        ("olmo_hybrid", {"head_dim": 4}, "head_dim=4 has no setting"),
        ("lfm2", {"theta": 1e4}, "theta=10000.0 has no setting here; found model_type='lfm2'"),
        ("lfm2", {"full_attn_idxs": [0]}, r"full_attn_idxs=\[0\] has no setting"),
        ("lfm2", {"layer_types": ["mamba"] * 5}, r"layer_types='mamba' has no setting"),
        ("lfm2", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 has no setting"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 has no setting"),
        (
            "exaone4",
            {"layer_types": ...},
            "sliding_window_pattern='LLLG' must be a number",
        ),
    ],
)
def test_what_a_class_computes_otherwise_is_refused_by_key_and_family(family, changes, line):
    with pytest.raises(ConfigError, match=line):
        settings(family, **changes)


def test_announced_layers_are_read_if_the_files_have_them(tmp_path):
    """transformers 5 writes the key for each model of these classes, and never such a layer."""
    config = directories.CONFIGS["glm4_moe"] | {"num_nextn_predict_layers": 1}
    for parts in (1, 3):
        directories.write(tmp_path / f"with {parts}", config, parts=parts)
        further = read_published(tmp_path / f"with {parts}").settings["multi_token"]
        assert further == {"depth": 1, "frozen": True}
    plain = directories.drawn(directories.tensors_of(directories.CONFIGS["glm4_moe"]))
    directories.write(tmp_path / "without", config, plain, parts=2)
    without = read_published(tmp_path / "without")
    assert "multi_token" not in without.settings
    assert "lack the layers that predict further tokens" in without.remarks[0]
