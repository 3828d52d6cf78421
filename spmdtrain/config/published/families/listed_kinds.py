"""Reads `layer_types` of families whose layers have different mixers."""

from collections.abc import Collection

from spmdtrain.config.published.keys import Keys


def listed_kinds(keys: Keys, known: Collection[str]) -> list[str] | None:
    """Returns the kind of each layer, one of `known`; None if the file does not list them."""
    kinds = keys.take("layer_types")
    if kinds is None:
        return None
    layers = keys.count("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise keys.refused("layer_types", kinds, f"a list of {layers} kinds")
    for kind in kinds:
        if kind not in known:
            raise keys.unknown("layer_types", kind)
    return kinds
