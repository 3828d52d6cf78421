"""Draws tables of rules: which mesh axes split which dims, in any order.

Every tensor still divides, unless `unchecked`.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from spmdtrain.config.schema import RunConfig
from spmdtrain.parallel.axes import ACTIVATION_RULES, PARAMETER_RULES

Values = dict[str, Any]  # dotted name of a setting -> value
NEVER = ("pipeline", "data")  # split by the training step itself: refused in a rule
NEVER_DRAWN = ("batch", "chunk", "stage", "layer")  # refused, or without a size of their own
Table = dict[str, tuple[str, ...]]

# Logical axes that occur on one tensor: no two of them may use the same mesh axis.
PARAMETERS = (
    ("embed", "kv_heads", "head_dim"),
    ("embed", "ffn"),
    ("vocab", "embed"),
    ("position", "embed"),
    ("norm",),
    ("embed", "channels"),
)
ACTIVATIONS = (
    ("batch", "time", "embed"),
    ("batch", "stream_time", "embed"),
    ("batch", "time", "kv_heads", "head_dim"),
    ("batch", "time", "ffn"),
    ("batch", "time", "vocab"),
    ("batch", "time", "channels"),
)


def draw_rules(
    random: random.Random, config: RunConfig, mesh: Mapping[str, int], unchecked: bool
) -> Values:
    """Returns `rules.*` settings for a mesh, at random.

    Dims that the default rules do not divide become whole first. With `unchecked` dims need not
    divide: tests of refusals want that.
    """
    sizes = sizes_of(config)
    drawn: Values = {}
    for kind, base, tensors in (
        ("parameters", PARAMETER_RULES, PARAMETERS),
        ("activations", ACTIVATION_RULES, ACTIVATIONS),
    ):
        table = _one_table(random, base, tensors, sizes, mesh, unchecked)
        drawn |= {f"rules.{kind}.{name}": axes for name, axes in table.items()}
    return drawn


def sizes_of(config: RunConfig) -> dict[str, int]:
    """Returns the size of each logical axis that the model has; 0 if any mesh will do."""
    model = config.model
    return {
        "batch": config.train.global_batch,
        "time": config.train.sequence_length,
        "stream_time": config.train.sequence_length,
        "embed": model.embed,
        "kv_heads": model.kv_heads,
        "heads": model.heads,
        "head_dim": model.head_dim,
        "ffn": model.ffn,
        "vocab": 0,  # padded
        "position": config.model.max_length,
        "norm": model.embed,
        "layer": 0,
        "chunk": 0,
        "stage": 0,
    } | ({"channels": model.embed} if model.conv else {})


def _one_table(
    random: random.Random,
    base: Mapping[str, tuple[str, ...]],
    tensors: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    unchecked: bool,
) -> Table:
    """Returns overrides of one table, of the logical axes that the model has."""
    base = {name: axes for name, axes in base.items() if name in sizes}
    whole = {name: () for name in base if not divides(sizes[name], base[name], mesh)}
    whole.pop("batch", None)
    if unchecked:
        return whole | {name: _axes(random, mesh) for name in base if random.random() < 0.2}
    if random.random() < 0.3:
        return whole
    share = random.choice((0.5, 1.0))  # 1: more free axes than a tensor needs
    drawn = [name for name in base if name not in NEVER_DRAWN and random.random() < share]
    table = {**base, **whole, **dict.fromkeys(drawn, ())}
    for name in random.sample(drawn, len(drawn)):
        limit = random.choice((0, 1, 2, 3, 3))
        for axis in _axes(random, mesh):
            longer = {**table, name: (*table[name], axis)}
            if len(longer[name]) <= limit and legal(longer, tensors, sizes, mesh):
                table = longer
    return {name: table[name] for name in {**whole, **dict.fromkeys(drawn)}}


def _axes(random: random.Random, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes that a rule may name, shuffled; mostly those that split something."""
    named = [axis for axis in mesh if axis not in NEVER]
    if random.random() > 0.1:
        named = [axis for axis in named if mesh[axis] > 1]
    return tuple(random.sample(named, len(named)))


def legal(
    table: Mapping[str, Sequence[str]],
    tensors: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
) -> bool:
    """Returns True if no tensor is split twice over a mesh axis, and every dim divides."""
    for tensor in tensors:
        used = [axis for name in tensor for axis in table.get(name, ()) if mesh[axis] > 1]
        if len(used) != len(set(used)):
            return False
    return all(divides(sizes[name], axes, mesh) for name, axes in table.items() if name in sizes)


def divides(size: int, axes: Sequence[str], mesh: Mapping[str, int]) -> bool:
    """Returns True if the mesh axes divide a dim of this size."""
    return size % math.prod(mesh[axis] for axis in axes) == 0
