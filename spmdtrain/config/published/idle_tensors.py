"""Finds the keys and values of layers that read those of earlier layers.

Published files of Gemma 4 may hold them, and those that transformers saves do not: it reads over
them. So the tensors decide, and not config.json.
"""

import re
from collections.abc import Collection
from pathlib import Path

from spmdtrain.config.published.families.family import ModelSettings
from spmdtrain.config.published.tensor_names import names_in

OF_KEYS = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm)\..*")


def with_idle_keys(
    settings: ModelSettings, folder: Path, ignored: Collection[str]
) -> ModelSettings:
    """Returns the settings of a model that keeps these tensors, if the files of `folder` have some
    beside those of the patterns `ignored`.
    """
    shared = settings.get("shared_keys")
    if not shared:
        return settings
    sharing = range(settings["layers"] - shared, settings["layers"])
    matches = map(OF_KEYS.fullmatch, names_in(folder, ignored))
    has_idle = any(match and int(match[1]) in sharing for match in matches)
    return settings | ({"idle_keys": True} if has_idle else {})
