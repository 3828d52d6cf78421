"""Writes the config.json of a run, for transformers 4 and 5, vLLM and llama.cpp alike.

The file is read back, and must give the model of the run: no setting is lost.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import ConfigError, UserError
from spmdtrain.config.published.class_keys import unread_by_class
from spmdtrain.config.published.families.activations import PLAIN
from spmdtrain.config.published.families.all_families import FAMILIES
from spmdtrain.config.published.families.expert_keys import OF_ROUTERS
from spmdtrain.config.published.families.family import Family
from spmdtrain.config.published.families.further_layers import OF_QWEN, OWN_TABLES
from spmdtrain.config.published.families.nemotron import OF_FURTHER
from spmdtrain.config.published.read_config import Published, as_published
from spmdtrain.config.published.rope_keys import ORIGINAL, SHARE, WINDOW_THETA, write_rope
from spmdtrain.config.schema import (
    GPT,
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
    Llama,
    SsdConfig,
    TransformerConfig,
)

# Keys of an imported file that name its origin, code that came with it, or layers left out.
DROPPED = ("quantization_config", "auto_map", "_name_or_path")
BY_OUR_NAMES = "the weights by our names: spmdtrain.weights(RUN) in Python"
ANNOUNCING = (OF_QWEN, OWN_TABLES, *OF_FURTHER)  # of blocks that a model may have left out
# Keys of rotary positions in both forms: transformers 5 reads nothing of the newer one if the older
# one is there.
OF_ROPE = (
    *("rope_theta", "rope_scaling", WINDOW_THETA, SHARE, ORIGINAL),
    "rope_parameters",
)


def write_config(
    model: TransformerConfig,
    base: Published | None,
    *,
    dtype: str,
    tokens: Mapping[str, Any],
    run: Path,
) -> tuple[str, dict[str, Any]]:
    """Returns the family of a model, and its config.json.

    `base` is the config.json that the model was imported from; its keys are kept unless the run
    changed them. `dtype` is that of the files; `tokens` are the ids of special tokens, for a model
    that was never imported. Raises ConfigError, which names `run`, if no family computes what the
    model does.
    """
    dtypes = {"dtype": dtype, "torch_dtype": dtype}
    if (family_and_keys := _described(model, base, dtypes, tokens)) is None:
        raise ConfigError(
            f"{run} {_no_family(model, base)}",
            fix=BY_OUR_NAMES,
        )
    return family_and_keys


def remarks_on_export(model: TransformerConfig, base: Published) -> list[str]:
    """Returns a line for a model that no family computes any more, unlike `base`, from which it
    came.
    """
    if _described(model, base, {}, {}):
        return []
    return [f"a run of this model {_no_family(model, base)}"]


def _described(
    model: TransformerConfig,
    base: Published | None,
    dtypes: Mapping[str, Any],
    tokens: Mapping[str, Any],
) -> tuple[str, dict[str, Any]] | None:
    """Returns the family of a model, and its config.json; None if no family computes it."""
    wanted = function_of(model)
    if base is not None and not _is_new_in_4(model, base):
        dropped = DROPPED if model.multi_token else (*DROPPED, *ANNOUNCING)
        imported = {name: value for name, value in base.keys.items() if name not in dropped}
        family = FAMILIES[base.family]
        made = _written(family, base.family, model)
        if model.experts is None:  # then what is said of them counts for no layer, and stays
            made = {key: made[key] for key in made if key not in OF_ROUTERS & imported.keys()}
        rope = {name: made[name] for name in OF_ROPE if imported.get(name) is None and name in made}
        # First unchanged, but with both forms of the rotary keys; then with all keys rewritten.
        for keys in (imported | rope, imported | made):
            keys = {**keys, **dtypes, "architectures": [family.architecture]}
            if _reads_as(keys, model) == wanted:
                return base.family, keys
    is_plain = model.experts is None and model.latent is None
    for name, family in FAMILIES.items():
        if _is_refused_by_4(family, model):
            continue
        made = _written(family, name, model)
        if is_plain and made.keys() & OF_ROUTERS:
            continue  # no dense model becomes one of experts that it does not have
        keys = {**made, **dtypes, **tokens}
        if _reads_as(keys, model) == wanted:
            return name, keys
    return None


def _is_new_in_4(model: TransformerConfig, base: Published) -> bool:
    """Returns True if a run has a scaling that transformers 4 refuses in the family of its base,
    and that the base did not have: another family may have it in both versions.
    """
    given = base.settings.get("rope_scaling") or {}
    is_given = model.rope_scaling is not None and given.get("kind") == model.rope_scaling.kind
    return not is_given and _is_refused_by_4(FAMILIES[base.family], model)


def _is_refused_by_4(family: Family, model: TransformerConfig) -> bool:
    """Returns True if the family's class in transformers 4 refuses the scaling of a model."""
    kinds = family.rope_kinds_in_4
    return bool(kinds) and model.rope_scaling is not None and model.rope_scaling.kind not in kinds


def function_of(model: TransformerConfig) -> dict[str, Any]:
    """Returns a canonical form of what a model computes: settings that mean the same are equal."""
    scaling = None
    if model.rope_scaling and any(kind.is_scaled for kind in model.layer_kinds):
        scaling = model.rope_scaling
        scaling = scaling.model_dump() | {"scale": scaling.amplitude}
    plain = ("layers", "embed", "heads", "vocab", "max_length", "positions", "norm", "mlp", "tied")
    plain += ("score_cap", "logit_cap", "sinks", "query_norm", "output_gate")
    plain += ("norm_epsilon", "norm_offset", "residual_scale", "value_norm", "layer_scale")
    plain += ("mlp_gate_factor", "mlp_out_factor")
    return {name: getattr(model, name) for name in plain} | {
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "ffn": model.ffn if "mlp" in model.layer_mlps else None,
        "norm_bias": model.bias and model.norm == "layernorm",
        "qkv_bias": model.qkv_bias,
        "out_bias": model.out_bias,
        "mlp_bias": model.mlp_bias,
        "score_scale": model.score_factor or model.head_dim**-0.5,
        "logit_scale": model.logit_factor,
        "embed_scale": model.embed_factor,
        "rope_share": model.rope_share,
        "rope_scaling": scaling,
        "layer_kinds": model.layer_kinds,
        "full": _function_of_full(model),
        "shared_keys": model.shared_keys,
        "shared_ffn": _function_of_sharing(model),
        "token_layers": model.token_layers
        and (model.token_layers.dim, model.token_layers.vocab or model.vocab),
        "latent": model.latent and _with_epsilon(model, model.latent),
        "indexer": model.indexer and model.indexer.model_dump() | {"layers": model.indexer_layers},
        "mixers": model.layer_mixers,
        "mlps": model.layer_mlps,
        "delta": model.delta and _with_epsilon(model, model.delta) | {"norm_places": None},
        "norm_places": [model.norm_places_of(mixer) for mixer in model.layer_mixers],
        "ssd": model.ssd and _with_epsilon(model, model.ssd),
        "conv": model.conv and model.conv.model_dump(),
        "both": model.both and model.both.model_dump(),
        "temperature": model.temperature and model.temperature.model_dump(),
        "multi_token": model.multi_token
        and (model.multi_token.depth, model.multi_token.after_norm),
        "experts": model.experts and _function_of_experts(model.experts),
    }


def _function_of_full(model: TransformerConfig) -> dict[str, Any] | None:
    """Returns what layers without a window have of their own; None if they are as the others."""
    if model.full is None:
        return None
    usual = {"head_dim": model.head_dim, "kv_heads": model.kv_heads, "keys_are_values": False}
    own = {name: getattr(model.full, name) or usual[name] for name in usual}
    return None if own == usual else own


def _function_of_sharing(model: TransformerConfig) -> int | None:
    """Returns the width of the mlps, or shared experts, of layers that share keys."""
    if not model.shared_keys:
        return None
    last = model.of_layer(model.layer_parts[-1])
    return last.experts.shared_width if last.experts else last.ffn


def _with_epsilon(
    model: TransformerConfig, part: LatentConfig | DeltaConfig | SsdConfig
) -> dict[str, Any]:
    """Returns the settings of a part whose norms may have an epsilon of their own."""
    return part.model_dump() | {"epsilon": part.epsilon or model.norm_epsilon}


def _function_of_experts(experts: ExpertsConfig) -> dict[str, Any]:
    names = ("count", "chosen", "score", "normalise", "scale", "logit_bias", "groups")
    names += ("shared_width", "shared_gate", "width", "smallest_sum", "sum_epsilon", "gate_input")
    names += ("own_norms", "learned_scale")
    return {name: getattr(experts, name) for name in names} | {
        "ffn": experts.ffn,
        "groups_kept": experts.groups_kept,
        "has_bias": experts.bias_rate is not None,
    }


def as_model(settings: Mapping[str, Any]) -> TransformerConfig:
    """Returns settings of [model] as an object. Raises ConfigError if they are not valid."""
    return (GPT if settings["name"] == "gpt" else Llama)(**settings)


def _reads_as(keys: dict[str, Any], model: TransformerConfig) -> dict[str, Any] | None:
    """Returns what the model of a config.json computes up to the longest sequence of `model`, or
    None if it cannot be read.
    """
    try:
        settings = dict(as_published(Path(), keys).settings)
        scaling = model.rope_scaling
        if scaling and scaling.kind == "longrope":
            settings["max_length"] = min(settings["max_length"], model.max_length)
        return function_of(as_model(settings))
    except UserError:
        return None


def _written(family: Family, name: str, model: TransformerConfig) -> dict[str, Any]:
    """Returns the keys that a family's class in transformers reads, with the values of a model.

    The caller checks whether they describe the model fully.
    """
    common = {
        "architectures": [family.architecture],
        "model_type": name,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
    }
    if family.is_gpt2:
        return common | {
            "n_layer": model.layers,
            "n_embd": model.embed,
            "n_head": model.heads,
            "n_inner": model.ffn,
            "n_positions": model.max_length,
            "activation_function": _name_of(PLAIN, model.mlp),
            "layer_norm_epsilon": model.norm_epsilon,
        }
    keys = (
        common
        | {
            "num_hidden_layers": model.layers,
            "hidden_size": model.embed,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "intermediate_size": model.ffn,
            family.longest: model.max_length,
            family.activation: _name_of(family.activations, model.mlp),
            family.epsilon: model.norm_epsilon,
        }
        | _rope(family, model)
        | family.write(model)
    )
    unread = unread_by_class(name)
    return {key: value for key, value in keys.items() if key not in unread}


def _rope(family: Family, model: TransformerConfig) -> dict[str, Any]:
    """Returns the keys of rotary positions; none for a model without them."""
    if all(kind.rope_theta is None for kind in model.layer_kinds):
        return {}
    keys = write_rope(
        model,
        strictly=() if _is_refused_by_4(family, model) else family.strict_scaling,
        by_kind=family.rope_by_kind,
        in_tables=family.rope_in_tables,
    )
    # The class takes another share than all channels if the file says none.
    return keys | {SHARE: model.rope_share} if SHARE in family.defaults else keys


def _name_of(known: Mapping[str, str], mlp: str) -> str | None:
    return next((theirs for theirs, ours in known.items() if ours == mlp), None)


def _no_family(model: TransformerConfig, base: Published | None) -> str:
    """Returns why a model cannot be exported: the settings that differ from the model it came from,
    or from our preset, as text.
    """
    preset = GPT() if model.name == "gpt" else Llama()  # pyright: ignore[reportAttributeAccessIssue]
    usual = preset if base is None else as_model(base.settings)
    settings = " with ".join(_differences(model.as_given(), usual.as_given()))
    named = settings or f"name={model.as_given()['name']!r}"
    return f"cannot be written for transformers: {named} belongs to no family"


def _differences(now: Mapping[str, Any], usual: Mapping[str, Any], table: str = "") -> list[str]:
    """Returns the settings, but for sizes, whose values differ: those of tables one by one."""
    sizes = ("layers", "embed", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_length")
    left_out = (*sizes, "dropout", "attention", "extra", "make", "tied", "norm_epsilon")
    left_out += ("rope_theta",)
    lines = []
    for key, value in now.items():
        if key in left_out or value == usual.get(key):
            continue
        if isinstance(value, Mapping):
            inner = _differences(value, usual.get(key) or {}, f"{table}{key}.")
            # A setting that the other kind leaves out does not set this table apart.
            lines += [line for line in inner if not line.endswith(("=None", "=[]"))] or inner
        else:
            lines.append(f"{table}{key}={value!r:.60}")
    return lines
