"""Decides after which steps the zero weights are chosen, and how many weights stay."""

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.config.schema import SparsityConfig


def shares(settings: SparsityConfig) -> np.ndarray:
    """Returns the share of zeros after each choice of `magnitude`, float32.

    It rises by the cubic schedule of arXiv:1710.01878, which begins `every` steps before `since`:
    share (1 - (1 - k / n)^3) after the k-th of n choices.
    """
    assert settings.share is not None, "magnitude has one"
    to_come = 1 - np.arange(1, settings.choices + 1) / settings.choices
    return np.asarray(settings.share * (1 - to_come**3), np.float32)


def number_kept(settings: SparsityConfig, size: int, step: jax.Array) -> jax.Array | int:
    """Returns how many of the `size` elements of a matrix stay after a 1-based `step`.

    A single rounded product, with no sum to fuse: the same on every mesh.
    """
    if settings.group is not None:
        count, of = settings.group
        return size // of * count
    first, _, every = _times(settings)
    choice = (step - first) // every
    share = jnp.asarray(shares(settings))[jnp.clip(choice, 0, settings.choices - 1)]
    return size - jnp.round(jnp.float32(size) * share).astype(jnp.int32)


def is_time(settings: SparsityConfig, step: jax.Array) -> jax.Array:
    """Returns True if the zeros are chosen again after a 1-based `step`."""
    first, last, every = _times(settings)
    passed = step - first
    return (passed >= 0) & (step <= last) & (passed % every == 0)


def has_zeros(settings: SparsityConfig, step: jax.Array) -> jax.Array:
    """Returns True if there are zeros after a 1-based `step`."""
    return step >= _times(settings)[0]


def _times(settings: SparsityConfig) -> tuple[int, int, int]:
    """Returns the steps of the first and of the last choice, and those between two choices."""
    first, last = settings.since, settings.until
    assert first is not None and last is not None, "a run that chooses has a first and a last step"
    return first, last, settings.every or 1
