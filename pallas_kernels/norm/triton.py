"""The norms on Triton. Forward: some whole rows per program. Backward: a fixed number of programs walk the rows, each
gathers its part of dscale and dbias in registers and writes it once; XLA adds the parts, always in one order.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends.triton import call, load_masked, next_power_of_two, store_masked
from pallas_kernels.choose import INTERPRET, no_64_bits, no_gpu

WIDEST = 16384  # a row is held in registers
ELEMENTS = 4096  # of a program's rows at a time, where one row is not more
PROGRAMS = 264  # of the backward pass: two for each SM of an H100


def refusal(rows: tuple[int, int], interpreted: bool) -> str:
    if rows[1] > WIDEST:
        return f"rows up to {WIDEST} wide, not {rows[1]}"
    if rows[0] * rows[1] >= 2**31:
        return "arrays of fewer than 2^31 elements: offsets are 32 bits"
    return no_64_bits() or no_gpu(interpreted)


def forward(x, scale, bias, residual, epsilon: float, centred: bool, name: str):
    """As `xla.forward`."""
    (n, d), block = x.shape, _block(x.shape)
    width = block[1]
    tile = pl.BlockSpec(block, lambda i: (i, 0))
    vector, numbers = (
        pl.BlockSpec((width,), lambda _: (0,)),
        pl.BlockSpec(block[:1], lambda i: (i,)),
    )
    outputs = [
        (jax.ShapeDtypeStruct((n, d), x.dtype), tile),
        (jax.ShapeDtypeStruct((n,), jnp.float32), numbers),
    ]
    if centred:
        outputs.append((jax.ShapeDtypeStruct((n,), jnp.float32), numbers))
    if residual is not None:
        outputs.append((jax.ShapeDtypeStruct((n, d), residual.dtype), tile))
    run = call(
        partial(_forward_kernel, (n, d), epsilon, centred),
        grid=(-(-n // block[0]),),
        inputs=[
            tile,
            vector,
            bias if bias is None else vector,
            residual if residual is None else tile,
        ],
        outputs=outputs,
        warps=_warps(width),
        stages=1,
        interpret=name.endswith(INTERPRET),
        name="norm_forward",
    )
    y, rstd, *rest = run(x, scale, bias, residual)
    mean = rest.pop(0) if centred else None
    return y, rest[0] if rest else x, mean, rstd


def _forward_kernel(shape, epsilon, centred, *refs):
    x_ref, scale_ref, bias_ref, residual_ref, y_ref, rstd_ref, *rest = refs
    mean_ref = rest.pop(0) if centred else None
    columns = jnp.arange(x_ref.shape[1]) < shape[1]
    there = pl.program_id(0) * x_ref.shape[0] + jnp.arange(x_ref.shape[0]) < shape[0]
    mask = there[:, None] & columns[None]
    wide = load_masked(x_ref, mask).astype(jnp.float32)
    if residual_ref is not None:
        total = (wide + load_masked(residual_ref, mask).astype(jnp.float32)).astype(
            residual_ref.dtype
        )
        store_masked(rest[0], total, mask)
        wide = total.astype(jnp.float32)
    if centred:
        mean = wide.sum(1) / shape[1]
        wide = jnp.where(mask, wide - mean[:, None], 0.0)
        left = wide.sum(1) / shape[1]  # the mean of a row far from 0 is rounded coarsely
        wide = jnp.where(mask, wide - left[:, None], 0.0)
        store_masked(mean_ref, mean + left, there)
    rstd = jax.lax.rsqrt((wide * wide).sum(1) / shape[1] + epsilon)
    store_masked(rstd_ref, rstd, there)
    y = wide * rstd[:, None] * load_masked(scale_ref, columns).astype(jnp.float32)[None]
    if bias_ref is not None:
        y = y + load_masked(bias_ref, columns).astype(jnp.float32)[None]
    store_masked(y_ref, y.astype(y_ref.dtype), mask)


def backward(total, scale, mean, rstd, dy, dtotal, name: str):
    """As `xla.backward`; dsum is in the dtype of the sum."""
    (n, d), block = total.shape, _block(total.shape)
    blocks = -(-n // block[0])
    programs = min(PROGRAMS, blocks)
    whole, part = (
        pl.BlockSpec((n, block[1]), lambda _: (0, 0)),
        pl.BlockSpec((None, block[1]), lambda i: (i, 0)),
    )
    vector, numbers = pl.BlockSpec(block[1:], lambda _: (0,)), pl.BlockSpec((n,), lambda _: (0,))
    run = call(
        partial(_backward_kernel, (n, d), block, -(-blocks // programs)),
        grid=(programs,),
        inputs=[
            whole,
            vector,
            mean if mean is None else numbers,
            numbers,
            whole,
            dtotal if dtotal is None else whole,
        ],  # fmt: skip
        outputs=[
            (jax.ShapeDtypeStruct((n, d), jnp.promote_types(total.dtype, dy.dtype)), whole),
            *[(jax.ShapeDtypeStruct((programs, d), jnp.float32), part)] * 2,
        ],
        warps=_warps(block[1]),
        stages=1,
        interpret=name.endswith(INTERPRET),
        name="norm_backward",
    )
    dsum, dscale, dbias = run(total, scale, mean, rstd, dy, dtotal)
    return dsum, dscale.sum(0), dbias.sum(0)


def _backward_kernel(shape, block, turns, *refs):
    (
        total_ref,
        scale_ref,
        mean_ref,
        rstd_ref,
        dy_ref,
        dtotal_ref,
        dsum_ref,
        dscale_ref,
        dbias_ref,
    ) = refs
    columns = jnp.arange(block[1]) < shape[1]
    scale = load_masked(scale_ref, columns).astype(jnp.float32)[None]

    begin = pl.program_id(0) * turns  # outside the loop: the interpreter wants it there

    def turn(i, carry):
        dscale, dbias = carry
        start = (begin + i) * block[0]
        at = pl.ds(start, block[0])
        there = start + jnp.arange(block[0]) < shape[0]
        mask = there[:, None] & columns[None]
        wide = load_masked(total_ref.at[at, :], mask).astype(jnp.float32)
        if mean_ref is not None:
            wide = jnp.where(mask, wide - load_masked(mean_ref.at[at], there)[:, None], 0.0)
        rstd = load_masked(rstd_ref.at[at], there)[:, None]
        normal, dy = wide * rstd, load_masked(dy_ref.at[at, :], mask).astype(jnp.float32)
        dnormal = dy * scale
        dsum = dnormal - normal * ((dnormal * normal).sum(1) / shape[1])[:, None]
        if mean_ref is not None:
            dsum = dsum - (dnormal.sum(1) / shape[1])[:, None]
        dsum = dsum * rstd
        if dtotal_ref is not None:
            dsum = dsum + load_masked(dtotal_ref.at[at, :], mask).astype(jnp.float32)
        store_masked(dsum_ref.at[at, :], dsum.astype(dsum_ref.dtype), mask)
        return dscale + (dy * normal).sum(0), dbias + dy.sum(0)

    zero = jnp.zeros(block[1], jnp.float32)
    dscale, dbias = jax.lax.fori_loop(0, turns, turn, (zero, zero))
    store_masked(dscale_ref, dscale, columns)
    store_masked(dbias_ref, dbias, columns)


def _block(shape: tuple[int, int]) -> tuple[int, int]:
    """(rows, padded width) that a program holds at a time."""
    width = next_power_of_two(shape[1])
    return min(max(ELEMENTS // width, 1), next_power_of_two(shape[0], 1)), width


def _warps(width: int) -> int:
    return 4 if width <= 1024 else 8 if width <= 4096 else 16
