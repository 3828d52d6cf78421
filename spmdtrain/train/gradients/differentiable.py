"""The loss of a batch and its gradients, as functions that jax transforms.

The gradients are those of the step: `make_loss` has them as its derivative, so that `jax.grad`,
`jax.value_and_grad` and `jax.vjp` of it cost what a step costs, on any mesh.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.models.abstract import matmuls
from spmdtrain.train import step
from spmdtrain.train.batch import Batch, check_batch
from spmdtrain.train.gradients.loss import total_of
from spmdtrain.train.setup import Setup

Params = dict[str, jax.Array]


def make_loss(setup: Setup) -> Callable[[Params, Batch], jax.Array]:
    """`loss(params, batch)`: what a step on this batch minimises, a float32 scalar.

    It is the mean over the unmasked tokens of all losses together, those of blocks too, without
    dropout. `params` are those of a `TrainState`, `batch` is one of `batches`. Jitted;
    differentiable in `params`.
    """
    find = step.make_gradients(setup)
    compute = setup.config.precision.compute

    def both(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        check_batch(setup.batch, batch, dropout=False)
        with matmuls(compute):
            gradients, sums = find(params, None, batch, None)
        losses = [total_of(x) for name, x in sums.items() if name != "tokens"]
        mean = sum(losses, jnp.float32(0)) / jnp.maximum(total_of(sums["tokens"]), 1)
        return mean, {path: x.astype(params[path].dtype) for path, x in gradients.items()}

    @jax.custom_vjp
    def loss(params: Params, batch: Batch) -> jax.Array:
        return both(params, batch)[0]

    def backward(gradients: Params, cotangent: jax.Array) -> tuple[Any, None]:
        scaled = {path: (x * cotangent).astype(x.dtype) for path, x in gradients.items()}
        # None is a gradient of zeros: buffers have no other.
        return {path: scaled.get(path) for path in setup.model.parameters}, None

    loss.defvjp(both, backward)
    return jax.jit(loss)


def make_gradients(setup: Setup) -> Callable[[Params, Batch], Params]:
    """`gradients(params, batch)`: those of `make_loss`, by path, not clipped. Jitted."""
    return jax.jit(jax.grad(make_loss(setup)))
