"""Initialises the magnitudes of adapters among a model's values by dotted path, and merges them."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import FinetuneConfig, TransformerConfig
from spmdtrain.models.adapters.adapted import LinearPart, parts_of
from spmdtrain.models.adapters.quantised import NAMES, Kind, dequantised, quantised


def with_magnitudes(
    values: Mapping[str, jax.Array], model: TransformerConfig
) -> dict[str, jax.Array]:
    """Returns the values of a model's parameters, each magnitude set to its weight's norms over i.

    Stacked dims come first, however many. Padded layers have norms of zero.
    """
    completed = dict(values)
    if not any(path.endswith(".magnitude") for path in values):
        return completed
    weights = wide(values)
    for path, part, adapter in _adapters(weights, model):
        if "magnitude" in adapter:
            w = part.of(weights[path])
            stacked, ins = _dims(w, adapter)
            over = tuple(range(stacked, stacked + ins))
            norms = jnp.sqrt(jnp.sum(jnp.square(w.astype(jnp.float32)), over))
            at = f"{path}.{part.name}.magnitude"
            completed[at] = norms.reshape(values[at].shape).astype(values[at].dtype)
    return completed


def wide(values: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the values with each quantised weight dequantised, at the path of the weight."""
    widened = dict(values)
    for kind, names in NAMES.items():
        for path in [path for path in values if path.endswith(f".{names[0]}")]:
            base = path.removesuffix(f".{names[0]}")
            arrays = {name: widened.pop(f"{base}.{name}") for name in names}
            stacked, ins = dims_in(values, base, arrays[names[0]])
            widened[base] = dequantised(arrays, kind, ins, stacked)
    return widened


def with_few_bits(
    values: Mapping[str, jax.Array], paths: Collection[str], kind: Kind, shapes: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Returns the quantised arrays of the weights at `paths`, by dotted path.

    `shapes` has the shapes of their adapters.
    """
    by_path = {}
    for path in paths:
        stacked, ins = dims_in(shapes, path, values[path])
        arrays = quantised(values[path], kind, stacked, ins, path)
        by_path |= {f"{path}.{name}": x for name, x in arrays.items()}
    return by_path


def dims_in(values: Mapping[str, Any], path: str, w: Any) -> tuple[int, int]:
    """Returns the numbers of dims of the weight at `path` that count layers, and that belong to
    i.
    """
    a = next(name for name in values if name.startswith(f"{path}.") and name.endswith(".a"))
    stacked = len(values[a].shape) + len(values[f"{a[:-1]}b"].shape) - 2 - w.ndim
    return stacked, len(values[a].shape) - 1 - stacked


def merged(
    values: Mapping[str, np.ndarray], config: FinetuneConfig, model: TransformerConfig
) -> dict[str, np.ndarray]:
    """Returns the weights of the plain model that computes the same as one with adapters.

    `values` are keyed by dotted path, with layers in order, as `spmdtrain.weights` returns them. A
    weight with an adapter becomes W + s a b, or m (W + s a b) / |W + s a b|, computed and returned
    in float32; an output whose norm is 0 stays 0. Other weights are returned unchanged.

    Raises ConfigError if weights are quantised: adapters are merged with the original weights.
    """
    check_merges(config)
    plain = dict(values)
    for path, part, adapter in _adapters(values, model):
        whole = np.array(plain[path], np.float32)  # a copy, which is changed
        mine = part.of(whole)
        mine[...] = _merged_part(mine, adapter, config.scale)
        plain[path] = whole
        for name in adapter:
            del plain[f"{path}.{part.name}.{name}"]
    return plain


def check_merges(config: FinetuneConfig) -> None:
    """Refuses to merge adapters if the run holds only quantised weights."""
    if config.has_adapters and config.base != "float":
        raise ConfigError(
            f"finetune.base={config.base!r}: adapters are merged with the original weights, and "
            "the run holds only quantised ones",
            fix="--base DIR, the published folder with the originals, or --to peft",
        )


def _merged_part(w: np.ndarray, adapter: Mapping[str, np.ndarray], scale: float) -> np.ndarray:
    stacked, ins = _dims(w, adapter)
    stack, inputs = w.shape[:stacked], math.prod(w.shape[stacked : stacked + ins])
    rank = adapter["a"].shape[-1]
    a = adapter["a"].astype(np.float32).reshape(*stack, inputs, rank)
    b = adapter["b"].astype(np.float32).reshape(*stack, rank, -1)
    matrix = w.reshape(*stack, inputs, -1) + np.float32(scale) * (a @ b)
    if "magnitude" in adapter:
        norm = np.linalg.norm(matrix, axis=-2)
        magnitude = adapter["magnitude"].astype(np.float32)
        # An output without weights, as pruning leaves it, has no direction: it stays zero.
        factor = np.divide(magnitude, norm, out=np.zeros_like(norm), where=norm > 0)
        matrix = matrix * factor[..., None, :]
    return matrix.reshape(w.shape)


def magnitude_paths(values: Mapping[str, Any]) -> set[str]:
    """Returns the paths of the magnitudes among the values of a model's parameters."""
    return {
        path
        for path in values
        if path.endswith(".magnitude") and f"{path.removesuffix('magnitude')}a" in values
    }


def _adapters(
    values: Mapping[str, Any], model: TransformerConfig
) -> Iterator[tuple[str, LinearPart, dict[str, Any]]]:
    """Yields (path of the weight, part, its adapter's arrays by name) of each adapter."""
    for path, w in values.items():
        for part in parts_of(path, w.shape, model) if w.ndim > 1 else ():
            prefix = f"{path}.{part.name}."
            names = [name for name in ("a", "b", "magnitude") if prefix + name in values]
            if names:
                yield path, part, {name: values[prefix + name] for name in names}


def _dims(w: Any, adapter: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the numbers of dims of a part of a weight that count layers, and that belong to i."""
    stacked = adapter["a"].ndim + adapter["b"].ndim - 2 - w.ndim
    return stacked, adapter["a"].ndim - 1 - stacked
