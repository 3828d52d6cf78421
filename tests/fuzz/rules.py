"""Axis tables at random: which mesh axes split which dims, in any order, so that every tensor
still divides.
"""

import math
import random
from collections.abc import Mapping, Sequence

from spmdtrain.config.schema import RunConfig
from spmdtrain.parallel.axes import ACTIVATION_RULES, PARAMETER_RULES

from fuzz.settings import Values

TRIES = 40
NEVER = ("pipeline", "data")  # split by the training step itself: refused in a rule
Table = dict[str, tuple[str, ...]]

# Logical axes that stand on one tensor: none of them may want another one's mesh axis.
PARAMETERS = (
    ("embed", "kv_heads", "head_dim"),
    ("embed", "ffn"),
    ("vocab", "embed"),
    ("position", "embed"),
    ("norm",),
)
ACTIVATIONS = (
    ("batch", "time", "embed"),
    ("batch", "time", "kv_heads", "head_dim"),
    ("batch", "time", "ffn"),
    ("batch", "time", "vocab"),
)


def draw_rules(
    random: random.Random, config: RunConfig, mesh: Mapping[str, int], unchecked: bool
) -> Values:
    """`rules.*` settings for a mesh. Names that do not divide by default are kept whole first
    of all.
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
    """Dims by logical axis; 0 where nobody knows yet (the tokenizer's vocabulary)."""
    model = config.model
    return {
        "batch": config.train.global_batch,
        "time": config.train.sequence_length,
        "embed": model.embed,
        "kv_heads": model.key_value_heads,
        "heads": model.heads,
        "head_dim": model.width_per_head,
        "ffn": model.hidden,
        "vocab": model.vocab or 0,
        "position": config.max_length,
        "norm": model.embed,
        "layer": 0,
        "chunk": 0,
        "stage": 0,
    }


def _one_table(
    random: random.Random,
    base: Mapping[str, tuple[str, ...]],
    tensors: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    unchecked: bool,
) -> Table:
    """Overrides of one table."""
    whole = {name: () for name in base if not divides(sizes[name], base[name], mesh)}
    whole.pop("batch", None)
    if random.random() < 0.4:
        return whole
    for _ in range(TRIES):
        table = whole | _overrides(random, base, mesh)
        if unchecked or legal({**base, **table}, tensors, sizes, mesh):
            return table
    return whole


def _overrides(random: random.Random, base: Mapping, mesh: Mapping[str, int]) -> Table:
    table: Table = {}
    for name in base:
        if name != "batch" and name not in ("chunk", "stage", "layer") and random.random() < 0.3:
            table[name] = _axes(random, mesh)
    if random.random() < 0.03:
        table["layer"] = _axes(random, mesh)
    if random.random() < 0.02 and "stage" in base:
        table["stage"] = ()
    return {name: axes for name, axes in table.items() if name in base}


def _axes(random: random.Random, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Up to three mesh axes in any order, mostly such as split something."""
    real = [axis for axis in mesh if axis not in NEVER and mesh[axis] > 1]
    any_axis = [axis for axis in mesh if axis not in NEVER]
    among = any_axis if random.random() < 0.1 else real
    return tuple(random.sample(among, min(random.choice((0, 1, 1, 2, 2, 3)), len(among))))


def legal(
    table: Mapping[str, Sequence[str]],
    tensors: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
) -> bool:
    """No tensor is split twice over a mesh axis, and every dim divides."""
    for tensor in tensors:
        used = [axis for name in tensor for axis in table[name] if mesh[axis] > 1]
        if len(used) != len(set(used)):
            return False
    return all(divides(sizes[name], axes, mesh) for name, axes in table.items())


def divides(size: int, axes: Sequence[str], mesh: Mapping[str, int]) -> bool:
    return size % math.prod(mesh[axis] for axis in axes) == 0
