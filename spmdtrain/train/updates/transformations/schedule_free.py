"""Learns without a schedule: an average of the weights replaces a falling learning rate.

See Defazio et al. 2024, arXiv:2405.15682. A weight has three points. z moves by the rule of a base
optimizer, x is the average of all z, and the gradient is taken at y between them:

    y  = (1 - beta1) z + beta1 x
    z <- z - learning rate * direction(gradient at y, y)
    x <- x + c (z - x)

c is the square of the largest learning rate so far, divided by its sum over all steps: 1 / n after
n steps at one rate, and steps of the warm-up count less.

The paper evaluates x. It is the parameter of a `TrainState`, so everything that reads weights reads
x; z is stored with it like a moment. y exists only within a step, which derives it from both.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class ScheduleFreeState(NamedTuple):
    """The optimizer state of one tensor.

    `z` has its shape. `largest_rate` and `weight_sum` are scalars: the largest learning rate so
    far, and the sum of its squares over steps. `base`: the state of the base optimizer.
    """

    z: jax.Array
    largest_rate: jax.Array
    weight_sum: jax.Array
    base: Any


def schedule_free(
    base: optax.GradientTransformation, beta1: float
) -> optax.GradientTransformationExtraArgs:
    """Returns the update of x, still to be subtracted: it already includes the learning rate.

    `base` makes a direction from the gradient, without rate and momentum. `update` takes the rate
    as `learning_rate=`, and x as `params`.
    """

    def init(params: Any) -> ScheduleFreeState:
        zero = jnp.zeros((), params.dtype)
        # A copy: a step that gets x and z donates both.
        return ScheduleFreeState(jnp.copy(params), zero, zero, base.init(params))

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, ScheduleFreeState]:
        learning_rate = extra["learning_rate"]
        y = gradient_point(beta1, state, params)
        direction, base_state = base.update(updates, state.base, y)
        z = state.z - learning_rate * direction
        largest_rate = jnp.maximum(state.largest_rate, learning_rate)
        weight_sum = state.weight_sum + largest_rate**2
        # A schedule may begin at 0; as long as it does, z stays at x.
        c = largest_rate**2 / jnp.where(weight_sum > 0, weight_sum, 1)
        return c * (params - z), ScheduleFreeState(z, largest_rate, weight_sum, base_state)

    return optax.GradientTransformationExtraArgs(init, update)


def gradient_point(beta1: float, state: ScheduleFreeState, x: jax.Array) -> jax.Array:
    """Returns y, where the gradient of this weight is taken."""
    return x + (1 - beta1) * (state.z - x)
