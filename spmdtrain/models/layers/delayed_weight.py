"""Gives weights the scales of their matmuls that come from earlier steps."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from spmdtrain.models.projection import MatmulWeight, Product, matmul_weights, plain
from spmdtrain.parallel.matmuls.delayed import Operand


class DelayedWeight(nnx.Module):
    """A weight whose scales come from earlier steps (parallel/matmuls/delayed.py).

    `scales` and `slots` are those of an `Operand`, stacked like the weight.
    """

    any_order = True

    def __init__(self, weight: MatmulWeight, scales: jax.Array, slots: jax.Array):
        stack = weight.out_sharding[:1] if weight.out_sharding[:1] == ("layer",) else ()
        self.weight = weight
        self.scales = nnx.Variable(scales, out_sharding=(*stack, None))
        self.slots = nnx.Variable(slots, out_sharding=(*stack, None, None, None))

    def multiply(self, product: Product, x: jax.Array) -> jax.Array:
        operand = Operand(self.weight[...], self.scales[...], self.slots[...])
        return product(x, operand, narrow=self.weight.narrow)

    def __getitem__(self, key: Any) -> jax.Array:
        return self.weight[key]


def attach_scaling(model: nnx.Module, scaling: Mapping[str, tuple[jax.Array, jax.Array]]) -> None:
    """Replaces each weight that has (scales, slots), by dotted path, by a `DelayedWeight`.

    The model is one that a step has just bound to its values.
    """
    for path, module, name in matmul_weights(model):
        of_weight = scaling.get(".".join(plain(tuple(path.split(".")))))
        if of_weight is not None:
            with nnx.use_eager_sharding(False):
                made = DelayedWeight(getattr(module, name), *of_weight)
            setattr(module, name, made)
