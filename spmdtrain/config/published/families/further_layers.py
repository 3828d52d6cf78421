"""Reads and writes what says how many blocks after the last layer predict further tokens.

Most families announce them by a key of config.json. Those of Qwen and Nemotron lie apart from the
layers, and not all files that have them announce them, so there the tensors decide.
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
DEPTH = "num_nextn_predict_layers"
APART = re.compile(r"mtp\.layers\.(\d+)\..*")


def read_further(keys: Keys) -> ModelSettings:
    """Returns the settings of the layers after the last, which are kept as they are."""
    further = keys.whole(DEPTH)
    return {"multi_token": {"depth": further, "frozen": True} if further else None}


def write_further(model: TransformerConfig) -> dict[str, Any]:
    """Returns the key that `read_further` reads."""
    return {DEPTH: model.multi_token.depth if model.multi_token else 0}


def read_apart(keys: Keys) -> ModelSettings:
    """Returns the settings of Qwen's block."""
    keys.agrees(OWN_TABLES, False)
    depth = keys.whole(OF_QWEN)
    if depth and depth > 1:  # several would share one matrix that joins stream and token
        raise keys.unknown(OF_QWEN, depth)
    return {"multi_token": apart() if depth else None}


def write_apart(model: TransformerConfig) -> dict[str, Any]:
    """Returns the key that `read_apart` reads; none without such a block."""
    return {OF_QWEN: model.multi_token.depth} if model.multi_token else {}


def apart() -> dict[str, Any]:
    """Returns the settings of a block apart: it reads the stream after the norm of the head."""
    return {"depth": 1, "after_norm": True, "frozen": True}


def as_in_files(
    settings: ModelSettings, folder: Path, ignored: Collection[str], *, layers_apart: int
) -> ModelSettings:
    """Returns the settings with these blocks if the files of `folder` have them, but for tensors
    of the patterns `ignored`.

    transformers saves every model whose class has the key without them. `layers_apart`: in files of
    this family their tensors are those of `mtp.`, and a block is so many `mtp.layers.N`; 0: they
    are not.
    """
    names = names_in(folder, ignored)
    if not names:
        return settings
    blocks = _blocks_among(names, settings, layers_apart)
    without = {name: value for name, value in settings.items() if name != "multi_token"}
    if layers_apart:
        if blocks and blocks[-1] >= layers_apart:
            what = f"{folder} holds mtp.layers.{blocks[-1]}, of a second block"
            raise ConfigError(what, fix="--ignore 'mtp.*', which leaves all of them out")
        return without | ({"multi_token": apart()} if blocks else {})
    return settings if blocks else without


def holds_further(settings: ModelSettings, folder: Path, *, layers_apart: int) -> bool:
    """Returns True if the files of `folder` have such blocks, or cannot be read."""
    names = names_in(folder, ())
    return not names or bool(_blocks_among(names, settings, layers_apart))


def _blocks_among(names: Collection[str], settings: ModelSettings, layers_apart: int) -> list[int]:
    """Returns the numbers of the layers, in order, that tensors of these blocks have."""
    if layers_apart:
        return sorted({int(match[1]) for match in map(APART.fullmatch, names) if match})
    last = settings["layers"]
    return [last] if any(f".layers.{last}." in name for name in names) else []
