"""Sums matrices over a mesh axis as products of two thin factors (PowerSGD, arXiv:1905.13727).

With M = the sum over the devices of gradient and error, and Q the right factor of the step before:

    P = orthonormal(M Q),  Q = M^T P,  sum = P Q^T = P P^T M

A device knows only its own part of M, but both products are linear in M: their parts are summed in
two all-reduces. The new error of a device is its part of M minus its share, 1/n, of the sum. So the
sum and the errors add up to M, and the sum depends on M alone: not on how many devices it is spread
over. Where mesh axes split the matrix itself, the products are also summed over the axes that split
their contracted dim; the result is that of the whole matrix.

A column of M Q that is nearly in the span of those before it holds no information: it becomes zero,
and the old column of Q stays for the next step. Otherwise rounding would choose its direction, or a
gradient of zeros would kill the column for good.

m: rows, p: columns, r: rank, a: dims that count separate matrices (layers, experts).
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmdtrain.parallel.axes import axes_of_dim

# A column counts as inside the span of those before it if a smaller part of it is outside.
LEAST_NEW = 1e-4

_dot = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@dataclass(frozen=True)
class LowRank:
    """The sum of matrices by factors of `rank` columns.

    The first `apart` dims of an array count matrices. Of the dims after them, dim `row` (from 0)
    holds the rows, and all others together the columns.
    """

    rank: int
    apart: int
    row: int

    def factor_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the right factors Q of an array: the columns keep their dims."""
        rest = shape[self.apart :]
        return (*shape[: self.apart], *rest[: self.row], *rest[self.row + 1 :], self.rank)

    def numbers(self, shape: Sequence[int]) -> int:
        """Returns how many numbers both factors of an array hold."""
        rows = self.rank * math.prod(shape[: self.apart]) * shape[self.apart + self.row]
        return rows + math.prod(self.factor_shape(shape))

    def factor_spec(self, spec: P) -> P:
        """Returns the spec of the right factors, given that of the array, one entry per dim."""
        return P(*self.factor_shape([*spec])[:-1], None)

    def first_factor(self, shape: Sequence[int], path: str) -> jax.Array:
        """Returns the right factors before the first step, drawn from the path, for tracing.

        They do not depend on the layout: all matrices of an array start with the same factor, and
        each row is drawn from its own key, so padding changes none.
        """
        of_all = self.factor_shape(shape)
        key = jax.random.key(zlib.crc32(path.encode()))
        rows = jnp.arange(math.prod(of_all[self.apart : -1]))
        drawn = jax.vmap(lambda row: jax.random.normal(jax.random.fold_in(key, row), of_all[-1:]))
        return jnp.broadcast_to(drawn(rows).reshape(of_all[self.apart :]), of_all)

    def sum(
        self, x: jax.Array, error: jax.Array, factor: jax.Array, axis: str, spec: P
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (the sum over the manual `axis`, new error, new right factors), float32.

        Every device along `axis` gets the same sum and factors, to the bit. `spec`, one entry per
        dim: how mesh axes, which are manual too, split the whole array that x is a part of.
        """
        row_axes, column_axes = self._axes(spec)
        m_amp = self._as_matrices(x.astype(jnp.float32) + error)
        shape = m_amp.shape[: self.apart]
        q_apr = factor.reshape(*shape, -1, self.rank)

        mq = _psum(_dot("...mp,...pr->...mr", m_amp, q_apr), (axis, *column_axes))
        p_amr = orthonormal(mq, row_axes)
        new_apr = _psum(_dot("...mp,...mr->...pr", m_amp, p_amr), (axis, *row_axes))
        sum_amp = _dot("...mr,...pr->...mp", p_amr, new_apr)
        unsent_amp = m_amp - sum_amp / jax.lax.axis_size(axis)

        # Columns of length 1: the products of later steps neither grow nor fade.
        length = _lengths(new_apr, column_axes)
        is_usable = jnp.isfinite(length) & (length > 0)
        next_apr = jnp.where(is_usable, new_apr / jnp.where(is_usable, length, 1), q_apr)
        back = partial(self._from_matrices, shape=x.shape)
        return back(sum_amp), back(unsent_amp), next_apr.reshape(factor.shape)

    def _axes(self, spec: P) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the mesh axes that split the rows, and those that split the columns."""
        parts = [axes_of_dim(part) for part in spec[self.apart :]]
        rows = parts.pop(self.row)
        columns = tuple(axis for part in parts for axis in part)
        return _of_several(rows), _of_several(columns)

    def _as_matrices(self, x: jax.Array) -> jax.Array:
        """Returns the array as matrices [*a, m, p]."""
        rows_first = jnp.moveaxis(x, self.apart + self.row, self.apart)
        return rows_first.reshape(*rows_first.shape[: self.apart + 1], -1)

    def _from_matrices(self, x_amp: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Inverts `_as_matrices`."""
        at = self.apart + self.row
        rest = (*shape[self.apart : at], *shape[at + 1 :])
        return jnp.moveaxis(x_amp.reshape(*x_amp.shape[: self.apart + 1], *rest), self.apart, at)


def orthonormal(x_amr: jax.Array, row_axes: tuple[str, ...] = ()) -> jax.Array:
    """Returns an orthonormal base of the columns; a column inside the span of others becomes 0.

    Gram-Schmidt, unrolled over the few columns, and each column twice, because one pass leaves
    rounding errors. `row_axes`: manual mesh axes that split the rows.
    """
    columns: list[jax.Array] = []
    for at in range(x_amr.shape[-1]):
        v_am1 = x_amr[..., at : at + 1]
        before = _lengths(v_am1, row_axes)
        for _ in range(2 if columns else 0):
            done = jnp.concatenate(columns, -1)
            along = _psum(_dot("...mi,...mo->...io", done, v_am1), row_axes)
            v_am1 = v_am1 - _dot("...mi,...io->...mo", done, along)
        after = _lengths(v_am1, row_axes)
        # Not finite: it must stay so, for the guards to see.
        is_inside = jnp.isfinite(before) & (after <= LEAST_NEW * before)
        columns.append(jnp.where(is_inside, 0, v_am1 / jnp.where(is_inside, 1, after)))
    return jnp.concatenate(columns, -1)


def _lengths(x_amr: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the length of each column, [*a, 1, r]; mesh axes `axes` split the rows."""
    return jnp.sqrt(_psum(jnp.sum(x_amr * x_amr, axis=-2, keepdims=True), axes))


def _psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


def _of_several(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes with several devices: XLA refuses a sum over one."""
    return tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)


def pays(shape: Sequence[int], row: int, rank: int) -> bool:
    """Returns True if both factors hold fewer numbers than the matrix, whose rows are dim `row`."""
    size = math.prod(shape)
    rows = shape[row]
    return rank * (rows + size // max(rows, 1)) < size
