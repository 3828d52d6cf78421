"""Runs the backward pass on Hopper: a kernel for dq, then one for dk and dv; every sum has a fixed
order.

In both kernels one warpgroup copies, through two rings of shared memory (backends/rings.py), and
two compute. A computing warpgroup owns 64 rows of scores, which become the left operand of the next
matmul without leaving its registers (scores.py).

Barriers, by who waits for what:

    own_ready[w]     computing: the program's own tiles of warpgroup w have been copied
    *_ready[slot]    computing: a tile is in this slot of the ring
    *_free[slot]     copying: both computing warpgroups have read this slot

Letters as in problem.py; `step` counts the tiles that a program walks over.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention import tiling
from pallas_kernels.attention.hopper.backward_operands import pad_operands
from pallas_kernels.attention.hopper.dkv_kernel import run_dkv
from pallas_kernels.attention.hopper.dq_kernel import run_dq
from pallas_kernels.attention.problem import Inputs, Problem


def backward(  # noqa: PLR0913 - what every implementation takes, and a variant
    problem: Problem,
    inputs: Inputs,
    out,
    lse,
    dout,
    dlse,
    *,
    interpret: bool = False,
    variant: str = "",
):
    """Does what `xla.backward` does; there is no bias, so no gradient of one."""
    t, s = inputs.lengths
    d = inputs.k_bskd.shape[3]
    e = inputs.v_bske.shape[3]
    operands = pad_operands(problem, inputs, (out, lse), (dout, dlse))
    tables = tiling.hopper_tables(variant)
    dq, _ = run_dq(problem, inputs, operands, tables.dq, interpret)
    dk, dv = run_dkv(problem, inputs, operands, tables.dkv, interpret)
    return dq[:, :t, :, :d], dk[:, :s, :, :d], dv[:, :s, :, :e], None


def joined_backward(  # noqa: PLR0913 - as `backward`
    problem: Problem,
    inputs: Inputs,
    joined_btknd: jax.Array,
    results: tuple[jax.Array, jax.Array],
    dout: jax.Array,
    *,
    interpret: bool = False,
    variant: str = "",
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient of the array of which q, k and v are parts, and its sum [k, n, d].

    Both kernels write into one array. The sum is float32. `results`: (out, lse).
    """
    _, t, k, n, d = joined_btknd.shape
    gradients = dout, jnp.zeros((), jnp.float32)
    operands = pad_operands(problem, inputs, results, gradients, joined_btknd)
    tables = tiling.hopper_tables(variant)
    begun, dq_sums = run_dq(problem, inputs, operands, tables.dq, interpret)
    assert dq_sums is not None, "the array is shared"
    whole, dkv_sums = run_dkv(problem, inputs, operands, tables.dkv, interpret, begun)
    dq_sums_kgd = dq_sums.sum((0, 1)).reshape(k, n - 2, -1)
    sums_knd = jnp.concatenate((dq_sums_kgd, dkv_sums.sum((0, 1))), 1)
    return whole[:, :t, :, :d].reshape(joined_btknd.shape), sums_knd[..., :d]
