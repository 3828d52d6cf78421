"""Reads the keys of experts that several families share."""

from typing import Any

from spmdtrain.config.published.keys import Keys


def read_experts(keys: Keys, count: str) -> dict[str, Any]:
    """Returns how many experts a layer has, by the key `count`, and how many a token goes to."""
    return {"count": keys.count(count), "chosen": keys.count("num_experts_per_tok")}
