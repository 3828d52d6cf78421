"""Reads the config.json of a published model: its family, and the settings of [model]."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.named_file import AGAIN
from spmdtrain.config.published.class_keys import unread_by_class
from spmdtrain.config.published.families.activations import PLAIN
from spmdtrain.config.published.families.all_families import FAMILIES
from spmdtrain.config.published.families.family import Family, ModelSettings
from spmdtrain.config.published.families.further_layers import as_in_files, holds_further
from spmdtrain.config.published.idle_tensors import with_idle_keys
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.quantisation import packing_of
from spmdtrain.config.published.rope_keys import FULL, read_rope

NAME = "config.json"
ADAPTER = "adapter_config.json"
LARGEST = 16 * 2**20  # bytes
MOST_EXPERTS = 2**18  # in all layers
DTYPES = ("float32", "bfloat16", "float16")
# Others that torch has: weights in them are widened or refused by the files, which name their own.
OTHER_DTYPES = re.compile(r"float64|float\d_\w+|half|float|double")
# Models with a vision tower, of which only the text part is read, and the family of that part where
# its own keys do not name it.
OF_VISION = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
TIES = "tie_word_embeddings"
# In these the outer key decides, true if it is absent, whatever the text part says.
TIED_OUTSIDE = ("mistral3",)
KNOWN = ", ".join(name.removesuffix("_text") for name in FAMILIES)


@dataclass(frozen=True)
class Published:
    """A published model as its config.json describes it.

    `keys` are those of the language model alone, even if the file also describes a vision tower.
    """

    folder: Path
    family: str  # a key of FAMILIES
    keys: Mapping[str, Any]
    settings: ModelSettings  # of [model]
    dtype: str | None  # of the files
    remarks: tuple[str, ...] = ()
    packing: str = ""  # of its matrices: a key of UNPACKINGS

    def remarks_as_comments(self) -> list[str]:
        """Returns the remarks as lines of a TOML file."""
        return [f"# {remark}" for remark in self.remarks]


def is_published(folder: Path) -> bool:
    """Returns True for a directory that holds a Hugging Face model and is not a run."""
    try:
        document = json.loads((folder / NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        return "model_type" in document or "architectures" in document
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def model_type_of(folder: Path) -> str | None:
    """Returns what the config.json of a directory calls its model; None without such a file."""
    try:
        document = json.loads((folder / NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    name = document.get("model_type") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None


def read_published(folder: Path, ignored: Collection[str] = ()) -> Published:
    """Returns the model in a Hugging Face directory, without the tensors of the patterns `ignored`.
    Only JSON is read.

    Raises ConfigError if it is not such a directory, if its family is unknown, or if the model
    computes something that has no settings here. Raises CheckpointError if it is quantised in a way
    that cannot be read.
    """
    published = as_published(folder, _read(folder))
    layers_apart = FAMILIES[published.family].further_apart
    settings = as_in_files(published.settings, folder, ignored, layers_apart=layers_apart)
    settings = with_idle_keys(settings, folder, ignored)
    is_announced = "multi_token" in published.settings
    if not is_announced or holds_further(published.settings, folder, layers_apart=layers_apart):
        return replace(published, settings=settings)
    remark = f"{folder}: its files lack the layers that predict further tokens"
    return replace(published, settings=settings, remarks=(*published.remarks, remark))


def as_published(folder: Path, values: dict[str, Any]) -> Published:
    """Returns what `read_published` returns, from the values of a config.json."""
    where = str(folder / NAME)
    remarks = []
    name = values.get("model_type")
    has_part = isinstance(values.get("text_config"), dict)
    if isinstance(name, str) and name in OF_VISION and has_part:
        values = _text_part(values)
        name = values["model_type"]
        remarks.append(f"{folder}: only its text part is read, without its vision tower")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    packing = packing_of(folder, values, family.packing if family else "")
    if family is None or not isinstance(name, str):
        raise _unknown_family(folder, values)
    if "auto_map" in values:
        remarks.append(f"{folder} contains code, which is not run: it is read as {name}")
    keys = Keys(
        _with_rope(family.as_usual(values), family), family.defaults, where, unread_by_class(name)
    )
    keys.pass_over("quantization_config")  # read with the weights
    keys.check_numbers()
    settings = _read_gpt2(family, keys) if family.is_gpt2 else _read_llama(name, keys)
    keys.check_all_taken()
    if experts := settings.get("experts"):
        experts.setdefault("normalise", True)  # meant, also of the only expert of a token
    if indexer := settings.get("indexer"):
        remarks.append(
            f"{folder}: attention is dense up to {indexer['kept']:,} tokens, which is all that is "
            "read; the indexers are kept as they are, and not trained"
        )
    _check_count(where, settings)
    return Published(folder, name, values, settings, _dtype(keys), tuple(remarks), packing)


def _dtype(keys: Keys) -> str | None:
    """Returns the dtype that a file names; None if it is none that weights of a run have.

    Raises ConfigError if torch has no such dtype.
    """
    name = "dtype" if "dtype" in keys else "torch_dtype"
    value = keys.values.get(name)
    if value is None:
        return None
    dtype = value.removeprefix("torch.") if isinstance(value, str) else ""
    if dtype not in DTYPES and not OTHER_DTYPES.fullmatch(dtype):
        raise keys.refused(name, value, f"{', '.join(DTYPES)} or another dtype of torch")
    return dtype if dtype in DTYPES else None


def _with_rope(values: dict[str, Any], family: Family) -> dict[str, Any]:
    """Returns the keys with the rotary positions of the family's class, if the file says nothing
    of them.
    """
    tables = (values.get("rope_scaling"), values.get("rope_parameters"))
    if not family.default_rope or any(table is not None for table in tables):
        return values
    return values | {"rope_parameters": dict(family.default_rope)}


def _read(folder: Path) -> dict[str, Any]:
    path = folder / NAME
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError("it is larger than 16 MiB")
        document = json.loads(path.read_bytes())
    except OSError as error:
        if (folder / ADAPTER).is_file():
            raise ConfigError(
                f"{folder} is an adapter of peft, without the model that it belongs to",
                fix="the folder that peft's merge_and_unload().save_pretrained(FOLDER) writes",
            ) from None
        raise ConfigError(
            f"{folder} is not a Hugging Face directory: {NAME}: {error.strerror}",
            fix=f"the folder that holds {NAME} and *.safetensors",
        ) from None
    except (ValueError, RecursionError) as error:
        cause = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path} is not JSON: {cause}", fix=AGAIN) from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a table", found=f"{document!r:.40}", fix=AGAIN)
    return document


def _check_count(where: str, settings: ModelSettings) -> None:
    """Refuses a model with more experts, over all layers, than can be listed one by one."""
    experts = settings.get("experts") or {"count": 0}
    count = settings["layers"] * experts["count"]
    if count > MOST_EXPERTS:
        raise ConfigError(
            f"{where}: {settings['layers']} layers of {experts['count']} experts are too many",
            asked=f"{count:,} experts",
            found=f"at most {MOST_EXPERTS:,} are read",
            fix="the config.json that the weights were published with",
        )


def _text_part(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of the text part of a model with a vision tower."""
    outer = ("torch_dtype", "dtype", "eos_token_id", "bos_token_id", "pad_token_id")
    inherited = {name: values[name] for name in outer if name in values}
    text, whole = values["text_config"], values["model_type"]
    if whole in TIED_OUTSIDE:
        text = text | {TIES: values.get(TIES, True)}
    if "quantization_config" in values:
        inherited["quantization_config"] = values["quantization_config"]
    family = text.get("model_type")
    is_known = isinstance(family, str) and family in FAMILIES
    return inherited | text | {"model_type": family if is_known else OF_VISION[whole]}


def _unknown_family(folder: Path, values: Mapping[str, Any]) -> ConfigError:
    name = values.get("model_type")
    part = ""
    kinds, kind = values.get("layer_types"), "linear_attention"
    if isinstance(kinds, list) and kind in kinds:
        part = f"{kind} in layer_types"
    elif values.get("vision_config"):
        part = "a vision tower"
    elif values.get("text_config"):
        part = "a text part"
    what = f"{folder}: model_type {name!r:.80} is not supported"
    if "config" in values and "origin" in values:
        raise ConfigError(
            f"{folder} is a run already, and no published model",
            fix=f"train.init_from={folder} in training, or spmdtrain export {folder} DIR --to hf",
        )
    if name is None:
        what = f"{folder / NAME} names no model_type"
    return ConfigError(what, found=part, fix=f"one of {KNOWN}")


def _read_gpt2(family: Family, keys: Keys) -> ModelSettings:
    embed = keys.count("n_embd")
    return {
        "name": "gpt",
        "layers": keys.count("n_layer"),
        "embed": embed,
        "heads": keys.count("n_head"),
        "ffn": keys.some("n_inner") or 4 * embed,
        "vocab": keys.count("vocab_size"),
        "max_length": keys.count("n_positions"),
        "mlp": _activation(keys, family.activation, PLAIN),
        "norm_epsilon": float(keys.positive("layer_norm_epsilon") or 0),
        "tied": keys.flag("tie_word_embeddings"),
    } | family.read(keys)


def _read_llama(name: str, keys: Keys) -> ModelSettings:
    """Returns the settings of a model whose keys have Llama's names: of any family but GPT-2."""
    family = FAMILIES[name]
    heads = keys.count("num_attention_heads")
    embed = keys.count("hidden_size")
    settings = {
        "name": "llama",
        "layers": keys.count("num_hidden_layers"),
        "embed": embed,
        "heads": heads,
        "kv_heads": keys.some("num_key_value_heads") or heads,
        "head_dim": keys.some("head_dim") or embed // heads,
        "ffn": keys.count("intermediate_size"),
        "vocab": keys.count("vocab_size"),
        "max_length": keys.count(family.longest),
        "mlp": _activation(keys, family.activation, family.activations),
        "norm_epsilon": float(keys.positive(family.epsilon) or 0),
        "tied": keys.flag("tie_word_embeddings"),
    }
    settings |= read_rope(keys, name, family) | dict(family.settings) | family.read(keys)
    if "windows" not in settings:
        settings.pop("rope_theta_window", None)
        kinds = keys.values.get("layer_types") or []
        if isinstance(kinds, list) and all(kind == FULL for kind in kinds):
            keys.take("layer_types")  # as every family may have it
    return {name: value for name, value in settings.items() if value is not None}


def _activation(keys: Keys, name: str, known: Mapping[str, str]) -> str:
    value = keys.take(name, next(iter(known)))
    if not isinstance(value, str) or value not in known:
        raise keys.unknown(name, value)
    return known[value]


def refuse_untied(folder: Path) -> None:
    """Raises ConfigError if a model already has a separate head."""
    if not read_published(folder).settings["tied"]:
        raise ConfigError(
            f"--untie: {folder} already has a separate head", fix="the command without --untie"
        )
