"""Computes the learning rate of each step, from a custom schedule or the settings."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.config.arguments import shown
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.own_parts import own_part
from spmdtrain.config.schema import OptimizerConfig, RunConfig

LearningRate = Callable[[jax.Array], Any]  # 0-based step -> learning rate


def make_learning_rate(config: RunConfig, own: LearningRate | None) -> LearningRate:
    """Returns a function from a 0-based step to its learning rate, a float32 scalar.

    It is `own`, or that of `own.learning_rate`, or by the settings.
    """
    if own is None:
        own = own_part(config, "learning_rate")
    if own is None:
        of_settings = partial(learning_rate, config.optimizer, config.train.steps)
        if config.optimizer.rate_by_batch == "none":
            return of_settings
        return lambda step: of_settings(step) * batch_factor(config, step)
    takes = (
        "a function of the step in jax.numpy, such as optax.warmup_constant_schedule(0, 1e-3, 100)"
    )
    if not callable(own):
        raise ConfigError(f"learning_rate={own!r:.80} is not a function of the step", fix=takes)

    def rate(step: jax.Array) -> jax.Array:
        value = own(step)
        is_array = isinstance(value, jax.Array | np.ndarray | np.generic | int | float)
        if not is_array or not jnp.issubdtype(jnp.result_type(value), jnp.number):
            raise ConfigError(f"learning_rate= gives {shown(value)}, not a rate", fix=takes)
        if jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
            raise ConfigError("learning_rate= gives a complex number, not a rate", fix=takes)
        return jnp.asarray(value, jnp.float32)

    try:
        shape = jax.eval_shape(rate, jax.ShapeDtypeStruct((), jnp.int32)).shape
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        what = "learning_rate= asks for the value of the step while the step is compiled"
        raise ConfigError(what, fix=f"jnp.where instead of if: {takes}") from None
    if shape:
        raise ConfigError(
            f"learning_rate= gives an array of shape {shape}, not one rate", fix=takes
        )
    for step in (0, config.train.steps - 1):
        value = float(rate(jnp.int32(step)))
        if not 0 <= value < math.inf:
            what = f"learning_rate= gives {value} for step {step}, which is not a rate"
            raise ConfigError(what, fix="a number of at least 0")
    return rate


def learning_rate(config: OptimizerConfig, steps: int, step: jax.Array) -> jax.Array:
    """Returns the learning rate of the 0-based `step` of `steps`, a float32 scalar.

    While warming up it is (step + 1) / (warmup + 1) of the peak; at the last step it is the final
    one (unless it is constant).
    """
    peak = config.learning_rate
    final = config.final_learning_rate
    warmup = config.warmup
    if config.schedule == "constant":
        falling = peak
    else:
        begin = warmup
        if config.decay_share is not None:
            falls = max(1, round(config.decay_share * steps))
            begin = max(warmup, steps - 1 - falls)
        share = jnp.clip((step - begin) / max(steps - 1 - begin, 1), 0, 1)
        falling = final + (peak - final) * _height(config.schedule, share)
    return jnp.where(step < warmup, peak * (step + 1) / (warmup + 1), falling).astype(jnp.float32)


def batch_factor(config: RunConfig, step: jax.Array) -> jax.Array:
    """Returns the factor of the rate by which the 0-based `step` follows the size of its batch.

    It is the tokens of its batch as a share of those after the last of `train.stages`, or the
    square root of this share; a float32 scalar.
    """
    stages = config.train.timetable
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.optimizer.rate_by_batch]
    factors = jnp.array([(stage.tokens / stages[-1].tokens) ** power for stage in stages])
    ends = jnp.array([stage.last for stage in stages[:-1]])
    return factors.astype(jnp.float32)[jnp.searchsorted(ends, step, side="right")]


def _height(schedule: str, share: jax.Array) -> jax.Array:
    """Returns how much of the decay is still ahead, from 1 to 0, after `share` of its steps."""
    if schedule == "cosine":
        return 0.5 * (1 + jnp.cos(jnp.pi * share))
    return 1 - share
