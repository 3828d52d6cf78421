"""Zeros behind the dims of weights that a mesh does not divide.

Devices hold equal parts of a weight. Where its rules split a dim that does not divide, the weight
rests with zeros behind that dim. There are two such dims:

- the vocabulary, as in Megatron-LM: no token looks the rows behind it up, and the loss leaves them
  out, so they stay zeros;
- with ZeRO-1, the dim that is split over `data` (arXiv:1910.02054): the zeros are cut off again as
  soon as the weight has been gathered.

A weight therefore has three shapes. The model knows the first, and so do optimizers and
checkpoints. The second is the shape in use, with a padded vocabulary. The third is that at rest.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.parallel.axes import Rules

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Padding:
    """The three shapes of every weight, by path, and the ways between them.

    Its methods take a weight, or an array of its shape. Where the two shapes are equal they give
    back what they were given.
    """

    of_model: Mapping[str, Shape]
    in_use: Mapping[str, Shape]
    at_rest: Mapping[str, Shape]

    def to_rest(self, path: str, x: jax.Array) -> jax.Array:
        """x as the model has it, padded to rest."""
        return add_zeros(x, self.of_model[path], self.at_rest[path])

    def from_rest(self, path: str, x: jax.Array) -> jax.Array:
        """x at rest, as the model has it."""
        return cut_zeros(x, self.of_model[path], self.at_rest[path])

    def use_to_rest(self, path: str, x: jax.Array) -> jax.Array:
        """A gradient of the weight in use, padded as the weight rests.

        x may be a device's own part, if it is whole along the dims that are padded.
        """
        return add_zeros(x, self.in_use[path], self.at_rest[path])

    def rest_to_use(self, path: str, x: jax.Array) -> jax.Array:
        """The opposite of `use_to_rest`."""
        return cut_zeros(x, self.in_use[path], self.at_rest[path])

    def tree_to_rest(self, path: str, tree: Any) -> Any:
        """Optimizer state of the weight at `path`: leaves with its shape are padded as it is."""
        shape = self.of_model[path]
        return jax.tree.map(lambda x: self.to_rest(path, x) if x.shape == shape else x, tree)

    def tree_from_rest(self, path: str, tree: Any) -> Any:
        """The opposite of `tree_to_rest`."""
        shape = self.at_rest[path]
        return jax.tree.map(lambda x: self.from_rest(path, x) if x.shape == shape else x, tree)


def add_zeros(x: jax.Array, smaller: Shape, larger: Shape) -> jax.Array:
    """x with as many zeros behind each dim as `larger` is larger than `smaller`."""
    if smaller == larger:
        return x
    return jnp.pad(x, [(0, more - less) for less, more in zip(smaller, larger, strict=True)])


def cut_zeros(x: jax.Array, smaller: Shape, larger: Shape) -> jax.Array:
    """The opposite of `add_zeros`."""
    if smaller == larger:
        return x
    sizes = zip(x.shape, smaller, larger, strict=True)
    return x[tuple(slice(size - (more - less)) for size, less, more in sizes)]


def pad_vocabulary(names: Sequence[str | None], shape: Shape, rules: Rules) -> Shape:
    """The shape of a weight with these logical axes, its vocabulary padded to what the mesh wants.

    Both tables of rules may split it: the one at rest, and then, on each stage, that of the logits.
    """
    at_rest = _ways(rules.parameters["vocab"], rules)
    stages = rules.sizes["pipeline"] if "pipeline" in rules.parameters["vocab"] else 1
    ways = math.lcm(at_rest, stages * _ways(rules.activations["vocab"], rules))
    named = zip(names, shape, strict=True)
    return tuple(round_up(size, ways) if name == "vocab" else size for name, size in named)


def _ways(axes: Sequence[str], rules: Rules) -> int:
    return math.prod(rules.sizes[axis] for axis in axes)


def round_up(size: int, ways: int) -> int:
    """The next multiple of `ways`."""
    return -(-size // ways) * ways
