"""Refuses the calls that the kernels for Hopper cannot run, and says why."""

import jax.numpy as jnp

from pallas_kernels.attention.problem import Inputs, Problem
from pallas_kernels.backends import mosaic as gpu

GRID_LIMIT = 65535  # programs along each dim of a CUDA grid but the first
WIDEST = 256  # head dim


def refusal(problem: Problem, inputs: Inputs, interpreted: bool) -> str:  # noqa: ARG001
    b, _, h, d = inputs.q_bthd.shape
    e = inputs.v_bske.shape[3]
    tiles = max(inputs.lengths) // 64
    if inputs.bias is not None:
        return "no bias"
    if inputs.q_bthd.dtype not in (jnp.bfloat16, jnp.float16):
        return f"bfloat16 and float16, not {inputs.q_bthd.dtype}"
    if max(d, e) > WIDEST:
        return f"head dims up to {WIDEST}, not {max(d, e)}"
    if max(x.size for x in (inputs.q_bthd, inputs.k_bskd, inputs.v_bske)) >= 2**31:
        return "arrays of fewer than 2^31 elements: offsets are 32 bits"
    if max(b * h, tiles) > GRID_LIMIT:
        return f"batch x heads and tiles of 64 up to {GRID_LIMIT}, not {b * h} and {tiles}"
    return gpu.refusal(interpreted)
