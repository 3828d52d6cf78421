"""Writes and checks `adapter_config.json`, which tells peft where adapters belong."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.config.named_file import AGAIN
from spmdtrain.config.schema import FinetuneConfig, RunConfig

CONFIG = "adapter_config.json"
# The names of matrices that transformers 5 stacks over experts.
MLP_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
# Kernels of Mamba multiply by the weight of this layer past its adapter, so peft 0.21 refuses one
# in these families. It lets Granite 4 have it.
PAST_ADAPTERS = "out_proj"
OF_MAMBA = ("nemotron_h", "falcon_h1")
# Models that transformers 5.24 loads with their vision tower: AutoModelForCausalLM, and of mistral3
# the only class that it has. Their text part lies inside.
WITH_TOWER = ("gemma3", "gemma4", "gemma4_unified", "mistral3")
TEXT_PART = ("model.", "model.language_model.")  # a spelling: of names without a tower, with one


def config_of(
    config: RunConfig,
    family: str,
    base: str | None,
    targets: Mapping[str, int],
    whole: Sequence[str],
    *,
    has_tower: bool = False,
) -> dict[str, Any]:
    """Returns adapter_config.json: the keys that every version of peft reads.

    `has_tower`: the base is one of `WITH_TOWER`, whose tower has layers of the same names: the
    modules are a pattern that only those of the text part match.

    With transformers 5, peft 0.21 takes a module `gate_proj` of a model with experts for a part of
    their stacked weights. It adapts such a layer as a parameter. Raises ConfigError for adapters
    that peft refuses.
    """
    finetune = config.finetune
    _refuse_past_adapters(family, targets)
    renamed = MLP_OF_EXPERTS if config.model.experts else ()
    parameters = [name for name in targets if name.rpartition(".")[2] in renamed]
    if parameters and finetune.kind == "dora":
        raise ConfigError(
            f"peft has no DoRA for {parameters[0]} in a model with experts",
            fix="--to hf, which merges adapters, or finetune.targets without gate, up and down",
        )
    modules = sorted(targets.keys() - parameters)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": finetune.rank,
        "lora_alpha": finetune.alpha,
        "lora_dropout": 0.0 if parameters else finetune.dropout,  # of parameters peft has none
        "target_modules": _in_text_part(modules) if has_tower else modules,
        "target_parameters": sorted(f"{name}.weight" for name in parameters) or None,
        "bias": "none",
        "fan_in_fan_out": family == "gpt2",
        "use_rslora": finetune.rank_stabilised,
        "use_dora": finetune.kind == "dora",
        "modules_to_save": [name.rpartition(".")[0] for name in whole] or None,
        **_patterns(finetune, targets),
        "layers_to_transform": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _in_text_part(modules: Sequence[str]) -> str:
    names = "|".join(map(re.escape, modules))
    return rf"(.*\.)?language_model\.(.*\.)?({names})"


def _refuse_past_adapters(family: str, targets: Mapping[str, int]) -> None:
    names = [name for name in targets if name.rpartition(".")[2] == PAST_ADAPTERS]
    if names and family in OF_MAMBA:
        raise ConfigError(
            f"peft refuses adapters of {names[0]} in models of {family}",
            fix="--to hf, which merges adapters, or finetune.targets without out",
        )


def _patterns(finetune: FinetuneConfig, targets: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Returns the ranks and alphas of the layers that hold several parts."""
    several = {name: count for name, count in targets.items() if count > 1}
    root = 0.5 if finetune.rank_stabilised else 1.0
    return {
        "rank_pattern": {name: count * finetune.rank for name, count in several.items()},
        # The scale alpha / rank, or alpha / sqrt(rank), must not change.
        "alpha_pattern": {name: count**root * finetune.alpha for name, count in several.items()},
    }


def read_config(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads((folder / CONFIG).read_bytes())
        if not isinstance(document, dict):
            raise ValueError("it is not a table")
    except OSError as error:
        what = f"{folder} is not a peft adapter: {CONFIG}: {error.strerror}"
        raise CheckpointError(what, fix="the folder that holds it") from None
    except ValueError as error:
        what = f"{folder / CONFIG} is damaged: {error}"
        raise CheckpointError(what, fix=AGAIN) from None
    return document


def check_config(
    folder: Path,
    document: Mapping[str, Any],
    finetune: FinetuneConfig,
    targets: Mapping[str, int],
) -> None:
    """Refuses an adapter that computes something other than [finetune] says.

    Layers that hold several parts have a rank for each, or one that the parts share.
    """
    patterns = _patterns(finetune, targets)
    if not any(document.get(key) for key in patterns):
        patterns = dict.fromkeys(patterns, {})
    # key -> (the value expected, peft's default)
    expected: dict[str, tuple[Any, Any]] = {
        "peft_type": ("LORA", None),
        "r": (finetune.rank, 8),
        "lora_alpha": (finetune.alpha, 8),
        "use_rslora": (finetune.rank_stabilised, False),
        "use_dora": (finetune.kind == "dora", False),
        "bias": ("none", "none"),
        **{key: (pattern, {}) for key, pattern in patterns.items()},
    }
    settings = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rank_stabilised"}
    for key, (wanted, default) in expected.items():
        value = document.get(key) or default
        if value != wanted:
            name = settings.get(key)
            raise CheckpointError(
                f"{folder / CONFIG}: {key}={json.dumps(value)}",
                asked=json.dumps(wanted),
                fix=f"--set finetune.{name}={json.dumps(value)}" if name else "another adapter",
            )
