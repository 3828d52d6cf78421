"""Computes a chunk's loss and the gradient of its logits in one pass over memory, on Triton.

A program owns one token. It reads the token's logits once to find their largest and the softmax's
denominator, and again, from the cache, to write the gradient; in bfloat16 that takes the place of
the logits. So few programs share a core that the logits which they read twice stay in the L2 cache.

Letters: n tokens, v rows of the weight.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends import triton
from pallas_kernels.backends.triton import load_masked, next_power_of_two, store_masked
from pallas_kernels.calls import LossCall
from pallas_kernels.choose import no_64_bits, no_gpu

BLOCK = 8192  # logits that a program holds at a time
WARPS = 32  # of a program: two of them fill a core


class Shaping(NamedTuple):
    """The options of `linear_cross_entropy` that shape a token's loss."""

    vocab: int  # rows that count
    label_smoothing: float
    z_loss: float
    scale: float
    softcap: float | None


def refusal(call: LossCall, interpreted: bool) -> str:
    """Says why the kernel cannot run; "" if it can."""
    if not call.whole:
        return "the whole vocabulary on each device, and is_local=True"
    return no_64_bits() or no_gpu(interpreted)


def loss_and_gradient(
    shaping: Shaping, products_nv, targets_n, mask_n, dtype, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (gradient [n, v], lse [n], expected logit [n]).

    The gradient, in `dtype`, is that of mask x loss by the products, 0 where the mask is 0. The
    loss of a token is lse - expected + z_loss x lse^2.
    """
    n, v = products_nv.shape
    block = min(BLOCK, next_power_of_two(v))
    row = pl.BlockSpec((None, v), lambda i: (i, 0))
    one = pl.BlockSpec((1,), lambda i: (i,))
    run = triton.call(
        partial(_kernel, shaping, v, block),
        grid=(n,),
        inputs=[row, one, one],
        outputs=[
            (jax.ShapeDtypeStruct((n, v), dtype), row),
            (jax.ShapeDtypeStruct((n,), jnp.float32), one),
            (jax.ShapeDtypeStruct((n,), jnp.float32), one),
        ],
        warps=WARPS,
        stages=1,
        interpret=interpret,
        name="softmax_gradient",
        aliases={0: 0} if products_nv.dtype == dtype else {},
    )
    return run(products_nv, targets_n, mask_n)


def _kernel(shaping: Shaping, rows: int, block: int, *refs):
    products_ref, target_ref, mask_ref, gradient_ref, lse_ref, expected_ref = refs
    vocab, smoothing, z_loss, scale, softcap = shaping
    target = target_ref[0]
    mask = mask_ref[0]
    blocks = pl.cdiv(rows, block)

    def place(i):
        return pl.ds(pl.multiple_of(i * block, block), block)

    def logits_of(i):
        """Returns the logits of a block, their derivative by the products, and their rows."""
        row = i * block + jnp.arange(block)
        products = load_masked(products_ref.at[place(i)], row < rows).astype(jnp.float32) * scale
        if softcap is None:
            return products, scale, row
        capped = jnp.tanh(products / softcap)
        return softcap * capped, scale * (1 - capped * capped), row

    def add(i, sums):
        largest, denominator, expected = sums
        logits, _, row = logits_of(i)
        counts = row < vocab
        new = jnp.maximum(largest, jnp.where(counts, logits, -jnp.inf).max())
        terms = jnp.where(counts, jnp.exp(logits - new), 0.0)
        denominator = denominator * jnp.exp(largest - new) + terms.sum()
        expected += (1 - smoothing) * jnp.where((row == target) & counts, logits, 0.0).sum()
        if smoothing:
            expected += smoothing / vocab * jnp.where(counts, logits, 0.0).sum()
        return new, denominator, expected

    start = jnp.float32(jnp.finfo(jnp.float32).min), jnp.float32(0), jnp.float32(0)
    largest, denominator, expected = jax.lax.fori_loop(0, blocks, add, start)
    lse = largest + jnp.log(denominator)
    lse_ref[0] = lse
    expected_ref[0] = expected
    of_probability = mask * (1 + 2 * z_loss * lse)

    def write(i, _):
        logits, derivative, row = logits_of(i)
        gradient = of_probability * jnp.exp(logits - lse)
        gradient -= jnp.where(row == target, mask * (1 - smoothing), 0.0)
        if smoothing:
            gradient -= mask * smoothing / vocab
        gradient = jnp.where((row < vocab) & (mask != 0), gradient * derivative, 0.0)
        store_masked(gradient_ref.at[place(i)], gradient.astype(gradient_ref.dtype), row < rows)
        return 0

    jax.lax.fori_loop(0, blocks, write, 0)
