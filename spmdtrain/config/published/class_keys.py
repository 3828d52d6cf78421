"""The keys of config.json by which the classes of transformers choose what they compute."""

from collections.abc import Mapping

from spmdtrain.config.published.families.all_families import FAMILIES

READ: Mapping[str, frozenset[str]] = {
    name: frozenset(family.reads) for name, family in FAMILIES.items()
}
CHOOSING = frozenset().union(*READ.values())


def unread_by_class(family: str) -> frozenset[str]:
    """Returns the keys that choose something in other families only."""
    return CHOOSING - READ[family] - frozenset(FAMILIES[family].renamed)
