"""Reads the model settings of an existing run or Hugging Face directory."""

import json
import os
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.published.read_config import NAME, read_published
from spmdtrain.config.run_files import RunFiles, given_in


def settings_of_model(folder: Path) -> tuple[str, dict[str, Any]]:
    """Returns (the file that was read, the settings of [model], including `name`).

    Raises ConfigError if `folder` is neither a run nor a Hugging Face directory, or is a run of a
    custom model.
    """
    folder = Path(os.path.expanduser(folder))
    if not is_run(folder):
        return str(folder / NAME), read_published(folder).settings
    saved = RunFiles(folder).config
    settings = given_in(saved)["model"]
    if own := settings.pop("make", None):
        raise ConfigError(
            f"model.from={str(folder)!r} uses {own}, whose code runs only if you name it",
            fix=f"--set model.make={own}, with its settings, and no model.from",
        )
    return str(folder / NAME), settings


def is_run(folder: Path) -> bool:
    """Returns True for the directory of a run."""
    try:
        document = json.loads((folder / NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "config" in document and "origin" in document
