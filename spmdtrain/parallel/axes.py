"""Logical axes to mesh axes: two tables and the one function that reads them.

A *mesh axis* is a dimension of the device grid (`data`, `tensor`, ...). A *logical axis* is a model author's name for a
tensor dim (`"embed"`, `"ffn"`, ...). The parameter table says where weights rest, the activation table where
activations flow. A typo, a double use and a dim that does not divide are errors, never a silent replica.
"""

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RulesConfig
from spmdtrain.parallel.mesh import AXES

Table = Mapping[str, tuple[str, ...]]

PARAMETER_RULES: Table = {
    "chunk": (),
    "stage": ("pipeline",),
    "layer": (),
    "vocab": ("pipeline", "tensor"),
    "embed": ("fsdp",),
    "kv_heads": ("tensor",),
    "heads": ("tensor",),
    "head_dim": (),
    "ffn": ("tensor",),
    "position": (),
    "norm": (),
}
ACTIVATION_RULES: Table = {
    "batch": ("data", "fsdp", "expert"),
    "time": ("context",),
    "embed": (),
    "kv_heads": ("tensor",),
    "heads": ("tensor",),
    "head_dim": (),
    "ffn": ("tensor",),
    "vocab": ("tensor",),
}
STACK_AXES = ("chunk", "stage", "layer")  # dims of stacked layers: an optimizer sees one layer's tensor, without them
BATCH_AXES = ACTIVATION_RULES["batch"]
SETTINGS = {  # that a dim's size is; those of heads depend on each other
    "vocab": "model.vocab",
    "embed": "model.embed",
    "ffn": "model.ffn",
    "position": "model.max_length",
    "time": "train.sequence_length",
}


@dataclass(frozen=True)
class Rules:
    """Both tables with the user's overrides, bound to the sizes of a mesh's axes."""

    parameters: Table
    activations: Table
    sizes: Mapping[str, int]

    def parameter_spec(self, names: Sequence[str | None], shape: Sequence[int], at: str, drop: Sequence[str] = ()) -> P:
        """Where the weight at path `at` rests. `drop`: mesh axes to leave out (gathered for use)."""
        return partition_spec(self.parameters, "parameters", names, shape, self.sizes, at=at, drop=drop)

    def activation_spec(self, names: Sequence[str | None], shape: Sequence[int], drop: Sequence[str] = ()) -> P:
        at = f"activation ({', '.join(map(str, names))})"
        return partition_spec(self.activations, "activations", names, shape, self.sizes, at=at, drop=drop)


def make_rules(overrides: RulesConfig, sizes: Mapping[str, int]) -> Rules:
    """The default tables with `[rules]` of the config on top; unknown mesh axes and near-misses are refused."""
    if "batch" in overrides.activations:
        raise ConfigError(f"rules.activations.batch: the batch is always split over {' x '.join(BATCH_AXES)}")
    if "stage" in overrides.parameters:
        raise ConfigError("rules.parameters.stage: stages are always split over pipeline")
    for table, base in ((overrides.parameters, PARAMETER_RULES), (overrides.activations, ACTIVATION_RULES)):
        kind = "parameters" if table is overrides.parameters else "activations"
        for name, mesh_axes in table.items():
            for axis in mesh_axes:
                if axis not in AXES:
                    raise ConfigError(
                        f"rules.{kind}.{name}: no mesh axis {axis!r}{_near(axis, AXES)}", found=", ".join(AXES)
                    )
                if axis in ("pipeline", "data"):
                    raise ConfigError(f"rules.{kind}.{name}: mesh axis {axis!r} is split by the training step itself")
            if name not in base and (near := difflib.get_close_matches(name, base, 1, 0.8)):
                raise ConfigError(f"rules.{kind}.{name}: no logical axis {name!r}; did you mean {near[0]!r}?")
    return Rules(
        {**PARAMETER_RULES, **overrides.parameters}, {**ACTIVATION_RULES, **overrides.activations}, dict(sizes)
    )


def check_names(overrides: RulesConfig, names: Collection[str]) -> None:
    """Refuses a rule for weights that no default has and none of `names`, the logical axes of a model's parameters."""
    for name in overrides.parameters:
        if name not in names and name not in PARAMETER_RULES:
            raise ConfigError(
                f"rules.parameters.{name}: no parameter has a logical axis {name!r}{_near(name, sorted(names))}",
                found=", ".join(sorted(names)),
            )


def partition_spec(
    table: Table,
    kind: str,
    names: Sequence[str | None],
    shape: Sequence[int],
    sizes: Mapping[str, int],
    *,
    at: str,
    drop: Sequence[str] = (),
) -> P:
    """`("batch", "time", "embed") -> P(("data", "fsdp"), "context", None)`; mesh axes of size 1 are left out.

    `at` names the tensor in errors; `kind` the table (`parameters` or `activations`).
    """
    if len(names) != len(shape):
        raise ConfigError(f"{at}: {len(names)} logical axes {tuple(names)} for {len(shape)} dims {tuple(shape)}")
    used: dict[str, str] = {}
    spec = []
    for name, size in zip(names, shape, strict=True):
        if name is not None and name not in table:
            raise ConfigError(
                f"{at}: no rule for logical axis {name!r}{_near(name, table)}",
                fix=f"--set rules.{kind}.{name}= (whole) or a mesh axis",
            )
        mesh_axes = [axis for axis in table.get(name, ()) if sizes[axis] > 1 and axis not in drop] if name else []
        for axis in mesh_axes:
            if axis in used:
                raise ConfigError(
                    f"{at}: logical axes {used[axis]!r} and {name!r} both want mesh axis {axis!r}",
                    fix=f"--set rules.{kind}.{name}=",
                )
            used[axis] = name
        ways = math.prod(sizes[axis] for axis in mesh_axes)
        if size % ways:
            larger = -(-size // ways) * ways
            typed = f" (--set {SETTINGS[name]}={larger})" if name in SETTINGS else ""
            raise ConfigError(
                f"{at}: {name}={size} is not divisible by {' x '.join(mesh_axes)} = {ways}",
                fix=f"{name} = {larger}{typed}, or --set rules.{kind}.{name}= to keep it whole",
            )
        spec.append(tuple(mesh_axes) if len(mesh_axes) > 1 else mesh_axes[0] if mesh_axes else None)
    return P(*spec)


def _near(word: str, known: Sequence[str] | Mapping[str, object]) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""
