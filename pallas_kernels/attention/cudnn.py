"""Attention by cuDNN, through jax.nn: bfloat16 and float16 on NVIDIA GPUs of sm_80 and later."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import Inputs, Problem
from pallas_kernels.choose import device_kind, no_gpu, not_interpretable
from pallas_kernels.gpus import generation
from pallas_kernels.partition import wholly_manual

# jax's primitive, which returns out and the softmax's residuals for the backward pass.
FORWARD = "dot_product_attention_fwd_wrapper"


def refusal(problem: Problem, inputs: Inputs, interpreted: bool) -> str:
    t, s = inputs.lengths
    q = inputs.q_bthd
    d = q.shape[3]
    e = inputs.v_bske.shape[3]
    if interpreted:
        return not_interpretable(interpreted)
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"bfloat16 and float16, not {q.dtype}"
    widest = 256 if generation(device_kind()) in ("hopper", "blackwell") else 128
    if d != e or d % 8 or d > widest:
        return f"one head dim, a multiple of 8 up to {widest}, not {d} and {e}"
    if problem.softcap is not None:
        return "no softcap"
    if not inputs.mask_is_static:
        return "no segments or positions: jax.nn would make them a t x s mask"
    is_causal = problem.right == 0
    if not is_causal and problem.has_window:
        return "no window to the right"
    if inputs.bias is not None:
        return "no bias: its -inf would not give 0 for a query that sees no key"
    if problem.has_window and t != s:
        return (
            f"causal only with as many queries as keys, not {t} and {s}: jax.nn aligns them "
            "at the start"
        )
    if t % 2 or s % 2:
        return f"no backward pass for odd lengths, {t} and {s}"
    return no_gpu(interpreted) or _not_installed()


def _not_installed() -> str:
    """Returns jax's message if cuDNN is missing; from jax it would only come later, as an error."""
    try:
        from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version
    except ImportError:  # jax has moved it: its own error must do
        return ""
    try:
        check_cudnn_version()
    except RuntimeError as error:
        return str(error)
    return ""


def attend(problem: Problem, inputs: Inputs) -> jax.Array:
    """Returns out [b, t, h, e], with jax's own derivative rule; no lse."""
    run = partial(
        jax.nn.dot_product_attention,
        scale=problem.scale,
        is_causal=problem.right == 0,
        local_window_size=None if problem.left is None else (problem.left, 0),
        implementation="cudnn",
    )
    # jax's rule for partitioning cuDNN's call fails if some axes of the mesh are manual and some
    # are not (jax 0.10 to 0.12).
    # some are not (jax 0.10 to 0.12).
    return wholly_manual(run)(inputs.q_bthd, inputs.k_bskd, inputs.v_bske)
