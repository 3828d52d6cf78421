"""The one place that knows Pallas on Mosaic GPU: kernels of warpgroups for NVIDIA's Hopper, in jax 0.11 and later.

A program is a few warpgroups of 128 threads, which share memory and wait for each other at barriers. One copies, the
others compute: registers of a warpgroup hold [64, n] arrays in the layout of its matmul instruction (`wgmma`).

Every kernel has two forms behind one static flag, `interpret`. jax's interpreter runs barriers, copies and matmuls on
any machine and finds races, but neither a matmul onto a value nor one whose left side is in registers: there
`accumulate` adds afterwards and `operand` goes through shared memory. Names that are not defined here are
jax.experimental.pallas.mosaic_gpu's own, which is imported when the first is used.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.choose import device_kind, no_64_bits
from pallas_kernels.gpus import generation

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LANES = 64  # a dim of shared memory that a matmul reads is a multiple of it: 128 bytes
SHARED_MEMORY = 232448 - 1024  # bytes that scratch of one program may fill on sm_90; jax takes some for reductions
ALIGNMENT = 1024  # bytes; of each array in shared memory
MISCOMPILING = 12080, 12090  # CUDA versions, first and last


def _plgpu():
    from jax.experimental.pallas import mosaic_gpu  # not at import: older jax has another one

    return mosaic_gpu


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_plgpu(), name)


def refusal(interpreted: bool) -> str:
    """Why kernels for Hopper cannot run here; "" where they can. Compiling one for another GPU ends the process."""
    if jax.__version_info__ < (0, 11):
        return f"needs jax 0.11 or later, this is {jax.__version__}"
    if (refused := no_64_bits()) or interpreted:
        return refused
    if generation(device_kind()) != "hopper":
        return f"needs an NVIDIA GPU of sm_90 (Hopper), this is {device_kind()}"
    if MISCOMPILING[0] <= _cuda_version() <= MISCOMPILING[1]:
        return "CUDA 12.8.0 to 12.9.0 compile causal attention wrongly (jax refuses its own there too): needs 12.9.1"
    return ""


def _cuda_version() -> int:
    """Of the toolkit that jax uses, as 12090; 0: none is there, or jax does not say."""
    try:
        from jax._src.lib import cuda_versions
    except ImportError:
        return 0
    return cuda_versions.cuda_runtime_get_version() if cuda_versions is not None else 0


def call(
    kernel: Callable, *, grid: dict[str, int], outputs, scratch: Sequence[Any], warpgroups: int, interpret: bool,
    name: str,
) -> Callable[..., Any]:  # fmt: skip
    """`kernel(*inputs, *outputs, *scratch)`, references to whole arrays, on each program of the grid.

    `grid`: sizes by name, the first runs fastest; "warpgroup" is the axis of those in a program. `outputs`:
    ShapeDtypeStructs. `scratch`: `shared` and `barriers`. Interpreted, warpgroups wait in XLA's threads, of which there
    are as many as cores or simulated devices: with fewer than 8 they can wait for ever.
    """
    plgpu = _plgpu()
    if not interpret and (used := shared_bytes(scratch)) > SHARED_MEMORY:
        raise ValueError(f"{name}: {used} bytes of shared memory, there are {SHARED_MEMORY}")
    return plgpu.kernel(
        kernel,
        out_type=list(outputs),
        scratch_types=list(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        kernel_name=name,
    )


def shared(shape: tuple[int, ...], dtype) -> Any:
    """Scratch in shared memory; 16-bit arrays whose last dim is a multiple of LANES as copies and matmuls want them."""
    plgpu, dtype = _plgpu(), jnp.dtype(dtype)
    laid = dtype.itemsize == 2 and len(shape) > 1 and shape[-1] % LANES == 0
    transforms = (plgpu.TilingTransform((8, LANES)), plgpu.SwizzleTransform(128)) if laid else ()
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def barriers(count: int, arrivals: int = 1) -> Any:
    """Scratch: `count` barriers; each lets those who wait go on once so many arrived, and begins anew."""
    return _plgpu().Barrier(num_arrivals=arrivals, num_barriers=count)


def shared_bytes(scratch: Sequence[Any]) -> int:
    """What the arrays of `scratch` fill."""
    arrays = [x for x in scratch if hasattr(x, "transforms")]
    return sum(-(-prod(x.shape) * jnp.dtype(x.dtype).itemsize // ALIGNMENT) * ALIGNMENT for x in arrays)


def product(multiply: Callable, shape: tuple[int, int], then: Callable[[], None] = lambda: None) -> jax.Array:
    """What `multiply(accumulator)`, calls of `wgmma`, gives in float32; `then` runs while it does."""

    def run(accumulator):
        multiply(accumulator)
        then()
        return accumulator[...]

    return pl.run_scoped(run, _plgpu().ACC(shape, jnp.float32))


def accumulate(start: jax.Array, multiply: Callable, interpret: bool) -> jax.Array:
    """start + what `multiply(accumulator)` gives."""
    if interpret:
        return start + product(multiply, start.shape)
    return pl.run_state(multiply)(_plgpu().ACC.init(start))


def operand(x: jax.Array, staging, interpret: bool):
    """x as the left side of a `wgmma`; `staging`, shared memory of this warpgroup, is used where interpreted alone."""
    if not interpret:
        return x
    staging[...] = x
    _plgpu().commit_smem()
    return staging


def filled(shape: tuple[int, ...], value: float) -> jax.Array:
    """float32 in registers, [64, n], or [64]: one value for each row of it."""
    layout = _plgpu().Layout.WGMMA if len(shape) > 1 else _plgpu().Layout.WGMMA.reduce(1)
    return _plgpu().layout_cast(jnp.full(shape, value, jnp.float32), layout)


def along(x: jax.Array, shape: tuple[int, int], dim: int) -> jax.Array:
    """x [shape[dim]] repeated to `shape`."""
    return jax.lax.broadcast_in_dim(x, shape, [dim])


def numbers(length: int, dim: int) -> jax.Array:
    """int32 0, 1, ... as `along(..., dim)` takes it."""
    layout = _plgpu().Layout.WGMMA.reduce(1 - dim)
    return _plgpu().broadcasted_iota(jnp.int32, (length,), 0, layout=layout)


def load_along(ref, dim: int) -> jax.Array:
    """A vector in global memory, as `along(..., dim)` takes it."""
    return _plgpu().load(ref, layout=_plgpu().Layout.WGMMA.reduce(1 - dim), optimized=False)


def tanh(x: jax.Array) -> jax.Array:
    """By exp2 and a division: the instruction for tanh is off by 2^-11, which a softcap of 50 makes 0.02."""
    return 1 - 2 / (jnp.exp2(x * (2 * LOG2E)) + 1)
