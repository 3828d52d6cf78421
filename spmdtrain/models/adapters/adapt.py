"""Adds adapters to a model while it is built, and decides which of its weights are trained."""

import difflib
import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import FinetuneConfig, RunConfig, TransformerConfig
from spmdtrain.config.schema.finetune import LINEAR
from spmdtrain.models.adapters.adapted import (
    AdaptedWeight,
    Adapter,
    LinearPart,
    parts_of,
)
from spmdtrain.models.adapters.quantised import as_buffers
from spmdtrain.models.projection import FullPrecision, MatmulWeight, matmul_weights
from spmdtrain.parallel.axes import STACK_AXES

# The linear layers of blocks, by their names in published models and in peft.
PUBLISHED = {
    **{f"{name}_proj": (name,) for name in ("q", "k", "v", "gate", "up", "down")},
    **{f"w{number}": (name,) for number, name in zip("132", ("gate", "up", "down"), strict=True)},
    "o_proj": ("out",),
    "out_proj": ("out",),
    "c_attn": ("q", "k", "v"),
    "qkv_proj": ("q", "k", "v"),
    "gate_up_proj": ("gate", "up"),
    "in_proj": ("in",),
    "in_proj_qkv": ("q", "k", "v"),
    "in_proj_qkvz": ("q", "k", "v", "z"),
    "in_proj_z": ("z",),
    "in_proj_ba": ("rate", "decay"),
    "in_proj_b": ("rate",),
    "in_proj_a": ("decay",),
    "all-linear": LINEAR,
}


def adapt(model: nnx.Module, run: RunConfig, key: jax.Array) -> None:
    """Replaces the adapted weights of a model that is being built by weights with adapters.

    At first they change nothing: a ~ U(-1, 1) / sqrt(size of i) and b = 0, as in peft. Each is
    drawn from `key` and its own path, whatever else is adapted. Call `with_magnitudes` afterwards.

    Raises ConfigError if a target names no weight.
    """
    config = run.finetune
    weights = {path: (module, name) for path, module, name in matmul_weights(model)}
    _check_targets(config, weights, run.model)
    for path, (module, name) in weights.items():
        weight = getattr(module, name)
        parts = parts_of(path, weight.shape, run.model)
        site = zlib.crc32(path.encode()) >> 1
        chosen = [
            part for part in parts if part.name in config.targets or _matches(path, config.targets)
        ]
        if not chosen:
            continue
        stacked, cut = _cut(path, weight)
        base: Any = weight
        if config.base != "float":
            base = as_buffers(weight, config.base, stacked, cut - stacked, path)
        adapted = AdaptedWeight(base, parts, config, site)
        for part in chosen:
            own_key = jax.random.fold_in(key, zlib.crc32(f"{path}.{part.name}".encode()))
            setattr(adapted, part.name, _adapter(path, weight, part, config, own_key))
        setattr(module, name, adapted)


def _check_targets(
    config: FinetuneConfig, weights: Mapping[str, Any], model: TransformerConfig
) -> None:
    """Refuses a pattern that matches no weight, and targets that produce no adapter at all."""
    layers = {
        part.name
        for path, (module, name) in weights.items()
        for part in parts_of(path, getattr(module, name).shape, model)
    }
    for target in config.targets:
        if target not in LINEAR and not _matched(weights, target):
            meant = _meant(target, layers, weights)
            targets = [
                name for one in config.targets for name in (meant if one == target else [one])
            ]
            raise ConfigError(
                f"finetune.targets: {target!r} is not a linear layer of a block, and no "
                "matmul weight has such a path",
                found=", ".join(sorted(layers)),
                fix=f"--set finetune.targets={','.join(dict.fromkeys(targets))}",
            )
    if not layers & set(config.targets) and not any(_matched(weights, t) for t in config.targets):
        raise ConfigError(
            f"finetune.targets={','.join(config.targets)}: the model has no such layer",
            found=", ".join(sorted(layers)) or "no weight that only matmuls read",
            fix=f"--set finetune.targets={','.join(sorted(layers)) or '...'}",
        )


def _meant(target: str, layers: Collection[str], weights: Collection[str]) -> list[str]:
    """Returns the linear layers of this model that a name of a published one stands for."""
    named = [name for name in PUBLISHED.get(target, ()) if name in layers]
    ours = sorted(layers)
    return named or difflib.get_close_matches(target, [*ours, *weights], 1, 0.5) or ours


def _matched(paths: Collection[str], pattern: str) -> bool:
    return any(fnmatchcase(path, pattern) for path in paths)


def _matches(path: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _cut(path: str, weight: MatmulWeight) -> tuple[int, int]:
    """Returns (the number of dims that count layers, the dim at which o begins)."""
    axes = tuple(weight.out_sharding)
    stacked = sum(axis in STACK_AXES for axis in axes)
    if axes[stacked] == "embed":
        return stacked, stacked + 1
    if axes[-1] == "embed":
        return stacked, weight.ndim - 1
    raise ConfigError(
        f"{path} has the logical axes {axes}: a matmul contracts its first dim or its last one, "
        "whichever is 'embed'",
        fix="finetune.targets without it",
    )


def _adapter(
    path: str, weight: MatmulWeight, part: LinearPart, config: FinetuneConfig, key: jax.Array
) -> Adapter:
    """Returns the adapter of a part of `weight`, stacked like the weight."""
    axes = tuple(weight.out_sharding)
    stacked, cut = _cut(path, weight)
    stack, ins, outs = weight.shape[:stacked], weight.shape[stacked:cut], weight.shape[cut:]
    if part.stop is not None:
        widths = list(outs)
        widths[part.side] = part.stop - part.start
        outs = tuple(widths)
    # Not split over fsdp: the matrices are small, and each would have to be gathered.
    whole = tuple(None if axis == "embed" else axis for axis in axes)
    bound = math.prod(ins) ** -0.5
    a = jax.random.uniform(key, (*stack, *ins, config.rank), minval=-bound, maxval=bound)
    b = jnp.zeros((*stack, config.rank, *outs))
    magnitude = None
    if config.kind == "dora":
        ones = jnp.ones((*stack, math.prod(outs)))
        magnitude = FullPrecision(ones, out_sharding=(*axes[:stacked], whole[cut]), is_added=True)
    return Adapter(
        MatmulWeight(a, out_sharding=(*whole[:cut], "rank"), is_added=True),
        nnx.Param(b, out_sharding=(*axes[:stacked], "rank", *whole[cut:]), is_added=True),
        magnitude,
    )


# What is trained


def with_frozen(parameters: Mapping[str, Any], config: FinetuneConfig) -> dict[str, Any]:
    """Returns the `Parameter`s of a model with adapters, by path, of which [finetune] trains some.

    Raises ConfigError if a pattern of `also_train` matches no weight, or one that has an adapter.
    """
    _check_also_train(config, parameters)

    def of_run(path: str, parameter: Any) -> Any:
        is_chosen = parameter.is_of_adapter or _matches(path, config.also_train)
        return replace(parameter, is_trained=parameter.is_trained and is_chosen)

    return {path: of_run(path, parameter) for path, parameter in parameters.items()}


def _check_also_train(config: FinetuneConfig, parameters: Mapping[str, Any]) -> None:
    own = [path for path, parameter in parameters.items() if not parameter.is_of_adapter]
    adapted = {path.rsplit(".", 2)[0] for path in parameters.keys() - own}
    for pattern in config.also_train:
        matched = [path for path in own if fnmatchcase(path, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, own, 1, 0.3) or own[:1]
            raise ConfigError(
                f"finetune.also_train: no weight has the path {pattern!r}",
                fix=f"a pattern of paths such as {near[0]}",
            )
        both = sorted(adapted.intersection(matched))
        if both:
            raise ConfigError(
                f"finetune.also_train={pattern!r} trains {both[0]}, which has an adapter",
                fix="finetune.targets without it",
            )
