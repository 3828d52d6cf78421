"""Decides what a run is exported as: its family, its config.json, and the dtype of the files."""

from pathlib import Path
from typing import Any

from spmdtrain.checkpoints.restore import read_document, refuse_own_code
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.load import from_resolved
from spmdtrain.config.published.read_config import read_published
from spmdtrain.config.published.write_config import BY_OUR_NAMES, write_config
from spmdtrain.interop.companion_files import original_folder
from spmdtrain.interop.imported_tensors import imported_tensors
from spmdtrain.interop.target import Target
from spmdtrain.interop.writer import NAMES


def target_of(run: Path, dtype: str | None) -> tuple[Target, dict[str, Any]]:
    """Returns what a run is written as, with its config.json.

    Raises ConfigError if that cannot be written.
    """
    saved, named = read_document(run)
    refuse_own_code(run, saved, named)
    config = from_resolved(saved)
    if config.model.make or saved.get("model_code", {}).get("make"):
        raise ConfigError(f"{run} has a custom model, which belongs to no family", fix=BY_OUR_NAMES)
    model = config.model.model_copy(update={"max_length": config.model.max_length})
    original = original_folder(run)
    base = read_published(original) if original else None
    chosen = dtype or (base and base.dtype) or "bfloat16"
    if chosen not in NAMES:
        raise ConfigError(
            f"--dtype {chosen!r:.40} is no dtype of the files", fix=f"one of {', '.join(NAMES)}"
        )
    begin, end = saved.get("begin_of_text"), saved.get("end_of_text")
    # Null for tokens that do not exist: otherwise transformers would fill in its own ids.
    tokens = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": None}
    family, keys = write_config(model, base, dtype=chosen, tokens=tokens, run=run)
    is_same_family = base is not None and base.family == family
    imported = imported_tensors(original if is_same_family else None)
    return Target(model, family, keys, chosen, config.finetune, imported), saved
