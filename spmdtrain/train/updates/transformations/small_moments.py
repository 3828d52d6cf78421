"""Stores an optimizer's moments in fewer bits between steps.

bfloat16: the moment, rounded to nearest. 8bit (after arXiv:2110.02861): integers in units of the
largest number of their block, 256 along the last dim. A momentum is spaced evenly. A mean of
squares is spaced logarithmically over 31 octaves, because rounding one to zero would make its
update huge; smaller ones become the smallest number. Zero stays exactly zero. Rounding to 8 bits is
stochastic, from (step, parameter, field): a change smaller than the spacing is kept on average,
while rounding to nearest would lose it every time.
"""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

BLOCK = 256  # numbers with one scale, along the last dim; one that is shorter is whole
PER_OCTAVE = 8  # logarithmic numbers in a factor of two
LARGEST = 127  # of an even code; a logarithmic one ends at 255

# Fields of optax's states that hold a moment of the parameter's shape.
SQUARES = {"nu"}
MOMENTA = {"mu", "trace"}


class Few(NamedTuple):
    """A moment in 8 bits."""

    codes: jax.Array  # in the moment's shape: int8 of a momentum, uint8 of a mean of squares
    scales: jax.Array  # float32 [..., blocks]: the largest size in each block


class SmallState(NamedTuple):
    steps: jax.Array  # int32, from which the next rounding draws
    inner: Any  # of the transformation, its moments in few bits


def with_float32_state(
    transformation: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Returns the transformation with a state stored in float32, for weights of any dtype."""

    def init(params: Any) -> Any:
        return transformation.init(jax.tree.map(lambda x: x.astype(jnp.float32), params))

    return optax.GradientTransformation(init, transformation.update)


def in_bfloat16(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the transformation with moments stored in bfloat16."""

    def narrow(name: str, x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16) if name in SQUARES | MOMENTA else x

    def init(params: Any) -> Any:
        return _by_field(narrow, transformation.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        wide = _by_field(
            lambda name, x: x.astype(jnp.float32) if name in SQUARES | MOMENTA else x, state
        )
        new_updates, after = transformation.update(updates, wide, params)
        return new_updates, _by_field(narrow, after)

    return optax.GradientTransformation(init, update)


def in_8_bits(
    transformation: optax.GradientTransformation, site: int
) -> optax.GradientTransformation:
    """Returns the transformation with moments stored in 8 bits.

    `site`: a number that distinguishes the parameter, from which rounding draws.
    """

    def init(params: Any) -> SmallState:
        inner = _by_field(lambda name, x: encoded(name, x, None), transformation.init(params))
        return SmallState(jnp.int32(0), inner)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, SmallState]:
        new_updates, after = transformation.update(updates, _by_field(decoded, state.inner), params)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), site), state.steps)

        def rounded(name: str, x: jax.Array) -> Any:
            # Were the draws of both moments the same, a momentum that is rounded up would go with
            # squares that are rounded down: the mean of many updates would be positive.
            return encoded(name, x, jax.random.fold_in(key, zlib.crc32(name.encode()) >> 1))

        inner = _by_field(rounded, after)
        return new_updates, SmallState(state.steps + 1, inner)

    return optax.GradientTransformation(init, update)


def encoded(name: str, x: jax.Array, key: jax.Array | None) -> Any:
    """Returns a moment of the field `name` in 8 bits; other leaves are returned unchanged.

    `key`: rounding draws from it; None: to nearest.
    """
    if name not in SQUARES | MOMENTA:
        return x
    blocks = _blocks(x.astype(jnp.float32))
    # Non-finite values become infinity: XLA's maximum may lose a NaN.
    largest = jnp.max(jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), jnp.inf), -1)
    share = blocks / jnp.where(largest == 0, 1, largest)[..., None]
    draws = 0.5 if key is None else jax.random.uniform(key, blocks.shape)
    if name in MOMENTA:
        codes = jnp.floor(share * LARGEST + draws).clip(-LARGEST, LARGEST).astype(jnp.int8)
    else:
        places = 255 + PER_OCTAVE * jnp.log2(jnp.where(share > 0, share, 1))
        below = jnp.floor(places)
        # In proportion to the number, not to its logarithm: the mean of many roundings would be too
        # large, and a mean that moves by a thousandth a step would settle 4 % above its squares.
        chance = (jnp.exp2((places - below) / PER_OCTAVE) - 1) / (2 ** (1 / PER_OCTAVE) - 1)
        codes = (below + (draws < chance)).clip(1, 255)
        codes = jnp.where(share > 0, codes, 0).astype(jnp.uint8)
    return Few(codes.reshape(x.shape), largest)


def decoded(name: str, few: Any) -> Any:
    """Inverts `encoded`, up to rounding: returns a float32 moment."""
    if not isinstance(few, Few):
        return few
    codes = _blocks(few.codes).astype(jnp.float32)
    if name in MOMENTA:
        share = codes / LARGEST
    else:
        share = jnp.where(codes > 0, jnp.exp2((codes - 255) / PER_OCTAVE), 0)
    return (share * few.scales[..., None]).reshape(few.codes.shape)


def _blocks(x: jax.Array) -> jax.Array:
    """Returns x [..., o] as [..., blocks, numbers of a block]."""
    last = x.shape[-1] if x.ndim else 1
    size = BLOCK if last % BLOCK == 0 else last
    return x.reshape(*x.shape[:-1], -1, size)


def _by_field(change: Callable[[str, Any], Any], state: Any) -> Any:
    """Returns the state with `change(field, leaf)` of each leaf; a `Few` is one leaf."""

    def leaf(path: tuple, x: Any) -> Any:
        names = [step.name for step in path if isinstance(step, jax.tree_util.GetAttrKey)]
        return change(names[-1] if names else "", x)

    return jax.tree_util.tree_map_with_path(leaf, state, is_leaf=lambda x: isinstance(x, Few))
