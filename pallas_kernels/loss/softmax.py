"""Computes a chunk's loss and the gradient of its logits in one pass over memory, on Triton.

A program owns one token. It reads the token's logits once to find the softmax's denominator, and
again, from the cache, to write the gradient; in bfloat16 that takes the place of the logits.

Letters: n tokens, v rows of the weight.
"""

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends import triton
from pallas_kernels.backends.triton import LOG2E, load_masked, next_power_of_two, store_masked
from pallas_kernels.calls import LossCall
from pallas_kernels.choose import no_64_bits, no_gpu

# By bytes of a logit: how many of them a program reads at a time, and its warps of 32 threads. So
# many programs fill a core that the rows in flight, which are read twice, stay in the L2 cache.
TILES = {2: (4096, 16), 4: (8192, 16)}
TOGETHER = 4  # blocks whose logits share one new maximum
LOWEST = float(jnp.finfo(jnp.float32).min)  # in place of logits that do not count


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
    size, warps = TILES[products_nv.dtype.itemsize]
    size = min(size, next_power_of_two(v))
    row = pl.BlockSpec((None, v), lambda i: (i, 0))
    one = pl.BlockSpec((1,), lambda i: (i,))
    run = triton.call(
        partial(_kernel, shaping, v, size),
        grid=(n,),
        inputs=[row, one, one],
        outputs=[
            (jax.ShapeDtypeStruct((n, v), dtype), row),
            (jax.ShapeDtypeStruct((n,), jnp.float32), one),
            (jax.ShapeDtypeStruct((n,), jnp.float32), one),
        ],
        warps=warps,
        stages=1,
        interpret=interpret,
        name="softmax_gradient",
        aliases={0: 0} if products_nv.dtype == dtype else {},
    )
    return run(products_nv, targets_n, mask_n)


@dataclass(frozen=True)
class _Block:
    """Some rows of the weight, from `start` on.

    In a cut block some rows do not exist, or do not count.
    """

    start: Any
    size: int
    rows: int  # that exist
    vocab: int  # rows that count
    is_cut: bool

    @property
    def row(self) -> jax.Array:
        return self.start + jnp.arange(self.size)

    def at(self, ref):
        return ref.at[pl.ds(pl.multiple_of(self.start, self.size), self.size)]

    @property
    def exists(self) -> jax.Array | None:
        return self.row < self.rows if self.is_cut else None

    def counted(self, x: jax.Array, otherwise: float) -> jax.Array:
        return jnp.where(self.row < self.vocab, x, otherwise) if self.is_cut else x


def _kernel(shaping: Shaping, rows: int, size: int, *refs):
    products_ref, target_ref, mask_ref, gradient_ref, lse_ref, expected_ref = refs
    vocab, smoothing, z_loss, scale, softcap = shaping
    target, mask = target_ref[0], mask_ref[0]

    def shaped(products):
        """Returns logits, and their derivative by the products."""
        scaled = products.astype(jnp.float32) * scale
        if softcap is None:
            return scaled, scale
        capped = jnp.tanh(scaled / softcap)
        return softcap * capped, scale * (1 - capped * capped)

    def add(blocks, sums):
        # Each lane has a softmax of its own. Powers of 2 are the GPU's own instruction.
        largest, denominator, total = sums
        powers = []
        for block in blocks:
            logits, _ = shaped(load_masked(block.at(products_ref), block.exists))
            powers.append(block.counted(logits * LOG2E, LOWEST))
            if smoothing:
                total += block.counted(logits, 0.0)
        new = reduce(jnp.maximum, powers, largest)
        denominator *= jnp.exp2(largest - new)
        return new, sum((jnp.exp2(power - new) for power in powers), denominator), total

    zeros = jnp.zeros(size, jnp.float32)
    start = zeros + LOWEST, zeros, zeros if smoothing else jnp.float32(0)
    largest, denominator, total = _over_blocks(add, start, rows, vocab, size)
    top = largest.max()
    power = top + jnp.log2((denominator * jnp.exp2(largest - top)).sum())
    lse = power / LOG2E
    lse_ref[0] = lse
    has_row = (target >= 0) & (target < vocab)
    at_target = products_ref.at[pl.ds(jnp.where(has_row, target, 0), 1)]
    expected = shaped(load_masked(at_target, has_row[None]).sum())[0]
    expected = (1 - smoothing) * jnp.where(has_row, expected, 0.0)
    expected_ref[0] = expected + smoothing / vocab * total.sum() if smoothing else expected
    of_probability = mask * (1 + 2 * z_loss * lse)

    def write(blocks, _):
        for block in blocks:
            logits, derivative = shaped(load_masked(block.at(products_ref), block.exists))
            gradient = of_probability * jnp.exp2(logits * LOG2E - power)
            is_in = (target >= block.start) & (target < block.start + size)
            gradient = jax.lax.cond(is_in, partial(without_target, block), lambda x: x, gradient)
            if smoothing:
                gradient -= mask * smoothing / vocab
            gradient = block.counted(gradient * derivative, 0.0).astype(gradient_ref.dtype)
            store_masked(block.at(gradient_ref), gradient, block.exists)

    def without_target(block, gradient):
        return gradient - jnp.where(block.row == target, mask * (1 - smoothing), 0.0)

    def write_zeros(blocks, _):
        for block in blocks:
            nothing = jnp.zeros(size, gradient_ref.dtype)
            store_masked(block.at(gradient_ref), nothing, block.exists)

    @pl.when(mask != 0)
    def _():
        _over_blocks(write, None, rows, vocab, size)

    @pl.when(mask == 0)  # what does not count may be NaN
    def _():
        _over_blocks(write_zeros, None, rows, vocab, size)


def _over_blocks(body, carry: Any, rows: int, vocab: int, size: int) -> Any:
    """Returns the carry after `body(blocks, carry)` for all blocks, TOGETHER of them at a time.

    The last ones are cut.
    """
    whole = vocab // size
    grouped = whole - whole % TOGETHER
    spans = ((0, grouped, TOGETHER), (grouped, whole, 1), (whole, pl.cdiv(rows, size), 1))
    for first, end, together in spans:
        if first == end:
            continue

        def turn(i, carry, first=first, together=together):
            starts = [(first + i * together + j) * size for j in range(together)]
            is_cut = first == whole
            return body([_Block(start, size, rows, vocab, is_cut) for start in starts], carry)

        carry = jax.lax.fori_loop(0, (end - first) // together, turn, carry)
    return carry
