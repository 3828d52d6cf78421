"""`unit_inverse`: the inverse of a unit lower triangular matrix."""

from functools import partial
from math import prod
from typing import Any

import jax

from pallas_kernels.arguments import check_arrays
from pallas_kernels.calls import InverseCall
from pallas_kernels.choose import INTERPRET, choose
from pallas_kernels.counting import is_counted
from pallas_kernels.inverse import triton, xla
from pallas_kernels.partition import refuse_checked_vma

OP = "unit_inverse"
IMPLEMENTATIONS = {"xla": xla, "triton": triton}


def unit_inverse(lower: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Computes (I + L)^-1 of strictly lower triangular matrices L, in float32.

    It is found by blocks, not by powers of L: no number is larger than the inverse has.

    Args:
      lower: float32 [..., n, n], where n is a power of 2. What is not below the diagonal counts as
        0, and has no gradient.
      implementation: a name of IMPLEMENTATIONS, which never falls back; None takes what was
        measured to be fastest here, or else XLA.

    Returns:
      The inverses, lower triangular with ones on the diagonal.

    Raises:
      ValueError: `lower` is something else.
      Refused: the named implementation cannot run this call.
    """
    check_arrays(OP, lower=lower)
    refuse_checked_vma(OP, lower)
    size = 0 if lower is None or lower.ndim < 2 else lower.shape[-1]
    if size == 0 or size & (size - 1) or lower.shape[-2] != size or lower.dtype != "float32":
        found = None if lower is None else f"{lower.dtype} {lower.shape}"
        raise ValueError(
            f"{OP}: lower must be float32 [..., n, n], and n a power of 2, not {found}"
        )
    if is_counted():  # the FLOPs of XLA's matmuls are those of the call
        return xla.unit_inverse(lower, "xla")
    call = InverseCall(matrices=prod(lower.shape[:-2]), size=size, dtype=str(lower.dtype))
    refusals = {name: partial(_implementation(name).refusal, call) for name in candidates()}
    name = choose(OP, refusals, order(call), implementation, call)
    return _implementation(name).unit_inverse(lower, name)


def candidates() -> tuple[str, ...]:
    """Returns the names of all implementations."""
    return tuple(IMPLEMENTATIONS)


def order(_: InverseCall) -> tuple[str, ...]:
    """Returns the implementations of a call, best first, if nothing was measured.

    No GPU has run our kernel yet. Where it is right and faster than XLA, a table of
    measurements says so.
    """
    return ("xla",)


def _implementation(name: str) -> Any:
    return IMPLEMENTATIONS[name.removesuffix(INTERPRET)]
