"""`linear_cross_entropy`: the head's matmul and its loss, a chunk of tokens at a time. No kernel: XLA's matmuls do it.

Letters: b tokens before the time dim, t time, e embed, v rows of the weight that this device has.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.partition import unchecked

CHUNK_LOGITS = 2**26  # logits computed at once (256 MiB in float32) before more chunks are cut


def linear_cross_entropy(  # noqa: PLR0913 - the question has as many parts
    x: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    mask: jax.Array | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    split: tuple[str, ...] = (),
    chunk_logits: int = CHUNK_LOGITS,
) -> jax.Array:
    """Sum over tokens of mask x (-log softmax(x weight^T)[target] + z_loss x lse^2), a float32 scalar.

    x: [..., time, embed]; weight: [vocabulary, embed]; targets: integers [..., time]; mask: float weights of the
    tokens, 1 unless given. Tokens whose target is `ignore_index` count 0; other targets beyond the vocabulary are not
    looked for: they count as if their logit were 0. `label_smoothing`: that share of the wanted probability lies evenly
    on the whole vocabulary. lse is the logarithm of the softmax's denominator.

    At most `chunk_logits` logits are there at once (but those of one time step are). Chunk i takes the times i, i + n,
    i + 2n, ... so that a split time dim stays split. Under differentiation the gradients are made along with the loss,
    from the same logits, and kept instead of them: that of the weight gathers in float32.

    `split`: mesh axes, manual here, that the rows of the weight are split over; targets count over all rows. Loss and
    gradients are as if each of these devices had computed the whole: what they do with the loss counts together, and
    the gradient of x is this device's part, to be summed over `split`, as of any input that all of them share.
    """
    unchecked("linear_cross_entropy", x, weight, targets, mask)
    if (
        x.ndim < 2
        or x.shape[:-1] != targets.shape
        or weight.ndim != 2
        or weight.shape[1] != x.shape[-1]
    ):
        raise ValueError(
            f"linear_cross_entropy: x {x.shape}, weight {weight.shape}, targets {targets.shape} are not "
            "[..., time, embed], [vocabulary, embed], [..., time]"
        )
    if mask is not None and mask.shape != targets.shape:
        raise ValueError(
            f"linear_cross_entropy: mask must have the shape of targets, {targets.shape}, not {mask.shape}"
        )
    if not 0 <= label_smoothing < 1 or z_loss < 0:
        raise ValueError(
            f"linear_cross_entropy: 0 <= label_smoothing={label_smoothing} < 1, 0 <= z_loss={z_loss}"
        )
    mask = jnp.ones(targets.shape, jnp.float32) if mask is None else mask.astype(jnp.float32)
    if ignore_index is not None:
        mask = jnp.where(targets == ignore_index, 0, mask)
    if 0 in x.shape or isinstance(split, str):
        raise ValueError(
            f"linear_cross_entropy: x {x.shape} has no elements, or split={split!r} is no tuple of names"
        )
    time, width = x.shape[-2:]
    chunks = _chunks(math.prod(x.shape[:-2]), time, weight.shape[0], chunk_logits)
    flat = x.reshape(-1, time, width), targets.reshape(-1, time), mask.reshape(-1, time)
    if more := -time % chunks:  # with tokens that count 0
        flat = [jnp.pad(each, [(0, 0), (0, more), (0, 0)][: each.ndim]) for each in flat]
    return _loss_compiled(
        chunks, float(label_smoothing), float(z_loss), tuple(split), flat[0], weight, *flat[1:]
    )


def _chunks(batch: int, time: int, vocab: int, limit: int) -> int:
    """The smallest number of equal chunks of `time` with at most `limit` logits each, one time step at least; where no
    number up to twice that divides `time`, that one."""
    least = min(-(-batch * time * vocab // limit), time)
    return next((n for n in range(least, 2 * least + 1) if time % n == 0), least)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _loss(chunks, smoothing, z_loss, split, x_bte, weight_ve, targets_bt, mask_bt):
    part = partial(_of_chunk, smoothing, z_loss, split, weight_ve)

    def step(total, chunk):
        return total + part(*chunk)[0], None

    return jax.lax.scan(step, jnp.float32(0), _cut(chunks, x_bte, targets_bt, mask_bt))[0]


def _forward(chunks, smoothing, z_loss, split, x_bte, weight_ve, targets_bt, mask_bt):
    part = partial(_of_chunk, smoothing, z_loss, split, weight_ve)

    def step(carry, chunk):
        total, dweight = carry
        x, _, mask = chunk
        loss, each, slope = part(*chunk)
        counts = mask[..., None] != 0  # what does not may be NaN
        dlogits, x = (
            jnp.where(counts, slope() * mask[..., None], 0).astype(x.dtype),
            jnp.where(counts, x, 0),
        )
        dx = _dot("btv,ve->bte", dlogits, weight_ve).astype(x.dtype)
        return (total + loss, dweight + _dot("btv,bte->ve", dlogits, x)), (dx, each)

    start = jnp.float32(0), jnp.zeros(weight_ve.shape, jnp.float32)
    (total, dweight), (dx, each) = jax.lax.scan(
        step, start, _cut(chunks, x_bte, targets_bt, mask_bt)
    )
    dx, dmask = (
        jnp.moveaxis(part, 0, 2).reshape(*mask_bt.shape, *part.shape[3:]) for part in (dx, each)
    )
    if weight_ve.dtype != jnp.float16:  # which does not reach as far as a sum over many tokens
        dweight = dweight.astype(weight_ve.dtype)
    return total, (dx, dweight, dmask, jnp.zeros((0,), weight_ve.dtype))


def _backward(_chunks, _smoothing, _z_loss, split, kept, dloss):
    dx, dweight, dmask, weight = kept
    ours = jax.lax.psum(dloss, split) if split else dloss
    dx, dweight = (
        (ours * x.astype(jnp.float32)).astype(like.dtype)
        for x, like in ((dx, dx), (dweight, weight))
    )
    return (
        dx,
        dweight,
        None,
        dloss * dmask,
    )  # the mask is whole on every device of `split`: each counts its own


_loss.defvjp(_forward, _backward)
_loss_compiled = jax.jit(
    _loss, static_argnums=(0, 1, 2, 3), inline=True
)  # once, also outside any jit


def _cut(chunks: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[b, t, ...] -> [chunks, b, t / chunks, ...]"""
    return tuple(
        jnp.moveaxis(x.reshape(x.shape[0], -1, chunks, *x.shape[2:]), 2, 0) for x in arrays
    )


def _of_chunk(smoothing, z_loss, split, weight_ve, x_bte, targets_bt, mask_bt):
    """(sum of the losses, each token's loss without its mask, a function giving the slope of it by the logits)."""
    logits = _dot("bte,ve->btv", x_bte, weight_ve)
    rows = logits.shape[-1]
    vocab = rows * jax.lax.psum(1, split) if split else rows
    across = partial(jax.lax.psum, axis_name=split) if split else lambda x: x
    # A masked sum, not a gather: it stays local where the vocabulary is split.
    hit = (jax.lax.axis_index(split) * rows if split else 0) + jnp.arange(rows) == targets_bt[
        ..., None
    ]
    largest = logits.max(-1)
    largest = jax.lax.pmax(largest, split) if split else largest
    total = jnp.exp(logits - largest[..., None]).sum(-1)
    wanted = (1 - smoothing) * jnp.sum(jnp.where(hit, logits, 0), -1)
    wanted = wanted + smoothing / vocab * logits.sum(-1) if smoothing else wanted
    total, wanted = across((total, wanted))
    lse = largest + jnp.log(total)
    each = lse - wanted + z_loss * lse * lse

    def slope():
        probability = jnp.exp(logits - lse[..., None]) * (1 + 2 * z_loss * lse)[..., None]
        return probability - jnp.where(hit, 1 - smoothing, 0) - smoothing / vocab

    return jnp.sum(jnp.where(mask_bt != 0, each * mask_bt, 0)), each, slope


def _dot(letters: str, *arrays: jax.Array) -> jax.Array:
    exact = arrays[0].dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else None
    return jnp.einsum(letters, *arrays, preferred_element_type=jnp.float32, precision=precision)
