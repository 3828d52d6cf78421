"""Offers the loss of a batch and its gradients as functions that jax can transform.

The derivative of `make_loss` uses the gradients of the step, so `jax.grad`, `jax.value_and_grad`
and `jax.vjp` of it cost as much as a step, on any mesh.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.models.abstract import matmuls
from spmdtrain.train import step
from spmdtrain.train.all_parts import parts_of
from spmdtrain.train.batch import Batch
from spmdtrain.train.external_arrays.check_arrays import Checked, check_batch, check_params
from spmdtrain.train.gradients.sums import COUNTS, number_of, objective, total_of
from spmdtrain.train.setup import Setup, check_setup

Params = dict[str, jax.Array]


def make_loss(setup: Setup) -> Checked:
    """Returns `loss(params, batch)`: what a step on this batch minimises, a float32 scalar.

    It is the mean over the unmasked tokens, or over pairs, of all losses together, including those
    of blocks, without dropout. `params` are those of a `TrainState`, `batch` is one of `batches`.
    Jitted; differentiable in `params`. Raises ConfigError if either does not fit this setup.
    """
    check_setup(setup)
    for joined in setup.own.values():
        joined.check_without_items()
    find = step.make_gradients(setup)
    compute = setup.config.precision.compute

    def both(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        with matmuls(compute):
            gradients, sums = find(params, None, batch, None)
        losses = {name: x for name, x in sums.items() if name not in COUNTS}
        mean = objective(losses, parts_of(setup.config)) / jnp.maximum(total_of(number_of(sums)), 1)
        return mean, {path: x.astype(params[path].dtype) for path, x in gradients.items()}

    @jax.custom_vjp
    def loss(params: Params, batch: Batch) -> jax.Array:
        return both(params, batch)[0]

    def backward(gradients: Params, cotangent: jax.Array) -> tuple[Any, None]:
        scaled = {path: (x * cotangent).astype(x.dtype) for path, x in gradients.items()}
        # None is a gradient of zeros: buffers have no other.
        return {path: scaled.get(path) for path in setup.model.parameters}, None

    loss.defvjp(both, backward)
    return Checked(jax.jit(loss), _check_of(setup))


def make_gradients(setup: Setup) -> Checked:
    """Returns `gradients(params, batch)`: those of `make_loss`, by path, not clipped. Jitted."""
    return Checked(jax.jit(jax.grad(make_loss(setup).jitted)), _check_of(setup))


def _check_of(setup: Setup) -> Callable[[Any, Any], None]:
    def check(params: Any, batch: Any) -> None:
        check_params(setup, params)
        check_batch(setup, batch, training=True)

    return check
