"""Reads and writes what says how many blocks after the last layer predict further tokens.

Most families announce them by a key of config.json. Qwen's lie apart from the layers, and not all
of its files that have them announce them, so there the tensors decide.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.published.families.family import ModelSettings
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.tensor_names import names_in
from spmdtrain.config.schema import TransformerConfig

OF_QWEN = "mtp_num_hidden_layers"
OWN_TABLES = "mtp_use_dedicated_embeddings"
APART = re.compile(r"mtp\.layers\.(\d+)\..*")


def read_further(keys: Keys) -> ModelSettings:
    """Returns the settings of the layers after the last, which are kept as they are."""
    further = keys.whole("num_nextn_predict_layers")
    return {"multi_token": {"depth": further, "frozen": True} if further else None}


def write_further(model: TransformerConfig) -> dict[str, Any]:
    """Returns the key that `read_further` reads."""
    return {"num_nextn_predict_layers": model.multi_token.depth if model.multi_token else 0}


def read_apart(keys: Keys) -> ModelSettings:
    """Returns the settings of Qwen's block: it reads the stream after the norm of the head."""
    keys.agrees(OWN_TABLES, False)
    depth = keys.whole(OF_QWEN)
    if depth and depth > 1:  # several would share one matrix that joins stream and token
        raise keys.unknown(OF_QWEN, depth)
    return {"multi_token": _apart(depth) if depth else None}


def write_apart(model: TransformerConfig) -> dict[str, Any]:
    """Returns the key that `read_apart` reads; none without such a block."""
    return {OF_QWEN: model.multi_token.depth} if model.multi_token else {}


def _apart(depth: int) -> dict[str, Any]:
    return {"depth": depth, "after_norm": True, "frozen": True}


def as_in_files(
    settings: ModelSettings, folder: Path, ignored: Collection[str], *, lie_apart: bool
) -> ModelSettings:
    """Returns the settings with these blocks if the files of `folder` have them, but for tensors
    of the patterns `ignored`.

    transformers saves every model whose class has the key without them. `lie_apart`: in files of
    this family their tensors are those of `mtp.`.
    """
    names = names_in(folder, ignored)
    if not names:
        return settings
    without = {name: value for name, value in settings.items() if name != "multi_token"}
    if lie_apart:
        numbers = sorted(int(match[1]) for match in map(APART.fullmatch, names) if match)
        if numbers and numbers[-1]:
            what = f"{folder} holds mtp.layers.{numbers[-1]}, a second block of {OF_QWEN}"
            raise ConfigError(what, fix="--ignore 'mtp.*', which leaves all of them out")
        return without | ({"multi_token": _apart(1)} if numbers else {})
    first = f".layers.{settings['layers']}."
    return settings if any(first in name for name in names) else without
