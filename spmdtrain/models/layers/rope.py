"""Rotates queries and keys by their positions (arXiv:2104.09864), the same way in all layers or by
their kind.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from spmdtrain.config.schema import RopeScaling, TransformerConfig
from spmdtrain.models.layers.kinds import kind_of


def rotate(x_btknd: jax.Array, positions_bt: jax.Array, theta: float) -> jax.Array:
    """Rotates all channels of x. Dim i is rotated with dim i + d / 2, as in Llama."""
    return turn(x_btknd, positions_bt, frequencies(theta, x_btknd.shape[-1]))


@dataclass(frozen=True)
class Rotation:
    """The rotation of a layer's queries and keys, by its kind.

    If layers differ, they read their frequencies from a table; those of a layer without rotary
    positions are 0, which rotates nothing.
    """

    kinds: tuple[tuple[float | None, bool], ...]  # each layer: theta or None, is it scaled
    channels: int  # how many are rotated
    scaling: RopeScaling | None

    def __call__(
        self, x_btknd: jax.Array, positions_bt: jax.Array, number: jax.Array | int | None
    ) -> jax.Array:
        """Returns x rotated by the positions of its tokens, in layer `number` of the model."""
        distinct = list(dict.fromkeys(self.kinds))
        if len(distinct) == 1:
            return turn(x_btknd, positions_bt, *self._of_kind(*distinct[0]))
        frequency_nh, scale_n = zip(*(self._of_kind(*kind) for kind in distinct), strict=True)
        kind = kind_of(self.kinds, number)
        frequency_h = jnp.stack(frequency_nh)[kind]
        return turn(x_btknd, positions_bt, frequency_h, jnp.array(scale_n)[kind])

    def _of_kind(self, theta: float | None, is_scaled: bool) -> tuple[jax.Array, float]:
        """Returns (frequencies, scale of cosines and sines) of one kind of layer."""
        if theta is None:
            return jnp.zeros(self.channels // 2, jnp.float32), 1.0
        frequency_h = frequencies(theta, self.channels)
        if not is_scaled or self.scaling is None:
            return frequency_h, 1.0
        return slowed(frequency_h, self.scaling, theta), self.scaling.amplitude


def make_rotation(config: TransformerConfig) -> Rotation | None:
    """Returns the rotation of queries and keys, or None if no layer has rotary positions."""
    kinds = tuple((kind.rope_theta, kind.is_scaled) for kind in config.layer_kinds)
    if all(theta is None for theta, _ in kinds):
        return None
    return Rotation(kinds, config.rope_dim, config.rope_scaling)


def turn(
    x_btknd: jax.Array,
    positions_bt: jax.Array,
    frequency_h: jax.Array,
    scale: jax.Array | float = 1.0,
) -> jax.Array:
    """Rotates the first 2 h channels of x in float32, h pairs; the rest do not change."""
    turned = 2 * frequency_h.shape[0]
    if turned < x_btknd.shape[-1]:
        first = turn(x_btknd[..., :turned], positions_bt, frequency_h, scale)
        return jnp.concatenate((first, x_btknd[..., turned:]), -1)
    angle = (positions_bt[..., None].astype(jnp.float32) * frequency_h)[:, :, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if not isinstance(scale, float) or scale != 1:
        cos, sin = cos * scale, sin * scale
    first, second = jnp.split(x_btknd.astype(jnp.float32), 2, axis=-1)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    return jnp.concatenate((turned_first, turned_second), -1).astype(x_btknd.dtype)


def frequencies(theta: float, channels: int) -> jax.Array:
    """Returns theta ** (-2 i / channels) of each pair i, float32 [channels / 2]."""
    half = channels // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def slowed(frequency_h: jax.Array, scaling: RopeScaling, theta: float) -> jax.Array:
    """Returns the frequencies of theta after scaling, float32 [h]. `RopeScaling` lists the kinds.

    llama3 is that of Llama 3.1: of a frequency with r rotations in the original length the share
    (r - low_factor) / (high_factor - low_factor) is not divided; with equal factors all or none.
    """
    divided = frequency_h / scaling.factor
    if scaling.kind == "linear":
        return divided
    if scaling.kind == "proportional":
        pairs = frequency_h.shape[0]
        return jnp.where(jnp.arange(pairs) < int(scaling.share * pairs), divided, 0)
    if scaling.kind == "longrope":
        return frequency_h / jnp.array(scaling.divisors, jnp.float32)
    assert scaling.original_length is not None, "the settings ask for it"
    if scaling.kind == "llama3":
        turns = frequency_h * (scaling.original_length / (2 * math.pi))
        if scaling.high_factor == scaling.low_factor:
            unscaled = (turns >= scaling.low_factor).astype(jnp.float32)
        else:
            unscaled = (turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
            unscaled = jnp.clip(unscaled, 0, 1)
    else:
        unscaled = 1 - _yarn_ramp(frequency_h.shape[0], scaling, theta)
    return (1 - unscaled) * divided + unscaled * frequency_h


def _yarn_ramp(pairs: int, scaling: RopeScaling, theta: float) -> jax.Array:
    """Returns the share of each frequency that is divided, float32 [pairs] (arXiv:2309.00071).

    It rises from the pair that rotates `beta_fast` times in the original length to the one that
    rotates `beta_slow` times.
    """
    length = scaling.original_length
    assert length is not None, "the settings ask for it"
    channels = 2 * pairs

    def pair_of(turns: float) -> float:
        log_wave = math.log(length / (2 * math.pi * turns))
        return channels * log_wave / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    if low == high:
        high += 0.001
    return jnp.clip((jnp.arange(pairs, dtype=jnp.float32) - low) / (high - low), 0, 1)
