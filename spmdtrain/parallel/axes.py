"""Maps logical axes to mesh axes: two tables of sharding rules, and the one function that reads
them. Also narrows a spec to some mesh axes.

A *mesh axis* is a dimension of the device grid (`data`, `tensor`, ...). A *logical axis* is a model
author's name for a dim of a tensor (`"embed"`, `"ffn"`, ...). The parameter rules say how weights
are sharded at rest, the activation rules how activations are sharded. A typo, a mesh axis that
would split two dims of a tensor, and a dim that does not divide are errors: nothing is silently
replicated.
"""

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RulesConfig
from spmdtrain.parallel.mesh import AXES

# Logical axis -> the mesh axes that split it, major axis first; () keeps it whole.
AxisRules = Mapping[str, tuple[str, ...]]

PARAMETER_RULES: AxisRules = {
    "chunk": (),
    "stage": ("pipeline",),
    "layer": (),
    "experts": ("expert",),
    "vocab": ("pipeline", "tensor"),
    "embed": ("fsdp",),
    "latent": ("fsdp",),
    "kv_heads": ("tensor",),
    "heads": ("tensor",),
    "head_dim": (),
    "channels": ("tensor",),
    "ffn": ("tensor",),
    "position": (),
    "norm": (),
    "rank": (),
}
# `time` is the token dim in attention and the mlp, `stream_time` that of the residual stream and
# the norms. Sequence parallelism (arXiv:2205.05198) splits the stream over `tensor` too:
# rules.activations.stream_time = "context,tensor".
ACTIVATION_RULES: AxisRules = {
    "batch": ("data", "fsdp", "expert"),
    "time": ("context",),
    "stream_time": ("context",),
    "embed": (),
    "kv_heads": ("tensor",),
    "heads": ("tensor",),
    "head_dim": (),
    "channels": ("tensor",),
    "ffn": ("tensor",),
    "vocab": ("tensor",),
}

# The mesh axis that owns its part of a weight with this logical axis. Each device along it works
# with its own stages, rows or experts: it never gathers the others, nor sums their gradients with
# its own. Any other axis that splits a weight does so only to save memory.
OWNING = {"stage": "pipeline", "vocab": "pipeline", "experts": "expert"}
# Tokens travel to experts, so a rule may give them such axes to own as well.
OWNED_BY_RULE = {"experts": ("context", "tensor")}

# Leading dims of stacked layers. An optimizer sees the tensor of one layer, without them.
STACK_AXES = ("chunk", "stage", "layer")
BATCH_AXES = ACTIVATION_RULES["batch"]
STREAM = ("batch", "stream_time", "embed")  # the dims of the residual stream

# The setting that determines how many tokens there are, for messages.
OF_TOKENS = {"time": "train.sequence_length", "stream_time": "train.sequence_length"}


class IndivisibleError(ConfigError):
    """The dim number `dim` of the tensor `at`, `size` long, does not divide into `ways` parts.

    Which setting makes it `size` long is not known here: see train/fitting_sizes.py. `whole` is the
    remedy that always helps.
    """

    def __init__(self, what: str, *, kind: str, at: str, axis: str, dim: int, size: int, ways: int):
        self.at, self.axis, self.dim, self.size, self.ways = at, axis, dim, size, ways
        self.whole = f"--set rules.{kind}.{axis}= to keep it whole"
        larger = -(-size // ways) * ways
        typed = f" (--set {OF_TOKENS[axis]}={larger})" if axis in OF_TOKENS else ""
        super().__init__(what, fix=f"{axis} = {larger}{typed}, or {self.whole}")


def batch_shards(sizes: Mapping[str, int]) -> int:
    """Returns the number of parts into which a mesh of these sizes splits the batch."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def owning_axes(names: Iterable[str | None]) -> frozenset[str]:
    """Returns the mesh axes that own their part of a weight with these logical axes."""
    return frozenset(OWNING[name] for name in names if name in OWNING)


@dataclass(frozen=True)
class Rules:
    """The two tables of rules with the user's overrides, and the sizes of the mesh axes."""

    parameters: AxisRules
    activations: AxisRules
    sizes: Mapping[str, int]

    @property
    def axes_of_experts(self) -> tuple[str, ...]:
        """The mesh axes that own their part of the experts, major first."""
        return _owned(self.parameters, "experts")

    def parameter_spec(
        self, names: Sequence[str | None], shape: Sequence[int], at: str, drop: Sequence[str] = ()
    ) -> P:
        """Returns the spec of the weight at path `at`, from its logical axes and its shape.

        `drop` are mesh axes to leave out because the weight has been gathered over them.
        """
        return partition_spec(
            self.parameters, "parameters", names, shape, self.sizes, at=at, drop=drop
        )

    def parameter_axes(self, names: Sequence[str | None]) -> P:
        """Returns the spec of a weight with these logical axes, from the names alone.

        This is for a device's own part of a weight, whose dims say nothing about divisibility.
        """
        return self.parameter_spec(names, [0] * len(names), "weight")

    def activation_spec(
        self, names: Sequence[str | None], shape: Sequence[int], drop: Sequence[str] = ()
    ) -> P:
        """Returns the spec of an activation, from its logical axes and its shape.

        `drop` are mesh axes to leave out because the surrounding region is manual over them.
        """
        at = f"activation ({', '.join(map(str, names))})"
        return partition_spec(
            self.activations, "activations", names, shape, self.sizes, at=at, drop=drop
        )


def make_rules(overrides: RulesConfig, sizes: Mapping[str, int]) -> Rules:
    """Returns the default rules with the config's `[rules]` on top. `sizes`: of all mesh axes.

    Raises ConfigError for an unknown mesh axis, and for one that the training step itself manages:
    pipeline and data, and every axis of the batch if the rule is for activations or for a dim that
    stacks layers.
    `check_names` refuses misspelt logical axes once the model is known.
    """
    if "batch" in overrides.activations:
        split = " x ".join(BATCH_AXES)
        raise ConfigError(f"rules.activations.batch: the batch is always split over {split}")
    if "stage" in overrides.parameters:
        raise ConfigError("rules.parameters.stage: stages are always split over pipeline")
    _check_overrides("parameters", overrides.parameters)
    _check_overrides("activations", overrides.activations)
    return Rules(
        parameters={**PARAMETER_RULES, **overrides.parameters},
        activations={**ACTIVATION_RULES, **overrides.activations},
        sizes=dict(sizes),
    )


def _check_overrides(kind: str, overrides: AxisRules) -> None:
    for name, mesh_axes in overrides.items():
        setting = f"rules.{kind}.{name}"
        for axis in mesh_axes:
            if axis not in AXES:
                what = f"{setting}: no mesh axis {axis!r}{_did_you_mean(axis, AXES)}"
                raise ConfigError(what, found=", ".join(AXES))
            if axis in ("pipeline", "data"):
                what = f"{setting}: mesh axis {axis!r} is split by the training step itself"
                raise ConfigError(what)
            if kind == "parameters" and name in STACK_AXES and axis in BATCH_AXES:
                what = f"{setting}: each layer gathers its own weights over {axis!r}"
                raise ConfigError(f"{what}, which cannot split layers", fix=f"--set {setting}=")
            if kind == "activations" and axis in BATCH_AXES:
                what = f"{setting}: logical axes 'batch' and {name!r} both use mesh axis {axis!r}"
                raise ConfigError(what, fix=f"--set {setting}=")


def check_names(
    overrides: RulesConfig, names: Collection[str], flowing: Callable[[], Collection[str]]
) -> None:
    """Refuses rules that apply to nothing.

    `names` are the logical axes of a model's parameters, `flowing()` finds those of its
    activations. Raises ConfigError for a rule whose name is neither one of them nor in the default
    rules; for activations, only if the name also resembles a known one.
    """
    for name in overrides.parameters:
        if name not in names and name not in PARAMETER_RULES:
            near = _did_you_mean(name, sorted(names))
            raise ConfigError(
                f"rules.parameters.{name}: no parameter has a logical axis {name!r}{near}",
                found=", ".join(sorted(names)),
            )
    for name in overrides.activations:
        if name in names or name in ACTIVATION_RULES:
            continue
        near = _did_you_mean(name, ACTIVATION_RULES, 0.8)
        if near and name not in flowing():
            what = f"no activation has a logical axis {name!r}{near}"
            raise ConfigError(f"rules.activations.{name}: {what}")


def partition_spec(
    rules: AxisRules,
    kind: str,
    names: Sequence[str | None],
    shape: Sequence[int],
    sizes: Mapping[str, int],
    *,
    at: str,
    drop: Sequence[str] = (),
) -> P:
    """Looks up the spec of a tensor.

    `("batch", "time", "embed")` becomes `P(("data", "fsdp"), "context", None)`.

    A name of None keeps its dim whole. Mesh axes of size 1, and those in `drop`, are left out. A
    mesh axis that one dim owns splits that dim only, so `embed = fsdp,expert` splits a matrix of
    experts over fsdp, and any other matrix over both.
    For messages, `at` names the tensor and `kind` the rules ("parameters" or "activations").

    Raises ConfigError for a name without a rule, for a mesh axis that would split two dims, and for
    a dim that does not divide.
    """
    if len(names) != len(shape):
        axes = f"{len(names)} logical axes {tuple(names)}"
        raise ConfigError(f"{at}: {axes} for {len(shape)} dims {tuple(shape)}")
    name_of_axis: dict[str, str] = {}
    owning = [name for name in names if name in OWNING]
    owner = {OWNING[name]: name for name in owning}
    owner |= {axis: name for name in owning for axis in _owned(rules, name)}
    spec = []
    for name, size in zip(names, shape, strict=True):
        if name is None:
            spec.append(None)
            continue
        if name not in rules:
            raise ConfigError(
                f"{at}: no rule for logical axis {name!r}{_did_you_mean(name, rules)}",
                fix=f"--set rules.{kind}.{name}= (whole) or a mesh axis",
            )
        allowed = [axis for axis in rules[name] if owner.get(axis, name) == name]
        mesh_axes = [axis for axis in allowed if sizes[axis] > 1 and axis not in drop]
        for axis in mesh_axes:
            if axis in name_of_axis:
                both = f"{name_of_axis[axis]!r} and {name!r}"
                raise ConfigError(
                    f"{at}: logical axes {both} both use mesh axis {axis!r}",
                    fix=f"--set rules.{kind}.{name}=",
                )
            name_of_axis[axis] = name
        ways = math.prod(sizes[axis] for axis in mesh_axes)
        if size % ways:
            what = f"{at}: {name}={size} is not divisible by {' x '.join(mesh_axes)} = {ways}"
            raise IndivisibleError(
                what, kind=kind, at=at, axis=name, dim=len(spec), size=size, ways=ways
            )
        if len(mesh_axes) > 1:
            spec.append(tuple(mesh_axes))
        else:
            spec.append(mesh_axes[0] if mesh_axes else None)
    return P(*spec)


def keep_axes(axes: Collection[str], spec: P) -> P:
    """Returns `spec` with only the mesh axes in `axes`.

    A manual region names its manual axes in the specs of its arguments, and the others inside.
    """
    return P(*(_filter_axes(part, lambda axis: axis in axes) for part in spec))


def drop_axes(axes: Collection[str], spec: P) -> P:
    """Returns `spec` without the mesh axes in `axes`."""
    return P(*(_filter_axes(part, lambda axis: axis not in axes) for part in spec))


def axes_of_dim(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes that split one dim of a spec, major axis first."""
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def _owned(rules: AxisRules, name: str) -> tuple[str, ...]:
    """Returns the mesh axes that own their part of a dim with the logical axis `name`."""
    by_rule = OWNED_BY_RULE.get(name, ())
    axes = [axis for axis in rules.get(name, ()) if axis == OWNING[name] or axis in by_rule]
    return tuple(axes)


def _did_you_mean(word: str, known: Collection[str], alike: float = 0.6) -> str:
    near = difflib.get_close_matches(word, list(known), 1, alike)
    return f"; did you mean {near[0]!r}?" if near else ""


def _filter_axes(
    part: str | tuple[str, ...] | None, keep: Callable[[str], bool]
) -> str | tuple[str, ...] | None:
    names = tuple(axis for axis in axes_of_dim(part) if keep(axis))
    if len(names) > 1:
        return names
    return names[0] if names else None
