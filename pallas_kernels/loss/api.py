"""`linear_cross_entropy`: the unembedding matmul and its loss, a chunk of tokens at a time.

There is no kernel here: XLA's matmuls do the work, and a scan over chunks saves the memory.

Letters: b tokens before the time dim, t time, e embed, v rows of the weight on this device.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import (
    as_number,
    as_whole,
    check_arrays,
    check_flag,
    check_floating,
    check_ids,
)
from pallas_kernels.calls import LossCall
from pallas_kernels.choose import INTERPRET, VARIANT, choose, device_kind, not_interpretable
from pallas_kernels.gpus import generation
from pallas_kernels.loss import softmax
from pallas_kernels.loss.chunks import (
    CHUNK_LOGITS,
    chunk_count,
    cut,
    join,
    pad_time,
    sum_over_chunks,
)
from pallas_kernels.partition import refuse_checked_vma


def linear_cross_entropy(  # noqa: PLR0913 - the question has as many parts
    x: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    mask: jax.Array | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    axis_name: str | tuple[str, ...] = (),
    vocab: int | None = None,
    chunk_logits: int | None = None,
    with_z_loss: bool = False,
    parts: jax.Array | None = None,
    is_local: bool = False,
    logits_dtype: str = "float32",
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Sums mask x (-log softmax(logits)[target] + z_loss x lse^2) over tokens.

    The logits are x weight^T, scaled and capped. lse is the logarithm of the softmax's denominator;
    the result is a float32 scalar. Under differentiation the gradients are computed along with the
    loss, from the same logits, and kept in place of them; the weight's is accumulated in float32.

    Args:
      x: [..., time, embed].
      weight: [vocabulary, embed].
      targets: integers [..., time]. One outside the vocabulary counts as if its logit were 0.
      mask: [..., time], the weight of each token; 1 unless given.
      ignore_index: tokens with this target have weight 0.
      label_smoothing: this share of the target probability is spread over the whole vocabulary
        (arXiv:1512.00567).
      z_loss: keeps lse near 0 (arXiv:2204.02311).
      scale: of the logits, above 0.
      softcap: logits x, scaled, become softcap * tanh(x / softcap).
      axis_name: mesh axes that split the rows of the weight, inside a shard_map that is manual
        over them. Targets count over all rows. The loss is whole on every device, and cotangents
        are summed over these axes; the gradient of x is partial: psum it, as that of any input
        that is whole along them.
      vocab: rows of the weight that count, from the first, over all devices. The rest is
        padding: it has no part in the softmax and no gradient. Default: all count.
      chunk_logits: at most this many logits exist at once, but at least those of one time
        step. Default: 2^26, or fewer if that was measured to be faster. Of n chunks, chunk i takes
        the times i, i + n, i + 2n, ..., so that a time dim that is split over devices stays split.
      with_z_loss: also return the part of the sum that is z-loss, to be reported. It is a constant
        to differentiation: its gradient is in that of the sum.
      parts: [..., n], how much of each sequence belongs to each of n parts, as 0 or 1: also return,
        last, each part's sum without z-loss, float32 [n]. It is a constant to
        differentiation too.
      is_local: nothing but manual mesh axes splits x. Its tokens may then be joined to one dim,
        which spares XLA's CPU backend a transposed copy of the logits' gradient.
      logits_dtype: "float32", or "bfloat16", which halves the memory of a chunk and rounds each
        logit by up to 2^-9 of itself.
      implementation: a name of `candidates()`: it computes the loss of a chunk from its logits, and
        sets the default of chunk_logits.

    Raises:
      ValueError: the arguments do not fit together.
    """
    _check(x, weight, targets, mask, parts)
    refuse_checked_vma("linear_cross_entropy", x, weight, targets, mask)
    label_smoothing = as_number(_OP, "label_smoothing", label_smoothing, 0)
    z_loss = as_number(_OP, "z_loss", z_loss, 0)
    if label_smoothing >= 1:
        raise ValueError(f"{_OP}: label_smoothing={label_smoothing} is a share below 1")
    scale = as_number(_OP, "scale", scale, 0)
    if not scale:
        raise ValueError(f"{_OP}: scale=0 must be above 0")
    if softcap is not None:
        softcap = as_number(_OP, "softcap", softcap, 0)
        if not softcap:
            raise ValueError(f"{_OP}: softcap=0 must be above 0; None: no cap")
    if chunk_logits is not None:
        chunk_logits = as_whole(_OP, "chunk_logits", chunk_logits, 1, 2**62)
    check_flag(_OP, "with_z_loss", with_z_loss)
    check_flag(_OP, "is_local", is_local)
    if logits_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"{_OP}: logits_dtype={logits_dtype!r:.60} is not float32 or bfloat16")
    axis_name = _check_axes(axis_name)
    if ignore_index is not None:
        ignore_index = as_whole(_OP, "ignore_index", ignore_index, -(2**31))
    if vocab is not None:
        most = 2**31 - 1 if axis_name else weight.shape[0]
        vocab = as_whole(_OP, "vocab", vocab, 1, most)
    mask = jnp.ones(targets.shape, jnp.float32) if mask is None else mask.astype(jnp.float32)
    if ignore_index is not None:
        mask = jnp.where(targets == ignore_index, 0, mask)
    time, width = x.shape[-2:]
    x_bte = x.reshape(-1, time, width)
    targets_bt = targets.reshape(-1, time)
    mask_bt = mask.reshape(-1, time)
    is_whole = is_local and not axis_name
    name = _chosen(x_bte, weight, logits_dtype, is_whole, implementation)
    interpret = name.endswith(INTERPRET)
    name = name.removesuffix(INTERPRET)
    if chunk_logits is None:
        chunk_logits = _logits_of_chunk(name)
    chunks = chunk_count(x_bte.shape[0], time, weight.shape[0], chunk_logits)
    # The mask of padding is 0.
    x_bte, targets_bt, mask_bt = pad_time(chunks, x_bte, targets_bt, mask_bt)
    options = _Options(
        *(chunks, label_smoothing, z_loss, axis_name, vocab, scale, softcap, is_local),
        *(name.partition(VARIANT)[0], interpret, logits_dtype),
    )
    part_bn = None if parts is None else parts.astype(jnp.float32).reshape(-1, parts.shape[-1])
    sums = _loss_compiled(options, x_bte, weight, targets_bt, mask_bt, part_bn)
    given = sums[:2] if with_z_loss else sums[:1]
    if parts is not None:
        given = (*given, sums[2])
    return given if len(given) > 1 else given[0]


_OP = "linear_cross_entropy"
# The logits of a chunk as shares of the default, which are tried when kernels are measured.
VARIANTS = {"half": 1 / 2, "quarter": 1 / 4, "double": 2, "fourfold": 4, "eightfold": 8}
KERNEL, XLA = "triton", "xla"


def candidates() -> tuple[str, ...]:
    """Returns the names of the implementations, each with every size of chunks."""
    sizes = ("", *(f"{VARIANT}{name}" for name in VARIANTS))
    return tuple(f"{base}{size}" for base in (XLA, KERNEL) for size in sizes)


def order(_: LossCall) -> tuple[str, ...]:
    """Returns the implementations, best first, if nothing was measured."""
    return best_on(device_kind())


def best_on(kind: str) -> tuple[str, ...]:
    """Returns the same for a GPU by jax's name: the kernel has been timed on Hopper alone."""
    return (f"{KERNEL}{VARIANT}fourfold", XLA) if generation(kind) == "hopper" else (XLA,)


def _chosen(
    x_bte: jax.Array,
    weight: jax.Array,
    logits_dtype: str,
    is_whole: bool,
    asked: str | None,
) -> str:
    """Returns the name of the implementation, with the size of its chunks.

    If one chunk is enough, there is nothing to choose.
    """
    batch, time, width = x_bte.shape
    rows = weight.shape[0]
    if asked is None and chunk_count(batch, time, rows, CHUNK_LOGITS) == 1:
        return XLA
    call = LossCall(
        batch=batch,
        time=time,
        width=width,
        rows=rows,
        dtype=str(x_bte.dtype),
        weight=str(weight.dtype),
        logits=logits_dtype,
        whole=is_whole,
    )
    of_kernel = partial(softmax.refusal, call)
    refusals = {
        name: of_kernel if name.startswith(KERNEL) else not_interpretable for name in candidates()
    }
    return choose(_OP, refusals, order(call), asked, call)


def _logits_of_chunk(name: str) -> int:
    """Returns the largest number of logits of a chunk."""
    return int(CHUNK_LOGITS * VARIANTS.get(name.partition(VARIANT)[2], 1))


def _check(x, weight, targets, mask, parts) -> None:
    check_arrays(_OP, x=x, weight=weight, targets=targets, mask=mask, parts=parts)
    for name, each in (("x", x), ("weight", weight), ("targets", targets)):
        if each is None:
            raise ValueError(f"{_OP}: {name} is an array, not None")
    fits = x.ndim >= 2 and x.shape[:-1] == targets.shape
    if not fits or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{_OP}: x {x.shape}, weight {weight.shape}, targets {targets.shape} are not "
            "[..., time, embed], [vocabulary, embed], [..., time]"
        )
    check_floating(_OP, "x", x)
    check_floating(_OP, "weight", weight)
    check_ids(_OP, "targets", targets)
    if mask is not None and mask.shape != targets.shape:
        raise ValueError(
            f"{_OP}: mask must have the shape of targets, {targets.shape}, not {mask.shape}"
        )
    sequences = targets.shape[:-1]
    if parts is not None and (parts.shape[:-1] != sequences or parts.shape[-1:] in ((), (0,))):
        raise ValueError(f"{_OP}: parts must be {[*sequences, 'n']}, not {parts.shape}")
    for name, each in (("mask", mask), ("parts", parts)):
        if each is not None and jnp.issubdtype(each.dtype, jnp.complexfloating):
            raise ValueError(f"{_OP}: {name} is {each.dtype}, not real")
    if 0 in x.shape or 0 in weight.shape:
        raise ValueError(f"{_OP}: x {x.shape} or weight {weight.shape} has no elements")


def _check_axes(axis_name) -> tuple[str, ...]:
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{_OP}: axis_name={axis_name!r:.60} is not the name of a mesh axis")
    return tuple(names)


class _Options(NamedTuple):
    chunks: int
    label_smoothing: float
    z_loss: float
    axis_name: tuple[str, ...]
    vocab: int | None
    scale: float
    softcap: float | None
    is_local: bool
    implementation: str
    interpret: bool
    logits_dtype: str


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(options: _Options, x_bte, weight_ve, targets_bt, mask_bt, part_bn):
    """Returns the loss, the part of it that is z-loss, and the losses of `part_bn` or None."""

    def of_chunk(*chunk):
        loss, _ = _chunk_loss(options, weight_ve, part_bn, *chunk)
        return loss.sums, None

    return sum_over_chunks(of_chunk, cut(options.chunks, x_bte, targets_bt, mask_bt))[0]


def _forward(options: _Options, x_bte, weight_ve, targets_bt, mask_bt, part_bn):
    """Returns `_loss`, and its gradients except for the factor of the cotangent."""

    def of_chunk(x_bte, targets_bt, mask_bt):
        compute = _chunk_by_kernel if options.implementation == KERNEL else _chunk_by_xla
        loss, dlogits = compute(options, weight_ve, part_bn, x_bte, targets_bt, mask_bt)
        counts = mask_bt[..., None] != 0  # values that do not count may be NaN
        x_bte = jnp.where(counts, x_bte, 0)
        dx_bte = einsum_in_float32("btv,ve->bte", dlogits, weight_ve).astype(x_bte.dtype)
        dweight_ve = _weight_gradient(options, dlogits, x_bte)
        return (loss.sums, dweight_ve), (dx_bte, loss.of_tokens_bt)

    chunks = cut(options.chunks, x_bte, targets_bt, mask_bt)
    (sums, dweight), (dx, dmask) = sum_over_chunks(of_chunk, chunks)
    dx = join(dx, mask_bt.shape)
    dmask = join(dmask, mask_bt.shape)
    if weight_ve.dtype != jnp.float16:  # float16 overflows at a sum over many tokens
        dweight = dweight.astype(weight_ve.dtype)
    # XLA would fuse this rounding with the next use of the gradient, after the backward pass of all
    # layers, and keep it in float32 until then.
    dx, dweight = jax.lax.optimization_barrier((dx, dweight))
    like_weight = jnp.zeros((0,), weight_ve.dtype)  # its dtype, for the backward pass
    return sums, (dx, dweight, dmask, like_weight)


def _weight_gradient(options: _Options, dlogits_btv, x_bte) -> jax.Array:
    """Returns the gradient of the weight [v, e] by a chunk, in float32."""
    if not options.is_local:
        return einsum_in_float32("btv,bte->ve", dlogits_btv, x_bte)
    of_tokens = (each.reshape(-1, each.shape[-1]) for each in (dlogits_btv, x_bte))
    return einsum_in_float32("nv,ne->ve", *of_tokens)


def _backward(options: _Options, kept, cotangents):
    dloss, *_ = cotangents  # the z-loss is in the total, and so are the parts
    dx, dweight, dmask, like_weight = kept
    summed = jax.lax.psum(dloss, options.axis_name) if options.axis_name else dloss
    dx = (summed * dx.astype(jnp.float32)).astype(dx.dtype)
    dweight = (summed * dweight.astype(jnp.float32)).astype(like_weight.dtype)
    # The mask is whole along axis_name, and each device counts its own loss.
    return dx, dweight, None, dloss * dmask, None


_loss.defvjp(_forward, _backward)
# Compiled once, also outside any jit.
_loss_compiled = jax.jit(_loss, static_argnums=(0,), inline=True)


def _products(options: _Options, x_bte: jax.Array, weight_ve: jax.Array) -> jax.Array:
    """Returns x weight^T [b, t, v], from which logits are made, in `options.logits_dtype`."""
    if options.logits_dtype == "float32":
        return einsum_in_float32("bte,ve->btv", x_bte, weight_ve)
    return jnp.einsum("bte,ve->btv", x_bte, weight_ve).astype(options.logits_dtype)


def _chunk_by_kernel(options: _Options, weight_ve, part_bn, x_bte, targets_bt, mask_bt):
    """Returns the same as `_chunk_by_xla`, by a kernel that reads the logits once."""
    products_btv = _products(options, x_bte, weight_ve)
    shape = products_btv.shape
    vocab = options.vocab or shape[-1]
    shaping = softmax.Shaping(
        vocab, options.label_smoothing, options.z_loss, options.scale, options.softcap
    )
    gradient, lse, expected = softmax.loss_and_gradient(
        shaping,
        products_btv.reshape(-1, shape[-1]),
        targets_bt.reshape(-1),
        mask_bt.reshape(-1),
        x_bte.dtype,
        interpret=options.interpret,
    )
    lse_bt, expected_bt = lse.reshape(mask_bt.shape), expected.reshape(mask_bt.shape)
    loss = _summed(options, part_bn, mask_bt, lse_bt, expected_bt)
    return loss, gradient.reshape(shape)


def _chunk_by_xla(
    options: _Options, weight_ve, part_bn, x_bte, targets_bt, mask_bt
) -> tuple["_ChunkLoss", jax.Array]:
    """Returns a chunk's loss, and the gradient of mask x loss by the products [b, t, v]."""
    loss, gradient = _chunk_loss(options, weight_ve, part_bn, x_bte, targets_bt, mask_bt)
    counts = mask_bt[..., None] != 0  # values that do not count may be NaN
    return loss, jnp.where(counts, gradient() * mask_bt[..., None], 0).astype(x_bte.dtype)


class _ChunkLoss(NamedTuple):
    # Sums over the chunk: the loss, the z-loss in it, and by `part_bn` the loss without z-loss.
    sums: tuple[jax.Array, jax.Array, jax.Array | None]
    of_tokens_bt: jax.Array  # before the mask


def _chunk_loss(
    options: _Options, weight_ve, part_bn, x_bte, targets_bt, mask_bt
) -> tuple[_ChunkLoss, Callable[[], jax.Array]]:
    """Returns a chunk's loss, and a function of no arguments: the gradient of each token's loss,
    before the mask, by the products [b, t, v].
    """
    _, smoothing, z_loss, axis_name, vocab, scale, softcap, *_ = options
    products_btv = _products(options, x_bte, weight_ve).astype(jnp.float32)
    logits_btv = shape_logits(products_btv, scale, softcap)
    rows = logits_btv.shape[-1]
    all_rows = rows
    row = jnp.arange(rows)
    if axis_name:
        all_rows = rows * jax.lax.psum(1, axis_name)
        row = jax.lax.axis_index(axis_name) * rows + row
    vocab = vocab or all_rows
    padded = vocab < all_rows
    capped_btv = logits_btv
    if padded:
        logits_btv = jnp.where(row < vocab, logits_btv, -jnp.inf)
    # The target's logit comes from a masked sum, not from a gather: that stays local where the
    # vocabulary is split.
    is_target = row == targets_bt[..., None]
    if padded:
        is_target &= row < vocab
    largest = logits_btv.max(-1)
    if axis_name:
        # It changes nothing but rounding, and a derivative of pmax does not exist.
        largest = jax.lax.pmax(jax.lax.stop_gradient(largest), axis_name)
    denominator = jnp.exp(logits_btv - largest[..., None]).sum(-1)
    expected = (1 - smoothing) * jnp.sum(jnp.where(is_target, logits_btv, 0), -1)
    if smoothing:
        expected = expected + smoothing / vocab * logits_btv.sum(-1, where=row < vocab)
    if axis_name:
        denominator, expected = jax.lax.psum((denominator, expected), axis_name)
    lse = largest + jnp.log(denominator)

    def products_gradient():
        probability = jnp.exp(logits_btv - lse[..., None])
        probability = probability * (1 + 2 * z_loss * lse)[..., None]
        gradient = probability - jnp.where(is_target, 1 - smoothing, 0) - smoothing / vocab
        if softcap is not None:
            gradient = gradient * (1 - jnp.square(capped_btv / softcap))
        if scale != 1:
            gradient = gradient * scale
        return jnp.where(row < vocab, gradient, 0) if padded else gradient

    return _summed(options, part_bn, mask_bt, lse, expected), products_gradient


def _summed(options: _Options, part_bn, mask_bt, lse_bt, expected_bt) -> _ChunkLoss:
    """Returns the loss of tokens with these denominators and expected logits."""

    def masked_sum(loss_bt):
        return jnp.sum(jnp.where(mask_bt != 0, loss_bt * mask_bt, 0))

    z_of_tokens = options.z_loss * lse_bt * lse_bt
    of_tokens = lse_bt - expected_bt + z_of_tokens
    total = masked_sum(of_tokens)
    z_total = masked_sum(z_of_tokens) if options.z_loss else jnp.float32(0)
    parts_n = None
    if part_bn is not None:
        without_z = of_tokens - z_of_tokens if options.z_loss else of_tokens
        parts_n = sums_of_parts(without_z, mask_bt, part_bn)
    return _ChunkLoss((total, z_total, parts_n), of_tokens)


def shape_logits(
    logits: jax.Array, scale: float | None = None, softcap: float | None = None
) -> jax.Array:
    """Returns logits x as softcap * tanh(scale * x / softcap); scale * x without a softcap."""
    if scale not in (None, 1):
        logits = logits * scale
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def sums_of_parts(loss_bt: jax.Array, mask_bt: jax.Array, part_bn: jax.Array) -> jax.Array:
    """Returns [n]: sums of mask x loss over the sequences of each part.

    A NaN stays in its own part.
    """
    of_sequence_b = jnp.sum(jnp.where(mask_bt != 0, loss_bt * mask_bt, 0), -1)
    return jnp.sum(jnp.where(part_bn > 0, of_sequence_b[:, None], 0), 0)


def einsum_in_float32(letters: str, *arrays: jax.Array) -> jax.Array:
    """Computes einsum with a float32 result; float32 operands are not rounded to TF32."""
    exact = arrays[0].dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else None
    return jnp.einsum(letters, *arrays, preferred_element_type=jnp.float32, precision=precision)
