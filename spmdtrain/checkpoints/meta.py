"""Makes and checks the meta of a checkpoint: a JSON object with the names of its leaves and the
data position.

It also holds the fingerprint of every leaf and a digest of itself. Nothing here reads a file.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax

FORMAT = 2
# The objects that every meta has: the description of its arrays, and the identity of the run.
PARTS = (
    *("leaves", "unpadded", "layout", "fingerprints"),
    *("stream", "model", "model_code", "settings"),
)
OPTIMIZER = "optimizer."  # prefix of the names of the leaves of "state"
OF_ITEM = " of "  # between item and leaf, as in "ema of w"; parameter names have no spaces
FLOATS = {"float32", "bfloat16"}  # the dtypes that `precision.params` may name
MOST_NAMED = 5  # leaves in one error
Meta = dict[str, Any]


def has_item(meta: Meta, item: str) -> bool:
    """Returns True if a checkpoint with this meta holds arrays of this item, for example "ema"."""
    return bool(of_items(meta["leaves"], [item]))


def prefix(item: str) -> str:
    """Returns the prefix of the names of an item's leaves.

    The item is "params", "state" or an item of the state.
    """
    return {"params": "", "state": OPTIMIZER}.get(item, item + OF_ITEM)


def named_leaves(items: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the leaves of items by their names in the meta."""
    return {
        prefix(item) + leaf_name(path): leaf
        for item, tree in items.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def leaf_name(path: tuple) -> str:
    """Returns the dotted name of a leaf in its tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def describe(arrays: Mapping[str, Any]) -> dict[str, list]:
    """Returns names mapped to [shape, dtype], as JSON stores them."""
    return {name: [list(x.shape), str(x.dtype)] for name, x in arrays.items()}


def unpadded_leaves(meta: Meta) -> dict[str, list]:
    """Returns the names of a checkpoint's leaves mapped to [shape, dtype], without padding."""
    unpadded = meta["unpadded"]  # those that are padded
    return {name: [unpadded.get(name, leaf[0]), leaf[1]] for name, leaf in meta["leaves"].items()}


def of_items(leaves: Mapping[str, list], items: Iterable[str]) -> dict[str, list]:
    """Returns the leaves that belong to these items: "params", "state" or an item of the state."""

    def item_of(name: str) -> str:
        item, of_item, _ = name.partition(OF_ITEM)
        if of_item:
            return item
        return "state" if name.startswith(OPTIMIZER) else "params"

    return {name: leaf for name, leaf in leaves.items() if item_of(name) in items}


def different_leaves(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Returns the names of the leaves that differ, those in `wanted` first."""
    names = [*sorted(wanted), *sorted(saved.keys() - wanted.keys())]
    return [name for name in names if wanted.get(name) != saved.get(name)]


def fits(wanted: list | None, saved: list | None) -> bool:
    """Returns True if a leaf can be read as `wanted`: a float may differ in width."""
    if wanted is None or saved is None:
        return wanted is saved
    narrow = {wanted[1], saved[1]} <= FLOATS
    return wanted[0] == saved[0] and (wanted[1] == saved[1] or narrow)


def others_text(different: list[str]) -> str:
    """Returns text that names all leaves but the first."""
    others = different[1:]
    if not others:
        return ""
    more = ", ..." if len(others) > MOST_NAMED else ""
    return f"; {len(others)} more differ: {', '.join(others[:MOST_NAMED])}{more}"


def leaf_text(leaf: list | None) -> str:
    """Returns dtype and shape, e.g. float32[2, 64]; "nothing" if there is no leaf."""
    return f"{leaf[1]}{leaf[0]}" if leaf else "nothing"


def digest(meta: Meta) -> str:
    """Returns the SHA-256 of everything else in a meta."""
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
