"""Adapters: products of low rank added to the frozen weights of matmuls, as [finetune] says.

`adapt` puts an `Adapted` in the place of each weight that [finetune] targets. It is a weight type
of projection.py, so that layers, meshes and pipelines see nothing new. The weight keeps its dotted
path: a checkpoint of the model without adapters lacks the leaves of the adapters, and no others.

One array of ours may hold several linear layers of a published model, as the projection to queries,
keys and values does. Each of them is a *part*, with an adapter of its own.

i: the dims that a matmul contracts, o: its other ones, r: the rank.
"""

import difflib
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import FinetuneConfig
from spmdtrain.config.schema.finetune import LINEAR
from spmdtrain.models.projection import MatmulWeight, Product
from spmdtrain.parallel.axes import STACK_AXES

WEIGHT = "adapted_weight"  # the attribute of an `Adapted` that dotted paths leave out
SIDE = -2  # the dim along which parts lie side by side: of o the last but one


@dataclass(frozen=True)
class Part:
    """A linear layer in a weight: its places [start, stop) along `SIDE`.

    `stop` is None where the weight is one linear layer.
    """

    name: str
    start: int = 0
    stop: int | None = None

    def of(self, x: Any) -> Any:
        """Returns the places of this part in a weight [*i, *o], or in an array [..., *o]."""
        return x if self.stop is None else x[..., self.start : self.stop, :]


def parts_of(path: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Returns the linear layers in the weight at a dotted path, of this shape.

    Names are those of the shipped block. A weight of another name is one linear layer, `adapter`.
    """
    name = path.rpartition(".")[2]
    if name == "qkv_eknd":
        group = shape[SIDE] - 2
        return Part("q", 0, group), Part("k", group, group + 1), Part("v", group + 1, group + 2)
    if name == "up_ef" and shape[SIDE] == 2:
        return Part("gate", 0, 1), Part("up", 1, 2)
    whole = {"up_ef": "up", "down_fe": "down", "out_kgde": "out"}
    return (Part(whole.get(name, "adapter")),)


class Adapter(nnx.Module):
    """The adapter of one part: a [*i, r], b [r, *o], and for DoRA the magnitudes of o, in a row."""

    def __init__(self, a: nnx.Param, b: nnx.Param, magnitude: nnx.Param | None):
        self.a = a
        self.b = b
        self.magnitude = magnitude


class Adapted(nnx.Module):
    """A frozen weight W with adapters: x W + s (x a) b (LoRA, arXiv:2106.09685).

    With magnitudes m (DoRA, arXiv:2402.09353) each output of that is multiplied by
    m / |W + s a b|, the norm over i. As in its section 4.3, no gradient goes through the norm.
    """

    def __init__(self, weight: Any, parts: tuple[Part, ...], config: FinetuneConfig, site: int):
        self.adapted_weight = weight
        self.parts = parts
        self.scale = config.scale
        self.dropout = config.dropout
        self.site = site

    def multiply(self, product: Product, x: jax.Array) -> jax.Array:
        y = self.adapted_weight.multiply(product, x)
        adapters = [getattr(self, part.name, None) for part in self.parts]
        # One matmul for all parts, which reads x once.
        a = jnp.concatenate([each.a[...] for each in adapters if each is not None], -1)
        low = product.to_rank(product.dropout(x, self.site, self.dropout), a)
        added = []
        factors = []
        for part, each in zip(self.parts, adapters, strict=True):
            of_part = part.of(y)
            if each is None:
                added.append(jnp.zeros_like(of_part))
                factors.append(jnp.ones(of_part.shape[2:], y.dtype))
                continue
            b = each.b[...]
            added.append(jnp.tensordot(low[..., : len(b)], b, 1))
            low = low[..., len(b) :]
            if each.magnitude is not None:
                factors.append(self._factor(product, part, each))
        y = y + self.scale * _side_by_side(added)
        has_magnitudes = len(factors) == len(added)
        return y * _side_by_side(factors).astype(y.dtype) if has_magnitudes else y

    def _factor(self, product: Product, part: Part, adapter: Adapter) -> jax.Array:
        """Returns m / |W + s a b| of a part, float32 [*o]."""
        norm = partial(_norm, part=part, b=adapter.b[...], scale=self.scale)
        w = self.adapted_weight[...]
        a = adapter.a[...]
        # On a mesh with `context` either may come as copies, with a dim more.
        copies = [
            0 if x.ndim > dims else None
            for x, dims in ((w, len(product.names) + 1), (a, product.contracted + 1))
        ]
        if copies != [None, None]:
            found = jax.vmap(norm, copies)(w, a).max(0)  # all the same
        else:
            found = norm(w, a)
        # A place for a layer that pads a pipeline has weights of zero.
        norms = jnp.maximum(jax.lax.stop_gradient(found), jnp.finfo(jnp.float32).tiny)
        return adapter.magnitude[...].astype(jnp.float32).reshape(norms.shape) / norms


def _side_by_side(parts: list[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, SIDE)


def _norm(w: jax.Array, a: jax.Array, *, part: Part, b: jax.Array, scale: float) -> jax.Array:
    """Returns |W + s a b| over i, float32 [*o], without an array of the size of W."""
    w = part.of(w)
    over = tuple(range(a.ndim - 1))
    dot = partial(jnp.tensordot, preferred_element_type=jnp.float32)
    wide = b.astype(jnp.float32)
    squares = jnp.sum(jnp.square(w.astype(jnp.float32)), over)
    crossed = jnp.sum(dot(a, w, (over, over)) * wide, 0)
    of_product = jnp.sum(jnp.tensordot(dot(a, a, (over, over)), wide, 1) * wide, 0)
    return jnp.sqrt(squares + 2 * scale * crossed + scale**2 * of_product)


# A model gets its adapters


def adapt(model: nnx.Module, config: FinetuneConfig, key: jax.Array) -> None:
    """Puts adapters into the model, which is being made, in the place of the weights they adapt.

    As they begin they change nothing: a ~ U(-1, 1) / sqrt(size of i) and b = 0, as in peft. Each
    draws from `key` and its own path, whatever else is adapted. `with_magnitudes` is to follow.

    Raises ConfigError where a target names no weight.
    """
    if not config.has_adapters:
        return
    found = {path: (module, name) for path, module, name in _matmul_weights(model)}
    _check_targets(config, found)
    for path, (module, name) in found.items():
        weight = getattr(module, name)
        parts = parts_of(path, weight.shape)
        site = zlib.crc32(path.encode()) >> 1
        adapted = Adapted(weight, parts, config, site)
        for part in parts:
            if part.name in config.targets or _matches(path, config.targets):
                own_key = jax.random.fold_in(key, zlib.crc32(f"{path}.{part.name}".encode()))
                setattr(adapted, part.name, _adapter(path, weight, part, config, own_key))
                setattr(module, name, adapted)


def _matmul_weights(model: nnx.Module) -> Iterator[tuple[str, nnx.Module, str]]:
    """Yields (dotted path, module, attribute) of each weight that only matmuls read."""
    for path, module in list(nnx.iter_modules(model)):
        for name, value in list(vars(module).items()):
            if isinstance(value, MatmulWeight):
                yield ".".join(map(str, (*path, name))), module, name


def _check_targets(config: FinetuneConfig, weights: Mapping[str, Any]) -> None:
    """Refuses a pattern without a weight, and targets that give no adapter at all."""
    for target in config.targets:
        if target not in LINEAR and not _matched(weights, target):
            near = difflib.get_close_matches(target, [*LINEAR, *weights], 1, 0.3) or list(LINEAR)
            raise ConfigError(
                f"finetune.targets: {target!r} is no linear layer of a block, and no weight of a "
                "matmul has such a path",
                found=", ".join([*LINEAR, *weights]),
                fix=f"--set finetune.targets={near[0]}",
            )
    there = {
        part.name
        for path, (module, name) in weights.items()
        for part in parts_of(path, getattr(module, name).shape)
    }
    if not there & set(config.targets) and not any(_matched(weights, t) for t in config.targets):
        raise ConfigError(
            f"finetune.targets={','.join(config.targets)}: the model has no such layer",
            found=", ".join(sorted(there)) or "no weight that only matmuls read",
            fix=f"--set finetune.targets={','.join(sorted(there)) or '...'}",
        )


def _matched(paths: Collection[str], pattern: str) -> bool:
    return any(fnmatchcase(path, pattern) for path in paths)


def _matches(path: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _adapter(
    path: str, weight: MatmulWeight, part: Part, config: FinetuneConfig, key: jax.Array
) -> Adapter:
    """Returns the adapter of a part of `weight`, stacked as that is."""
    axes = tuple(weight.out_sharding)
    stacked = sum(axis in STACK_AXES for axis in axes)
    cut = stacked + 1
    if axes[stacked] != "embed":
        if axes[-1] != "embed":
            raise ConfigError(
                f"{path} has the logical axes {axes}: which of its dims a matmul contracts is seen "
                "by 'embed', its first dim or its last one",
                fix="finetune.targets without it",
            )
        cut = weight.ndim - 1
    stack, ins, outs = weight.shape[:stacked], weight.shape[stacked:cut], weight.shape[cut:]
    if part.stop is not None:
        outs = (*outs[:SIDE], part.stop - part.start, *outs[SIDE + 1 :])
    # Whole over fsdp: the matrices are small, and would each have to be gathered.
    whole = tuple(None if axis == "embed" else axis for axis in axes)
    bound = math.prod(ins) ** -0.5
    a = jax.random.uniform(key, (*stack, *ins, config.rank), minval=-bound, maxval=bound)
    b = jnp.zeros((*stack, config.rank, *outs))
    magnitude = None
    if config.kind == "dora":
        ones = jnp.ones((*stack, math.prod(outs)))
        magnitude = nnx.Param(ones, out_sharding=(*axes[:stacked], whole[cut]), of_adapter=True)
    return Adapter(
        MatmulWeight(a, out_sharding=(*whole[:cut], "rank"), of_adapter=True),
        nnx.Param(b, out_sharding=(*axes[:stacked], "rank", *whole[cut:]), of_adapter=True),
        magnitude,
    )


def plain(path: tuple) -> tuple:
    """Returns the path of a variable without the step from an `Adapted` to its weight."""
    return tuple(step for step in path if step != WEIGHT)


def is_of_adapter(variable: nnx.Variable) -> bool:
    return variable.get_metadata().get("of_adapter", False)


# What adapters and their weights come to, by dotted path


def with_magnitudes(values: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the values of a model's parameters, each magnitude the norms of its weight over i.

    Stacked dims come first, as many as there are. Padded layers have norms of zero.
    """
    found = dict(values)
    for path, part, adapter in _adapters(values):
        if "magnitude" in adapter:
            w = part.of(values[path])
            stacked, ins = _dims(w, adapter)
            over = tuple(range(stacked, stacked + ins))
            norms = jnp.sqrt(jnp.sum(jnp.square(w.astype(jnp.float32)), over))
            at = f"{path}.{part.name}.magnitude"
            found[at] = norms.reshape(values[at].shape).astype(values[at].dtype)
    return found


def magnitude_paths(values: Mapping[str, Any]) -> set[str]:
    """Returns the paths of the magnitudes among the values of a model's parameters."""
    found = _adapters(values)
    return {f"{path}.{part.name}.magnitude" for path, part, each in found if "magnitude" in each}


def _adapters(values: Mapping[str, Any]) -> Iterator[tuple[str, Part, dict[str, Any]]]:
    """Yields (path of the weight, part, its adapter's arrays by name) of each adapter."""
    for path, w in values.items():
        for part in parts_of(path, w.shape) if w.ndim > 1 else ():
            prefix = f"{path}.{part.name}."
            names = [name for name in ("a", "b", "magnitude") if prefix + name in values]
            if names:
                yield path, part, {name: values[prefix + name] for name in names}


def _dims(w: Any, adapter: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many dims of a part of a weight count layers, and how many are of i."""
    stacked = adapter["a"].ndim + adapter["b"].ndim - 2 - w.ndim
    return stacked, adapter["a"].ndim - 1 - stacked


# What is trained beside adapters


def is_trained(path: str, variable: nnx.Variable, config: FinetuneConfig) -> bool:
    """Returns whether a parameter is trained, by [finetune]."""
    if not config.has_adapters or is_of_adapter(variable):
        return True
    return _matches(path, config.also_train)


def check_also_train(config: FinetuneConfig, parameters: Mapping[str, Any]) -> None:
    """Refuses a pattern of `also_train` that matches no weight, or one that has an adapter.

    `parameters`: `Parameter`s by dotted path.
    """
    own = [path for path, each in parameters.items() if not each.is_of_adapter]
    adapted = {path.rsplit(".", 2)[0] for path, each in parameters.items() if each.is_of_adapter}
    for pattern in config.also_train:
        matched = [path for path in own if fnmatchcase(path, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, own, 1) or own[:1]
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
