"""Names the tensors of keys and values in layers that read those of earlier layers.

Published files of Gemma 4 hold them, and those that transformers saves do not; nothing reads them.
"""

import re
from collections.abc import Iterable

from spmdtrain.config.schema import TransformerConfig

OF_KEYS = re.compile(
    r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm)\.(?:weight|bias)"
)


def without_idle(names: Iterable[str], model: TransformerConfig) -> list[str]:
    """Returns the names but for those of tensors that no layer of the model could read."""
    sharing = range(model.layers - model.shared_keys, model.layers)
    return [
        name
        for name in names
        if not ((match := OF_KEYS.fullmatch(name)) and int(match[1]) in sharing)
    ]
