"""Muon's orthogonalised momentum, of each matrix that a weight holds.

See Jordan et al. 2024, kellerjordan.github.io/posts/muon. A weight with several matrices has one
momentum in its own shape, which is cut only for the update: the state, and so a checkpoint, does
not depend on how a weight is cut.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from spmdtrain.models.projection import Fused

RMS_OF_ADAM = 0.2  # rms of an AdamW update, to which Muon's are scaled (arXiv:2502.16982)


def muon(
    momentum: float, shape: tuple[int, ...], row: int, fused: Fused | None = None
) -> optax.GradientTransformation:
    """Returns Muon of one tensor of `shape`, with updates as large as those of AdamW.

    Dim `row` is the rows of a matrix, and all other dims together are the columns. Each matrix of
    `fused` is orthogonalised by itself, and scaled by the root of its own larger side.

    A tensor may have zeros behind those of `shape`, which pad it: they stay zero.
    """
    fused = fused or Fused((shape[-1],))
    others = tuple(dim for dim in range(len(shape)) if dim != row)
    of_matrix = contrib.MuonDimensionNumbers((row,), others)
    count = len(fused.sizes)
    rule = contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=[of_matrix] * count)
    scales = [_scale(shape, row, fused.dim, size) for size in fused.sizes]

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        cut = state._replace(mu=_cut(state.mu, fused))
        found: Any
        after: Any
        found, after = rule.update(_cut(updates, fused), cut)
        scaled = [scale * x for scale, x in zip(scales, found, strict=True)]
        return _joined(scaled, fused), after._replace(mu=_joined(after.mu, fused))

    return optax.GradientTransformation(rule.init, update)


def _scale(shape: tuple[int, ...], row: int, dim: int, size: int) -> float:
    """Returns the factor of the update of a matrix that is `size` of a dim of a tensor.

    All singular values of the update are about 1: its squares sum up to min(rows, columns).
    """
    own = list(shape)
    own[dim] = size
    rows = own[row]
    return RMS_OF_ADAM * max(rows, math.prod(own) // rows) ** 0.5


def _cut(x: jax.Array, fused: Fused) -> list[jax.Array]:
    """Returns the matrices of a tensor; the last one has the padding behind it."""
    *ends, _ = accumulate(fused.sizes)
    # The trials of a rule, when a run is set up, have smaller tensors: some matrices are empty.
    return jnp.split(x, [min(end, x.shape[fused.dim]) for end in ends], fused.dim)


def _joined(matrices: Sequence[jax.Array], fused: Fused) -> jax.Array:
    return jnp.concatenate(matrices, fused.dim)
