"""`grouped_matmul`: rows times the weight of their expert, with both derivatives.

Letters: r rows, t tiles, k contracted, n result, x experts.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_arrays, check_floating, check_ids
from pallas_kernels.calls import GroupedCall
from pallas_kernels.choose import INTERPRET, VARIANT, choose, device_kind
from pallas_kernels.counting import is_counted, marked
from pallas_kernels.gpus import generation
from pallas_kernels.grouped import mosaic, triton, xla
from pallas_kernels.partition import refuse_checked_vma

OP = "grouped_matmul"
IMPLEMENTATIONS = {"xla": xla, "triton": triton, "mosaic": mosaic}
# The default order is reasoned, not measured: XLA runs one small matmul after another, the kernel
# all at once.
OURS = {"ampere": ("triton",), "hopper": ("mosaic", "triton"), "blackwell": ("triton",)}


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    expert_of_tile: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each tile of rows by the weight of its expert: y[tile] = x[tile] w[expert].

    A tile is rows / tiles consecutive rows, which all belong to one expert; `tile_groups` pads
    groups of any size to whole tiles. Padding rows must be zeros: the gradient of w sums over whole
    tiles. Sums are float32, or float64 for float64.

    Args:
      x: [rows, k], floating.
      w: [experts, k, n], in the dtype of x.
      expert_of_tile: integers [tiles], in any order. A number that belongs to no expert,
        such as -1, marks an unused tile: its rows have zeros as results and gradients, whatever
        they hold. The gradient of an expert without tiles is zero.
      implementation: a name of IMPLEMENTATIONS, which never falls back; None takes the first that
        does not refuse: our kernels for the GPU's generation, XLA.

    Returns:
      y [rows, n], in the dtype of x.

    Raises:
      ValueError: the arguments do not fit together.
      Refused: the named implementation cannot run this call.
    """
    check_arrays(OP, x=x, w=w, expert_of_tile=expert_of_tile)
    refuse_checked_vma(OP, x, w, expert_of_tile)
    call = _checked(x, w, expert_of_tile)
    if is_counted():
        flops = 2.0 * call.rows * call.width * call.out_width
        return marked((call.rows, call.out_width), x.dtype, flops)
    refusals = {name: partial(_implementation(name).refusal, call) for name in candidates()}
    name = choose(OP, refusals, order(call), implementation, call)
    return _multiply_compiled(name, x, w, expert_of_tile.astype(jnp.int32))


def candidates() -> tuple[str, ...]:
    """Returns the names of all implementations, and of their other tilings."""
    tilings = [f"triton{VARIANT}{name}" for name in triton.VARIANTS]
    tilings += [f"mosaic{VARIANT}{name}" for name in mosaic.VARIANTS]
    return (*IMPLEMENTATIONS, *tilings)


def order(_: GroupedCall) -> tuple[str, ...]:
    """Returns the implementations of a call, best first, if nothing was measured."""
    return (*OURS.get(generation(device_kind()), ()), "xla")


def _checked(x, w, expert_of_tile) -> GroupedCall:
    for name, array, rank, dims in (
        ("x", x, 2, "rows, k"),
        ("w", w, 3, "experts, k, n"),
        ("expert_of_tile", expert_of_tile, 1, "tiles"),
    ):
        if array is None or array.ndim != rank or 0 in array.shape:
            shown = None if array is None else array.shape
            raise ValueError(f"{OP}: {name} must be [{dims}], none of them 0, not {shown}")
    check_floating(OP, "x", x)
    check_ids(OP, "expert_of_tile", expert_of_tile)
    if w.dtype != x.dtype:
        raise ValueError(f"{OP}: w is {w.dtype} and x is {x.dtype}; cast one of them")
    if w.shape[1] != x.shape[1]:
        raise ValueError(f"{OP}: w {w.shape} contracts {w.shape[1]}, but x is {x.shape}")
    rows, tiles = x.shape[0], expert_of_tile.shape[0]
    if rows % tiles:
        raise ValueError(f"{OP}: {rows} rows are not whole tiles: expert_of_tile has {tiles}")
    return GroupedCall(
        rows=rows,
        tile=rows // tiles,
        width=w.shape[1],
        experts=w.shape[0],
        out_width=w.shape[2],
        dtype=str(x.dtype),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(name, x, w, expert_t):
    return _forward(name, x, w, expert_t)[0]


def _forward(name, x, w, expert_t):
    # Kernels would read whatever a number points at.
    expert_t = jnp.where(expert_t < w.shape[0], expert_t, -1)
    y = _implementation(name).multiply(x, w, expert_t, False, name)
    return y, (x, w, expert_t)


@partial(jax.jit, static_argnums=(0,), inline=True)  # jax 0.10 calls it outside any jit
def _backward(name, residuals, dy):
    x, w, expert_t = residuals
    module = _implementation(name)
    dx = module.multiply(dy, w, expert_t, True, name)
    dw = module.weights_gradient(x, dy, expert_t, w.shape[0], name)
    return dx, dw, None


def _implementation(name):
    return IMPLEMENTATIONS[name.removesuffix(INTERPRET).partition(VARIANT)[0]]


_multiply.defvjp(_forward, _backward)
# Compiled once, also outside any jit.
_multiply_compiled = jax.jit(_multiply, static_argnums=(0,), inline=True)
