"""Which calls the kernels for Hopper run."""

import jax.numpy as jnp

from pallas_kernels.attention.problem import Inputs, Problem
from pallas_kernels.backends import mosaic as gpu

GRID_LIMIT = 65535  # programs along all dims of a CUDA grid but the first


def refusal(problem: Problem, inputs: Inputs, interpreted: bool) -> str:  # noqa: ARG001
    (b, _, h, d), longest = inputs.q_bthd.shape, max(inputs.lengths)
    e = inputs.v_bske.shape[3]
    if inputs.bias is not None:
        return "no bias"
    if inputs.q_bthd.dtype not in (jnp.bfloat16, jnp.float16):
        return f"bfloat16 and float16, not {inputs.q_bthd.dtype}"
    if max(d, e) > 256:
        return f"head dims up to 256, not {max(d, e)}"
    if max(x.size for x in inputs[:3]) >= 2**31:
        return "arrays of fewer than 2^31 elements: offsets are 32 bits"
    if max(b * h, longest // 64) > GRID_LIMIT:
        return f"batch x heads and tiles of 64 up to {GRID_LIMIT}, not {b * h} and {longest // 64}"
    return gpu.refusal(interpreted)
