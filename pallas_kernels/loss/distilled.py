"""`linear_distillation`: the loss of a student beside a teacher, a chunk of tokens at a time.

The logits of both exist for one chunk only, and each device has those of its own rows of the two
tables. As in `linear_cross_entropy`, the gradients of the student are computed along with the loss.

Letters: b sequences, t time, e width of the student, f width of the teacher, v rows of a table on
this device, n parts.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.loss.api import einsum_in_float32, shape_logits, sums_of_parts
from pallas_kernels.loss.chunks import CHUNK_LOGITS, chunk_count, cut, join, pad_time


class Head(NamedTuple):
    """The parts of one model's logits: hidden states, a table, and the shape of their product.

    x: [b, t, width]. weight: [v, width]. `scale` and `softcap`: as in `linear_cross_entropy`.
    """

    x: jax.Array
    weight: jax.Array
    scale: float = 1.0
    softcap: float | None = None


class _Options(NamedTuple):
    chunks: int
    temperature: float
    share: float
    axis_name: tuple[str, ...]
    vocab: int | None
    student: tuple[float, float | None]  # scale and softcap
    teacher: tuple[float, float | None]


def linear_distillation(  # noqa: PLR0913 - the question has as many parts
    student: Head,
    teacher: Head,
    targets_bt: jax.Array,
    *,
    mask_bt: jax.Array,
    temperature: float,
    share: float,
    axis_name: tuple[str, ...] = (),
    vocab: int | None = None,
    part_bn: jax.Array | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[jax.Array, jax.Array]:
    """Returns the cross-entropy and the loss against the teacher, sums of mask x loss over tokens.

    Both are float32. With p and q, the softmax of the teacher's and of the student's logits over T,
    the second is T^2 KL(p || q) (arXiv:1503.02531, but for the teacher's entropy, a constant: so
    it is 0 where both agree). T^2 makes up for gradients that fall by it.

    The derivative of the first result is that of (1 - share) x cross-entropy + share x T^2 KL; the
    second is a constant to differentiation, and so are the teacher and the mask.

    Args:
      temperature: T, above 0.
      share: of the loss against the teacher, in (0, 1].
      axis_name: mesh axes that split the rows of both tables alike, inside a shard_map that is
        manual over them. The sums are whole on every device; the gradient of x is partial: psum it.
      vocab: rows of the tables that count, from the first, over all devices.
      part_bn: `parts` of `linear_cross_entropy`; the sums of the parts follow the whole sum, in
        both results: [1 + n].
      chunk_logits: at most this many logits of both models exist at once, but at least those of one
        time step.
    """
    devices = jax.lax.psum(1, axis_name) if axis_name else 1
    batch, time = targets_bt.shape
    rows = student.weight.shape[0]
    if teacher.weight.shape[0] != rows:
        raise ValueError(
            f"linear_distillation: tables of {rows} and {teacher.weight.shape[0]} rows"
        )
    chunks = chunk_count(batch, time, 2 * rows * devices, chunk_logits)
    # The mask of padding is 0.
    arrays = pad_time(chunks, student.x, teacher.x, targets_bt, mask_bt)
    shapes = (student.scale, student.softcap), (teacher.scale, teacher.softcap)
    options = _Options(chunks, temperature, share, axis_name, vocab, *shapes)
    tables = (student.weight, jax.lax.stop_gradient(teacher.weight))
    return _sums(options, *tables, *arrays, part_bn)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(
    options: _Options, weight_ve, teacher_vf, x_bte, teacher_btf, targets_bt, mask_bt, part_bn
):
    def step(sums, chunk):
        found = _chunk_losses(options, weight_ve, teacher_vf, *chunk)
        return jax.tree.map(jnp.add, sums, found.sums(chunk[-1], part_bn)), None

    chunks = cut(options.chunks, x_bte, teacher_btf, targets_bt, mask_bt)
    return jax.lax.scan(step, _no_sums(part_bn), chunks)[0]


def _forward(
    options: _Options, weight_ve, teacher_vf, x_bte, teacher_btf, targets_bt, mask_bt, part_bn
):
    """Returns `_sums`, and the gradients of student and table but for the cotangent's factor."""

    def step(carry, chunk):
        sums, dweight_ve = carry
        x_bte, _, _, mask_bt = chunk
        found = _chunk_losses(options, weight_ve, teacher_vf, *chunk)
        counts = mask_bt[..., None] != 0  # values that do not count may be NaN
        dlogits_btv = jnp.where(counts, found.gradient_btv * mask_bt[..., None], 0)
        dlogits_btv = dlogits_btv.astype(x_bte.dtype)
        x_bte = jnp.where(counts, x_bte, 0)
        dx_bte = einsum_in_float32("btv,ve->bte", dlogits_btv, weight_ve).astype(x_bte.dtype)
        dweight_ve = dweight_ve + einsum_in_float32("btv,bte->ve", dlogits_btv, x_bte)
        sums = jax.tree.map(jnp.add, sums, found.sums(mask_bt, part_bn))
        return (sums, dweight_ve), dx_bte

    start = (_no_sums(part_bn), jnp.zeros(weight_ve.shape, jnp.float32))
    chunks = cut(options.chunks, x_bte, teacher_btf, targets_bt, mask_bt)
    (sums, dweight_ve), dx_cbte = jax.lax.scan(step, start, chunks)
    dx_bte = join(dx_cbte, mask_bt.shape)
    if weight_ve.dtype != jnp.float16:  # float16 overflows at a sum over many tokens
        dweight_ve = dweight_ve.astype(weight_ve.dtype)
    # As in `linear_cross_entropy`: rounded here, not where the gradient is used next.
    kept = jax.lax.optimization_barrier((dx_bte, dweight_ve))
    return sums, (*kept, jnp.zeros((0,), weight_ve.dtype))


def _backward(options: _Options, kept, cotangents):
    dx_bte, dweight_ve, like_weight = kept
    dloss = cotangents[0]
    dloss = dloss[0] if dloss.ndim else dloss  # those of the parts are constants
    summed = jax.lax.psum(dloss, options.axis_name) if options.axis_name else dloss
    dx_bte = (summed * dx_bte.astype(jnp.float32)).astype(dx_bte.dtype)
    dweight_ve = (summed * dweight_ve.astype(jnp.float32)).astype(like_weight.dtype)
    return dweight_ve, None, dx_bte, None, None, None, None


_sums.defvjp(_forward, _backward)


def _no_sums(part_bn) -> tuple[jax.Array, jax.Array]:
    zero = jnp.float32(0) if part_bn is None else jnp.zeros(1 + part_bn.shape[1], jnp.float32)
    return zero, zero


class _ChunkLosses(NamedTuple):
    cross_entropy_bt: jax.Array
    distilled_bt: jax.Array
    gradient_btv: jax.Array  # of what is minimised, by the student's x weight^T

    def sums(self, mask_bt, part_bn) -> tuple[jax.Array, jax.Array]:
        """Returns the sums of both losses over the chunk, followed by those of the parts."""

        def total(loss_bt: jax.Array) -> jax.Array:
            whole = jnp.sum(jnp.where(mask_bt != 0, loss_bt * mask_bt, 0))
            if part_bn is None:
                return whole
            return jnp.concatenate([whole[None], sums_of_parts(loss_bt, mask_bt, part_bn)])

        return total(self.cross_entropy_bt), total(self.distilled_bt)


def _chunk_losses(
    options: _Options, weight_ve, teacher_vf, x_bte, teacher_btf, targets_bt, mask_bt
) -> _ChunkLosses:
    del mask_bt
    heat, share, axis_name = options.temperature, options.share, options.axis_name
    capped_btv = shape_logits(einsum_in_float32("bte,ve->btv", x_bte, weight_ve), *options.student)
    wanted_btv = einsum_in_float32("btf,vf->btv", teacher_btf, teacher_vf)
    wanted_btv = shape_logits(wanted_btv, *options.teacher)
    row, counts = _rows(options, capped_btv.shape[-1])
    logits_btv = jnp.where(counts, capped_btv, -jnp.inf)
    wanted_btv = jnp.where(counts, wanted_btv, -jnp.inf)
    is_target = counts & (row == targets_bt[..., None])

    # A shift of logits that changes nothing but rounding.
    most_2bt = jnp.stack([logits_btv.max(-1), wanted_btv.max(-1)])
    if axis_name:
        most_2bt = jax.lax.pmax(most_2bt, axis_name)
    below_btv, wanted_below_btv = (
        logits_btv - most_2bt[0, ..., None],
        wanted_btv - most_2bt[1, ..., None],
    )
    exp_btv = jnp.exp(below_btv)
    warm_btv = exp_btv if heat == 1 else jnp.exp(below_btv / heat)
    wanted_exp_btv = jnp.exp(wanted_below_btv / heat)
    apart_btv = jnp.where(counts, wanted_below_btv - below_btv, 0)
    sums_5bt = jnp.stack(
        [
            exp_btv.sum(-1),
            warm_btv.sum(-1),
            wanted_exp_btv.sum(-1),
            jnp.sum(jnp.where(is_target, below_btv, 0), -1),
            jnp.sum(wanted_exp_btv * apart_btv, -1),
        ]
    )
    if axis_name:
        sums_5bt = jax.lax.psum(sums_5bt, axis_name)
    total_bt, warm_bt, wanted_bt, of_target_bt, weighted_bt = sums_5bt

    cross_entropy_bt = jnp.log(total_bt) - of_target_bt
    distilled_bt = weighted_bt / wanted_bt / heat + jnp.log(warm_bt) - jnp.log(wanted_bt)
    apart_btv = warm_btv / warm_bt[..., None] - wanted_exp_btv / wanted_bt[..., None]
    gradient_btv = share * heat * apart_btv
    if share < 1:
        hard_btv = exp_btv / total_bt[..., None] - is_target
        gradient_btv = gradient_btv + (1 - share) * hard_btv
    scale, softcap = options.student
    if softcap is not None:
        gradient_btv = gradient_btv * (1 - jnp.square(capped_btv / softcap))
    if scale != 1:
        gradient_btv = gradient_btv * scale
    return _ChunkLosses(cross_entropy_bt, heat * heat * distilled_bt, gradient_btv)


def _rows(options: _Options, rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the number of each row on this device, and whether it is one of the vocabulary."""
    row = jnp.arange(rows)
    if options.axis_name:
        row = jax.lax.axis_index(options.axis_name) * rows + row
    return row, jnp.full(rows, True) if options.vocab is None else row < options.vocab
