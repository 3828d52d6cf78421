"""Sums the losses of a student over its tokens, a chunk at a time, and its gradients with them.

For each token there is an array from its teacher: hidden states (distilled.py), or the likeliest
next tokens (saved.py). Each file computes the losses of a chunk; cutting into chunks, adding up and
the backward pass are the same, and are here.

Letters: b sequences, t time, e width of the student, v rows of its table on this device, n parts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.loss.api import einsum_in_float32, shape_logits, sums_of_parts
from pallas_kernels.loss.chunks import cut, join, pad_time, sum_over_chunks


class Head(NamedTuple):
    """The parts of one model's logits: hidden states, a table, and the shape of their product.

    x: [b, t, width]. weight: [v, width]. `scale` and `softcap`: as in `linear_cross_entropy`.
    """

    x: jax.Array
    weight: jax.Array
    scale: float = 1.0
    softcap: float | None = None


class Options(NamedTuple):
    """The static part of a student's losses.

    `of_chunk(options, weight_ve, table, x_bte, targets_bt, said)` returns the ChunkLosses. `said`
    is a tuple of the teacher's arrays [b, t, ...], `table` an array for all tokens, or None.
    """

    of_chunk: Callable[..., "ChunkLosses"]
    chunks: int
    temperature: float
    share: float
    axis_name: tuple[str, ...]
    vocab: int | None
    student: tuple[float, float | None]  # scale and softcap
    teacher: tuple[float, float | None] = (1.0, None)


class ChunkLosses(NamedTuple):
    """The losses of a chunk's tokens, and the gradient of the minimised loss."""

    cross_entropy_bt: jax.Array
    distilled_bt: jax.Array
    gradient_btv: jax.Array  # by the student's x weight^T

    def sums(self, mask_bt, part_bn) -> tuple[jax.Array, jax.Array]:
        """Returns the sums of both losses over the chunk, followed by those of the parts."""

        def total(loss_bt: jax.Array) -> jax.Array:
            whole = jnp.sum(jnp.where(mask_bt != 0, loss_bt * mask_bt, 0))
            if part_bn is None:
                return whole
            return jnp.concatenate([whole[None], sums_of_parts(loss_bt, mask_bt, part_bn)])

        return total(self.cross_entropy_bt), total(self.distilled_bt)


def sums_of_losses(
    options: Options,
    student: Head,
    table: Any,
    said: tuple[jax.Array, ...],
    targets_bt: jax.Array,
    mask_bt: jax.Array,
    part_bn: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of both losses over tokens; the derivative of the first is of both."""
    # The mask of padding is 0.
    x_bte, targets_bt, mask_bt, *said_bt = pad_time(
        options.chunks, student.x, targets_bt, mask_bt, *said
    )
    arrays = (x_bte, targets_bt, mask_bt, tuple(said_bt))
    return _sums(options, student.weight, table, *arrays, part_bn)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(options: Options, weight_ve, table, x_bte, targets_bt, mask_bt, said_bt, part_bn):
    def of_chunk(x_bte, targets_bt, mask_bt, *said_bt):
        found = options.of_chunk(options, weight_ve, table, x_bte, targets_bt, said_bt)
        return found.sums(mask_bt, part_bn), None

    return sum_over_chunks(of_chunk, cut(options.chunks, x_bte, targets_bt, mask_bt, *said_bt))[0]


def _forward(options: Options, weight_ve, table, x_bte, targets_bt, mask_bt, said_bt, part_bn):
    """Returns `_sums`, and the gradients of student and table without the cotangent's factor."""

    def of_chunk(x_bte, targets_bt, mask_bt, *said_bt):
        found = options.of_chunk(options, weight_ve, table, x_bte, targets_bt, said_bt)
        counts = mask_bt[..., None] != 0  # values that do not count may be NaN
        dlogits_btv = jnp.where(counts, found.gradient_btv * mask_bt[..., None], 0)
        dlogits_btv = dlogits_btv.astype(x_bte.dtype)
        x_bte = jnp.where(counts, x_bte, 0)
        dx_bte = einsum_in_float32("btv,ve->bte", dlogits_btv, weight_ve).astype(x_bte.dtype)
        dweight_ve = einsum_in_float32("btv,bte->ve", dlogits_btv, x_bte)
        return (found.sums(mask_bt, part_bn), dweight_ve), dx_bte

    chunks = cut(options.chunks, x_bte, targets_bt, mask_bt, *said_bt)
    (sums, dweight_ve), dx_cbte = sum_over_chunks(of_chunk, chunks)
    dx_bte = join(dx_cbte, mask_bt.shape)
    if weight_ve.dtype != jnp.float16:  # float16 overflows at a sum over many tokens
        dweight_ve = dweight_ve.astype(weight_ve.dtype)
    # As in `linear_cross_entropy`: rounded here, not where the gradient is used next.
    kept = jax.lax.optimization_barrier((dx_bte, dweight_ve))
    return sums, (*kept, jnp.zeros((0,), weight_ve.dtype))


def _backward(options: Options, kept, cotangents):
    dx_bte, dweight_ve, like_weight = kept
    dloss = cotangents[0]
    dloss = dloss[0] if dloss.ndim else dloss  # those of the parts are constants
    summed = jax.lax.psum(dloss, options.axis_name) if options.axis_name else dloss
    dx_bte = (summed * dx_bte.astype(jnp.float32)).astype(dx_bte.dtype)
    dweight_ve = (summed * dweight_ve.astype(jnp.float32)).astype(like_weight.dtype)
    return dweight_ve, None, dx_bte, None, None, None, None


_sums.defvjp(_forward, _backward)


class StudentLogits(NamedTuple):
    """The logits of a chunk, and which of its rows count."""

    capped_btv: jax.Array
    logits_btv: jax.Array  # the same, but -inf in rows that do not count
    is_target_btv: jax.Array
    counts: jax.Array  # [v]

    def gradient_of_products(
        self, options: Options, share: jax.Array, hard: Callable[[], jax.Array]
    ) -> jax.Array:
        """Returns the gradient by x weight^T, from that of the share of the teacher by logits.

        `hard()`: the gradient of the cross-entropy by logits.
        """
        gradient_btv = share
        if options.share < 1:
            gradient_btv = gradient_btv + (1 - options.share) * hard()
        scale, softcap = options.student
        if softcap is not None:
            gradient_btv = gradient_btv * (1 - jnp.square(self.capped_btv / softcap))
        if scale != 1:
            gradient_btv = gradient_btv * scale
        return gradient_btv


def logits_of_student(options: Options, weight_ve, x_bte, targets_bt) -> StudentLogits:
    """Returns the logits of a chunk of tokens."""
    capped_btv = shape_logits(einsum_in_float32("bte,ve->btv", x_bte, weight_ve), *options.student)
    row = jnp.arange(capped_btv.shape[-1]) + first_row(options.axis_name, capped_btv.shape[-1])
    counts = jnp.full(row.shape, True) if options.vocab is None else row < options.vocab
    logits_btv = jnp.where(counts, capped_btv, -jnp.inf)
    return StudentLogits(capped_btv, logits_btv, counts & (row == targets_bt[..., None]), counts)


def first_row(axis_name: tuple[str, ...], rows: int) -> jax.Array | int:
    """Returns the number of this device's first row among those of all devices."""
    return jax.lax.axis_index(axis_name) * rows if axis_name else 0
