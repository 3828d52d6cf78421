"""Implements the norms on Triton.

Forward: a program normalises a block of whole rows. Backward: a fixed number of programs walk over
the blocks; each keeps its part of dscale and dbias in registers and writes it once, and XLA adds
the parts. So there are no atomics, and every sum has a fixed order.

Letters as in xla.py. A block is (rows, padded width): Triton needs powers of two, and masks cut off
the excess.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends.triton import call, load_masked, next_power_of_two, store_masked
from pallas_kernels.choose import INTERPRET, VARIANT, device_kind, no_64_bits, no_gpu
from pallas_kernels.gpus import find

WIDEST = 16384  # a row is held in registers


class Blocks(NamedTuple):
    """The cut of the work."""

    elements: int  # of a block, unless one row is more
    programs: int  # of the backward pass on a core: as many as it has registers for


BLOCKS = Blocks(4096, 2)
# Others, which are tried when kernels are measured: "triton/narrow".
VARIANTS = {"narrow": Blocks(2048, 2), "wide": Blocks(8192, 2), "many": Blocks(2048, 6)}
CORES = 132  # of a GPU that is not listed: an H100's


def refusal(rows: tuple[int, int], interpreted: bool) -> str:
    n, d = rows
    if d > WIDEST:
        return f"rows up to {WIDEST} wide, not {d}"
    if n * d >= 2**31:
        return "arrays of fewer than 2^31 elements: offsets are 32 bits"
    return no_64_bits() or no_gpu(interpreted)


def forward(x, scale, bias, residual, epsilon: float, centred: bool, name: str):
    """Does what `xla.forward` does."""
    n, d = x.shape
    block = block_of(n, d, name)
    block_rows, block_width = block
    tile = pl.BlockSpec(block, lambda i: (i, 0))
    whole_vector = pl.BlockSpec((block_width,), lambda _: (0,))
    statistic = pl.BlockSpec((block_rows,), lambda i: (i,))
    outputs = [
        (jax.ShapeDtypeStruct((n, d), x.dtype), tile),
        (jax.ShapeDtypeStruct((n,), jnp.float32), statistic),
    ]
    if centred:
        outputs.append((jax.ShapeDtypeStruct((n,), jnp.float32), statistic))
    if residual is not None:
        outputs.append((jax.ShapeDtypeStruct((n, d), residual.dtype), tile))
    run = call(
        partial(_forward_kernel, (n, d), epsilon, centred),
        grid=(pl.cdiv(n, block_rows),),
        inputs=[
            tile,
            whole_vector,
            None if bias is None else whole_vector,
            None if residual is None else tile,
        ],
        outputs=outputs,
        warps=_warps(block_width),
        stages=1,
        interpret=name.endswith(INTERPRET),
        name="norm_forward",
    )
    y, rstd, *rest = run(x, scale, bias, residual)
    mean = rest.pop(0) if centred else None
    total = x if residual is None else rest.pop(0)
    return y, total, mean, rstd


def _forward_kernel(shape, epsilon, centred, *refs):
    x_ref, scale_ref, bias_ref, residual_ref, y_ref, rstd_ref, *rest = refs
    mean_ref = rest.pop(0) if centred else None
    total_ref = None if residual_ref is None else rest.pop(0)
    n, d = shape
    block_rows, block_width = x_ref.shape
    columns = jnp.arange(block_width) < d
    rows = pl.program_id(0) * block_rows + jnp.arange(block_rows) < n
    mask = rows[:, None] & columns[None]
    normal = load_masked(x_ref, mask).astype(jnp.float32)
    if residual_ref is not None:
        residual = load_masked(residual_ref, mask).astype(jnp.float32)
        total = (normal + residual).astype(residual_ref.dtype)
        store_masked(total_ref, total, mask)
        normal = total.astype(jnp.float32)
    if centred:
        mean = normal.sum(1) / d
        normal = jnp.where(mask, normal - mean[:, None], 0.0)
        # The mean of a row far from 0 is rounded coarsely: the remainder is subtracted too.
        remainder = normal.sum(1) / d
        normal = jnp.where(mask, normal - remainder[:, None], 0.0)
        store_masked(mean_ref, mean + remainder, rows)
    rstd = jax.lax.rsqrt((normal * normal).sum(1) / d + epsilon)
    store_masked(rstd_ref, rstd, rows)
    y = normal * rstd[:, None] * load_masked(scale_ref, columns).astype(jnp.float32)[None]
    if bias_ref is not None:
        y = y + load_masked(bias_ref, columns).astype(jnp.float32)[None]
    store_masked(y_ref, y.astype(y_ref.dtype), mask)


def backward(total, scale, mean, rstd, dy, dtotal, name: str):
    """Does what `xla.backward` does; dsum is in the wider dtype of the sum and of dy."""
    n, d = total.shape
    block = block_of(n, d, name)
    block_rows, block_width = block
    blocks = pl.cdiv(n, block_rows)
    programs = programs_of(blocks, device_kind(), name)
    whole = pl.BlockSpec((n, block_width), lambda _: (0, 0))
    whole_vector = pl.BlockSpec((block_width,), lambda _: (0,))
    statistic = pl.BlockSpec((n,), lambda _: (0,))
    part = pl.BlockSpec((None, block_width), lambda i: (i, 0))
    run = call(
        partial(_backward_kernel, (n, d), block, pl.cdiv(blocks, programs)),
        grid=(programs,),
        inputs=[
            whole,
            whole_vector,
            None if mean is None else statistic,
            statistic,
            whole,
            None if dtotal is None else whole,
        ],
        outputs=[
            (jax.ShapeDtypeStruct((n, d), jnp.promote_types(total.dtype, dy.dtype)), whole),
            (jax.ShapeDtypeStruct((programs, d), jnp.float32), part),
            (jax.ShapeDtypeStruct((programs, d), jnp.float32), part),
        ],
        warps=_warps(block_width),
        stages=1,
        interpret=name.endswith(INTERPRET),
        name="norm_backward",
    )
    dsum, dscale, dbias = run(total, scale, mean, rstd, dy, dtotal)
    return dsum, dscale.sum(0), dbias.sum(0)


class _BackwardRefs(NamedTuple):
    total: Any
    scale: Any
    mean: Any  # None for RMSNorm
    rstd: Any
    dy: Any
    dtotal: Any  # None without a residual
    dsum: Any
    dscale: Any
    dbias: Any


def _backward_kernel(shape, block, turns, *refs):
    """Processes `turns` blocks of rows, one after another."""
    refs = _BackwardRefs(*refs)
    n, d = shape
    block_rows, block_width = block
    columns = jnp.arange(block_width) < d
    scale = load_masked(refs.scale, columns).astype(jnp.float32)[None]
    first = pl.program_id(0) * turns  # outside the loop: the interpreter needs it there

    def turn(i, carry):
        dscale, dbias = carry
        start = (first + i) * block_rows
        at = pl.ds(start, block_rows)
        rows = start + jnp.arange(block_rows) < n
        mask = rows[:, None] & columns[None]
        normal = load_masked(refs.total.at[at, :], mask).astype(jnp.float32)
        if refs.mean is not None:
            mean = load_masked(refs.mean.at[at], rows)[:, None]
            normal = jnp.where(mask, normal - mean, 0.0)
        rstd = load_masked(refs.rstd.at[at], rows)[:, None]
        normal = normal * rstd
        dy = load_masked(refs.dy.at[at, :], mask).astype(jnp.float32)
        dnormal = dy * scale
        dsum = dnormal - normal * ((dnormal * normal).sum(1) / d)[:, None]
        if refs.mean is not None:
            dsum = dsum - (dnormal.sum(1) / d)[:, None]
        dsum = dsum * rstd
        if refs.dtotal is not None:
            dsum = dsum + load_masked(refs.dtotal.at[at, :], mask).astype(jnp.float32)
        store_masked(refs.dsum.at[at, :], dsum.astype(refs.dsum.dtype), mask)
        return dscale + (dy * normal).sum(0), dbias + dy.sum(0)

    zero = jnp.zeros(block_width, jnp.float32)
    dscale, dbias = jax.lax.fori_loop(0, turns, turn, (zero, zero))
    store_masked(refs.dscale, dscale, columns)
    store_masked(refs.dbias, dbias, columns)


def programs_of(blocks: int, kind: str, name: str) -> int:
    """Returns how many programs share the blocks of the backward pass on this GPU, by jax's name.

    With one program on a core, the memory would idle while it computes.
    """
    listed = find(kind)
    cores = CORES if listed is None else listed.cores
    return min(_blocks(name).programs * cores, blocks)


def block_of(n: int, d: int, name: str) -> tuple[int, int]:
    """Returns the (rows, padded width) that a program holds at a time."""
    width = next_power_of_two(d)
    rows = max(_blocks(name).elements // width, 1)
    return min(rows, next_power_of_two(n, 1)), width


def _blocks(name: str) -> Blocks:
    return VARIANTS.get(name.removesuffix(INTERPRET).partition(VARIANT)[2], BLOCKS)


def _warps(width: int) -> int:
    if width <= 1024:
        return 4
    if width <= 4096:
        return 8
    return 16
