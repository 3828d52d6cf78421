"""Pads weight dims that a mesh does not divide with zeros at their end.

Devices hold equal parts of a weight. If the rules split a dim that does not divide, the weight
rests with zeros appended to that dim. There are two such dims:

- the vocabulary, as in Megatron-LM: no token looks up the added rows, and the loss leaves them out,
  so they stay zero;
- with ZeRO-1, the dim that is split over `data` (arXiv:1910.02054): the zeros are cut off again as
  soon as the weight has been gathered.

A weight therefore has three shapes, and six forms on its way through a step. Here are the forms of
a table of 50 rows on `tensor` 4, and of 3 stacked layers on 2 stages:

    form          who has it                          table     stack
    of layers     imports, `weights`                  [50, e]   [3, e, f]
    of the model  optimizers, checkpoints             [50, e]   [1, 2, 2, e, f]: stage_layout.py
    in use        the forward pass                    [52, e]   [1, 2, 2, e, f]
    at rest       the state between steps             [52, e]   the same, ZeRO-1 may pad and split
    copies        matmuls on `context` 2: copies.py   none      [1, 2, 2, 2, e, f]
    gathered      one layer at a time: gather.py      [52, e]   [e, f], whole over `fsdp`

A gradient takes the same way back: it is scattered, summed over the copies and padded to rest.
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
    """The three shapes of every weight, by path, and conversions between them.

    The methods take a weight, or an array of its shape. If the two shapes are equal they return
    their argument.
    """

    of_model: Mapping[str, Shape]
    in_use: Mapping[str, Shape]
    at_rest: Mapping[str, Shape]

    def to_rest(self, path: str, x: jax.Array) -> jax.Array:
        """Returns x, in the model's shape, padded to the shape at rest."""
        return add_zeros(x, self.of_model[path], self.at_rest[path])

    def from_rest(self, path: str, x: jax.Array) -> jax.Array:
        """Returns x, in the shape at rest, cut to the model's shape."""
        return cut_zeros(x, self.of_model[path], self.at_rest[path])

    def use_to_rest(self, path: str, x: jax.Array) -> jax.Array:
        """Returns a gradient of the weight in use, padded to the shape at rest.

        x may be a device's own part, if it is whole along the padded dims.
        """
        return add_zeros(x, self.in_use[path], self.at_rest[path])

    def rest_to_use(self, path: str, x: jax.Array) -> jax.Array:
        """Inverts `use_to_rest`."""
        return cut_zeros(x, self.in_use[path], self.at_rest[path])

    def tree_to_rest(self, path: str, tree: Any) -> Any:
        """Pads the optimizer state of the weight at `path`: its leaves of the weight's shape."""
        shape = self.of_model[path]
        return jax.tree.map(lambda x: self.to_rest(path, x) if x.shape == shape else x, tree)

    def tree_from_rest(self, path: str, tree: Any) -> Any:
        """Inverts `tree_to_rest`."""
        shape = self.at_rest[path]
        return jax.tree.map(lambda x: self.from_rest(path, x) if x.shape == shape else x, tree)


def add_zeros(x: jax.Array, smaller: Shape, larger: Shape) -> jax.Array:
    """Appends zeros to each dim of x, as many as `larger` exceeds `smaller` by."""
    if smaller == larger:
        return x
    return jnp.pad(x, [(0, more - less) for less, more in zip(smaller, larger, strict=True)])


def add_zeros_apart(x: jax.Array, smaller: Shape, larger: Shape, yes: jax.Array) -> jax.Array:
    """Returns `add_zeros` of an x that is computed as if nothing were appended, to the bit.

    `yes`: True, but not known to be so while compiling. XLA may round a product and a sum in one
    step or in two, depending on what it fuses them with, so drawn weights would depend on their
    padding. A branch is never fused with the code that computes its operands; an optimization
    barrier would not do, because the CPU backend drops it before it fuses.
    """
    if smaller == larger:
        return x

    def pad(x: jax.Array) -> jax.Array:
        return add_zeros(x, smaller, larger)

    return jax.lax.cond(yes, pad, lambda x: jnp.zeros(larger, x.dtype), x)


def cut_zeros(x: jax.Array, smaller: Shape, larger: Shape) -> jax.Array:
    """Inverts `add_zeros`."""
    if smaller == larger:
        return x
    sizes = zip(x.shape, smaller, larger, strict=True)
    return x[tuple(slice(size - (more - less)) for size, less, more in sizes)]


def pad_vocabulary(names: Sequence[str | None], shape: Shape, rules: Rules) -> Shape:
    """Returns the shape of a weight with these logical axes, its vocabulary padded for the mesh.

    Both tables of rules may split it: that of weights at rest, and on each stage that of logits.
    """
    at_rest = _ways(rules.parameters["vocab"], rules)
    stages = rules.sizes["pipeline"] if "pipeline" in rules.parameters["vocab"] else 1
    ways = math.lcm(at_rest, stages * _ways(rules.activations["vocab"], rules))
    named = zip(names, shape, strict=True)
    return tuple(round_up(size, ways) if name == "vocab" else size for name, size in named)


def _ways(axes: Sequence[str], rules: Rules) -> int:
    return math.prod(rules.sizes[axis] for axis in axes)


def round_up(size: int, ways: int) -> int:
    """Returns `size` rounded up to a multiple of `ways`."""
    return -(-size // ways) * ways
