"""SOAP: Adam in the eigenbases of the gradients of a matrix (Vyas et al. 2024, arXiv:2409.11321).

The two factors of Shampoo are the means over steps of G G^T [r, r] and of G^T G [c, c], where G is
the gradient [r, c]. Their eigenvectors are the columns of two orthogonal bases P and Q, in which
Adam sees the gradient, and from which its update comes back:

    update = P adam(P^T G Q) Q^T

The bases are those of the steps before. They begin as identities, with which SOAP is Adam. In the
first step and in every n-th after it each follows its factor by one power iteration: the orthogonal
part of factor P, by a QR. Adam's momentum is then rotated into the new bases; its mean of squares
stays, as in the paper.

Directions in which a matrix has had no gradient have no eigenvectors of their own: rounding would
choose them, and differently on each mesh. `LEAST` is added to the diagonal of a factor, so there a
basis stays what it was, and rounding turns it by no more than its share of `LEAST`.

A side that is too long has no basis: P or Q is the identity for good.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmdtrain.train.updates.transformations.orthogonal import orthogonal_part
from spmdtrain.train.updates.transformations.rarely import rarely

LEAST = 0.1  # of the mean of a factor's eigenvalues, added to each of them

_dot = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Eigenbasis(NamedTuple):
    """The rows or the columns of a matrix, n of them.

    Both arrays are [n, n], as vectors [n * n]: with the shape of the weight, some other code would
    take them for its moments, and pad and split them alike.
    """

    factor: jax.Array  # float32: the mean of the products of gradients
    vectors: jax.Array  # float32, orthogonal: a column for each direction


class SoapState(NamedTuple):
    """The optimizer state of one tensor; a side without a basis is None."""

    adam: Any  # its moments are those of the gradient in the bases, in the shape of the tensor
    rows: Eigenbasis | None
    columns: Eigenbasis | None


@dataclass(frozen=True)
class BasisSettings:
    """The settings of SOAP's bases: `every` and `beta` as optimizer.basis_every and basis_beta.

    `largest`: the length above which a side has none. Dim `row` of a tensor is the rows, and all
    others together the columns.
    """

    every: int
    beta: float
    largest: int
    row: int = 0


def soap(adam: optax.GradientTransformation, bases: BasisSettings) -> optax.GradientTransformation:
    """Returns SOAP; `adam` is `optax.scale_by_adam(...)`, which works in the bases."""

    def init(x: jax.Array) -> SoapState:
        rows = x.shape[bases.row]
        sides = (_initial(n, bases.largest) for n in (rows, x.size // rows))
        return SoapState(adam.init(x), *sides)

    def update(gradient: jax.Array, state: SoapState, x: Any) -> tuple[jax.Array, SoapState]:
        matrix = partial(_matrix, bases.row)
        tensor = partial(_tensor, bases.row, gradient.shape)
        g_rc = matrix(gradient).astype(jnp.float32)
        rows, columns = state.rows, state.columns
        rotated: Any
        moments: Any
        rotated, moments = adam.update(tensor(_rotated(g_rc, rows, columns)), state.adam, x)
        direction = _rotated_back(matrix(rotated), rows, columns)

        rows = _with_gradient(rows, g_rc, bases.beta)
        columns = _with_gradient(columns, g_rc.T, bases.beta)
        due = state.adam.count % bases.every == 0
        momentum = matrix(moments.mu).astype(jnp.float32)
        momentum, rows, columns = rarely(_refresh)(due, (momentum, rows, columns))
        return tensor(direction), SoapState(moments._replace(mu=tensor(momentum)), rows, columns)

    return of_each_tensor(init, update)


def of_each_tensor(init: Callable, update: Callable) -> optax.GradientTransformation:
    """Returns a transformation of any tree, given `init` and `update` of one tensor."""

    def update_all(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(updates)
        states = structure.flatten_up_to(state)
        values = [None] * len(leaves) if params is None else structure.flatten_up_to(params)
        results = list(map(update, leaves, states, values))
        return (
            structure.unflatten([new_update for new_update, _ in results]),
            structure.unflatten([after for _, after in results]),
        )

    return optax.GradientTransformation(lambda params: jax.tree.map(init, params), update_all)


def _matrix(row: int, x: jax.Array) -> jax.Array:
    """Returns a tensor as the matrix [r, c]."""
    return jnp.moveaxis(x, row, 0).reshape(x.shape[row], -1)


def _tensor(row: int, shape: tuple[int, ...], x_rc: jax.Array) -> jax.Array:
    """Inverts `_matrix`, for a tensor of `shape`."""
    rest = (*shape[:row], *shape[row + 1 :])
    return jnp.moveaxis(x_rc.reshape(-1, *rest), 0, row)


def _initial(n: int, largest: int) -> Eigenbasis | None:
    """Returns the initial basis of n rows or columns; None if it would be too large."""
    if n > largest:
        return None
    return Eigenbasis(jnp.zeros(n * n, jnp.float32), jnp.eye(n, dtype=jnp.float32).ravel())


def _square(x: jax.Array) -> jax.Array:
    """Returns a vector [n * n] as [n, n]."""
    return x.reshape(math.isqrt(x.size), -1)


def _rotated(x_rc: jax.Array, rows: Eigenbasis | None, columns: Eigenbasis | None) -> jax.Array:
    """Rotates a matrix into the bases: P^T x Q."""
    if rows is not None:
        x_rc = _dot(_square(rows.vectors).T, x_rc)
    return x_rc if columns is None else _dot(x_rc, _square(columns.vectors))


def _rotated_back(
    x_rc: jax.Array, rows: Eigenbasis | None, columns: Eigenbasis | None
) -> jax.Array:
    """Inverts `_rotated`: P x Q^T."""
    if rows is not None:
        x_rc = _dot(_square(rows.vectors), x_rc)
    return x_rc if columns is None else _dot(x_rc, _square(columns.vectors).T)


def _with_gradient(side: Eigenbasis | None, g_nm: jax.Array, beta: float) -> Eigenbasis | None:
    """Returns the side after its factor has absorbed a gradient given by its rows."""
    if side is None:
        return None
    product = _dot(g_nm, g_nm.T).ravel()
    return side._replace(factor=beta * side.factor + (1 - beta) * product)


def _refresh(
    in_old_bases: tuple[jax.Array, Eigenbasis | None, Eigenbasis | None],
) -> tuple[jax.Array, Eigenbasis | None, Eigenbasis | None]:
    """Moves both bases by one power iteration, and rotates the momentum into them."""
    momentum, *before = in_old_bases
    rows, columns = map(_power_iteration, before)
    plain = _rotated_back(momentum, *before)
    return _rotated(plain, rows, columns), rows, columns


def _power_iteration(side: Eigenbasis | None) -> Eigenbasis | None:
    """Returns the side with its basis one power iteration closer to its factor's eigenvectors."""
    if side is None:
        return None
    factor, basis = _square(side.factor), _square(side.vectors)
    mean = jnp.mean(jnp.diagonal(factor))
    of_one = factor / jnp.where(mean == 0, 1, mean)
    orthogonal = orthogonal_part(_dot(of_one, basis) + LEAST * basis)
    return side._replace(vectors=orthogonal.ravel())
