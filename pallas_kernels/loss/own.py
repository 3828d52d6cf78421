"""`linear_token_loss`: the unembedding matmul and any loss of its logits, chunk by chunk.

It is slower and larger than `linear_cross_entropy`, whose gradient is known beforehand: here each
device has the logits of all rows, and the backward pass recomputes them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.loss.api import einsum_in_float32, shape_logits, sums_of_parts
from pallas_kernels.loss.chunks import (
    CHUNK_LOGITS,
    chunk_count,
    cut,
    join,
    pad_time,
    sum_over_chunks,
)

Losses = dict[str, jax.Array]
TokenLoss = Callable[[jax.Array, jax.Array], Losses]


def linear_token_loss(  # noqa: PLR0913 - the question has as many parts
    x_bte: jax.Array,
    weight_ve: jax.Array,
    targets_bt: jax.Array,
    loss: TokenLoss,
    *,
    mask_bt: jax.Array,
    scale: float = 1.0,
    softcap: float | None = None,
    axis_name: tuple[str, ...] = (),
    vocab: int | None = None,
    chunk_logits: int = CHUNK_LOGITS,
    part_bn: jax.Array | None = None,
) -> Losses:
    """Sums over tokens of mask x loss, float32 scalars by name; with `part_bn` vectors [1 + n].

    Args:
      x_bte, weight_ve, targets_bt, mask_bt: as in `linear_cross_entropy`; no integers but targets.
      loss: `loss(logits, targets) -> {name: losses}`, float32 logits [b, t, vocab], the others
        [b, t]. It is called with a part of the times at once, and traced.
      scale, softcap: of the logits, as in `linear_cross_entropy`.
      axis_name: mesh axes that split the rows of the weight, inside a shard_map that is manual
        over them. The sums are whole on every device; the gradient of x is partial: psum it.
      vocab: rows of the weight that count, from the first on, over all devices.
      chunk_logits: at most this many logits exist at once, but at least those of one time step.
      part_bn: `parts` of `linear_cross_entropy`; the sums of the parts follow the whole sum.
    """
    losses_of_chunk = _make_losses_of_chunk(loss, scale, softcap, axis_name, vocab)
    chunks = _chunks(x_bte, weight_ve, axis_name, chunk_logits)
    arrays = pad_time(chunks, x_bte, targets_bt, mask_bt)  # the mask of padding is 0

    @jax.checkpoint
    def chunk_losses(weight_ve, x_bte, targets_bt, mask_bt):
        losses = losses_of_chunk(weight_ve, x_bte, targets_bt, mask_bt)

        def sums(loss_bt):
            total = jnp.sum(jnp.where(mask_bt != 0, loss_bt * mask_bt, 0))
            if part_bn is None:
                return total
            parts_n = sums_of_parts(jax.lax.stop_gradient(loss_bt), mask_bt, part_bn)
            return jnp.concatenate([total[None], parts_n])

        return {name: sums(loss_bt) for name, loss_bt in losses.items()}

    def of_chunk(*chunk):
        return chunk_losses(weight_ve, *chunk), None

    return sum_over_chunks(of_chunk, cut(chunks, *arrays))[0]


def linear_token_losses(  # noqa: PLR0913 - the question has as many parts
    x_bte: jax.Array,
    weight_ve: jax.Array,
    targets_bt: jax.Array,
    loss: TokenLoss,
    *,
    mask_bt: jax.Array,
    scale: float = 1.0,
    softcap: float | None = None,
    axis_name: tuple[str, ...] = (),
    vocab: int | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> Losses:
    """Returns mask x loss of each token, float32 [b, t] by name.

    Arguments as in `linear_token_loss`.
    """
    losses_of_chunk = _make_losses_of_chunk(loss, scale, softcap, axis_name, vocab)
    chunks = _chunks(x_bte, weight_ve, axis_name, chunk_logits)
    arrays = pad_time(chunks, x_bte, targets_bt, mask_bt)
    padded = arrays[2].shape

    @jax.checkpoint
    def chunk_losses(weight_ve, x_bte, targets_bt, mask_bt):
        losses = losses_of_chunk(weight_ve, x_bte, targets_bt, mask_bt)
        return {
            name: jnp.where(mask_bt != 0, loss_bt * mask_bt, 0) for name, loss_bt in losses.items()
        }

    def step(carry, chunk):
        return carry, chunk_losses(weight_ve, *chunk)

    _, found = jax.lax.scan(step, None, cut(chunks, *arrays))
    return {name: join(x, padded)[:, : targets_bt.shape[1]] for name, x in found.items()}


def _chunks(
    x_bte: jax.Array, weight_ve: jax.Array, axis_name: tuple[str, ...], chunk_logits: int
) -> int:
    devices = jax.lax.psum(1, axis_name) if axis_name else 1
    rows = weight_ve.shape[0] * devices
    return chunk_count(x_bte.shape[0], x_bte.shape[1], rows, chunk_logits)


def _make_losses_of_chunk(
    loss: TokenLoss,
    scale: float,
    softcap: float | None,
    axis_name: tuple[str, ...],
    vocab: int | None,
) -> Callable[..., Losses]:
    """Returns `losses(weight_ve, x_bte, targets_bt, mask_bt)`, the losses of each token, [b, t] by
    name.
    """

    def losses_of_chunk(weight_ve, x_bte, targets_bt, mask_bt):
        x_bte = jnp.where((mask_bt != 0)[..., None], x_bte, 0)  # what does not count may be NaN
        logits_btv = einsum_in_float32("bte,ve->btv", x_bte, weight_ve)
        if axis_name:
            logits_btv = jax.lax.all_gather(logits_btv, axis_name, axis=2, tiled=True)
        logits_btv = shape_logits(logits_btv[..., :vocab], scale, softcap)
        return loss(logits_btv, targets_bt)

    return losses_of_chunk
