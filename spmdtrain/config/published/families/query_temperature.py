"""Reads and writes the temperature of queries, which stands among the keys of rotary positions."""

from typing import Any

from spmdtrain.config.published.families.family import ModelSettings
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.published.rope_keys import ORIGINAL, write_rope
from spmdtrain.config.schema import TransformerConfig

BETA = "llama_4_scaling_beta"
ROPE_KEYS = (BETA, "max_position_embeddings")  # of the table of rotary positions
# The table of a class whose config.json has none, but for its lengths.
USUAL_ROPE = {
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}


def read_temperature(keys: Keys) -> ModelSettings:
    """Returns [model.temperature], whose length is that before yarn's stretching."""
    written = dict(keys.table("rope_scaling") or {}) | dict(keys.table("rope_parameters") or {})
    table = Keys(written, {}, f"{keys.where}: rope")
    weight, length = table.number(BETA), table.some(ORIGINAL)
    if weight is None or length is None:
        name = ORIGINAL if weight is not None else BETA
        raise table.refused(name, None, "a number, as the class of transformers reads it")
    if weight < 0:
        raise table.refused(BETA, weight, "at least 0")
    return {"temperature": {"weight": float(weight), "length": length}} if weight else {}


def write_temperature(model: TransformerConfig) -> dict[str, Any]:
    """Returns the keys of rotary positions with the temperature among them.

    In the form of transformers 5 alone: version 4 has no class of these families, and 5 would take
    the older table instead, without what its class adds to the newer one.
    """
    keys = write_rope(model)
    temperature = model.temperature
    own = {
        BETA: temperature.weight if temperature else 0.0,
        ORIGINAL: temperature.length if temperature else model.max_length,
    }
    return keys | {"rope_scaling": None, "rope_parameters": own | keys["rope_parameters"]}
