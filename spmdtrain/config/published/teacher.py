"""The settings of the teacher of [distill] on the mesh of a run."""

import os
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.load import from_resolved
from spmdtrain.config.published.model_from import is_run
from spmdtrain.config.published.read_config import NAME, read_published
from spmdtrain.config.run_files import RunFiles, given_in
from spmdtrain.config.schema import RunConfig, TransformerConfig

# Sections of a run that its teacher shares: where it computes, and in which dtypes.
SHARED = ("mesh", "precision", "kernels", "rules")


def teacher_settings(config: RunConfig) -> RunConfig | None:
    """Returns the settings of a run of the teacher on the mesh of `config`; None without one.

    It reads the `config.json` of `distill.teacher` and no weights. Raises ConfigError if there is
    none, if the teacher is custom code or has adapters, or if it has another vocabulary or shorter
    sequences than the run. `config` has its vocabulary resolved.
    """
    teacher = config.distill.teacher
    if teacher is None:
        return None
    folder = Path(os.path.expanduser(teacher))
    setting = f"distill.teacher={teacher!r}"
    model = _of_run(folder, setting) if is_run(folder) else read_published(folder).settings
    _check(setting, folder, model, config)
    placement = {name: getattr(config.model, name) for name in TransformerConfig.of_placement}
    model = model | placement | {"dropout": 0.0}
    shared = {name: getattr(config, name).as_given() for name in SHARED}
    train = config.train.model_dump(include={"sequence_length", "global_batch", "microbatch"})
    return from_resolved({"config": shared | {"model": model, "train": train}, "origin": {}})


def _of_run(folder: Path, setting: str) -> dict[str, Any]:
    """Returns the settings of [model] of a run, with the length that its positions have."""
    saved = RunFiles(folder).config
    kind = saved["config"].get("finetune", {}).get("kind", "full")
    if kind != "full":
        raise ConfigError(
            f"{setting} has adapters",
            found=f"finetune.kind={kind!r} there",
            fix=f"spmdtrain export {folder} DIR --to hf, and DIR as the teacher",
        )
    model = given_in(saved)["model"]
    if own := model.pop("make", None):
        raise ConfigError(
            f"{setting} uses {own}, which is custom code", fix="a run of a model of ours"
        )
    return model | {"max_length": saved["config"]["model"]["max_length"]}


def _check(setting: str, folder: Path, model: dict[str, Any], config: RunConfig) -> None:
    if model["vocab"] != config.vocab:
        raise ConfigError(
            f"{setting} has another vocabulary",
            asked=f"model.vocab={config.vocab}",
            found=f"model.vocab={model['vocab']} in {folder / NAME}",
            fix="a teacher with the tokenizer of the run",
        )
    length = config.train.sequence_length
    if model["max_length"] < length:
        raise ConfigError(
            f"{setting} reads {model['max_length']} tokens at most",
            asked=f"train.sequence_length={length}",
            fix=f"--set train.sequence_length={model['max_length']}",
        )
