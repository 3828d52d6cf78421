"""Wraps Pallas on Mosaic GPU, for NVIDIA's Hopper, in jax 0.11 and later: all that our kernels use
of it.

A program is a few warpgroups of 128 threads. They share memory and wait for each other at barriers.
One warpgroup copies; the others compute. In a computing warpgroup's registers, arrays are [64, n]
or [64], in the layout that its matmul instruction (`wgmma`) needs.

Every kernel has two forms behind one static flag, `interpret`. jax's interpreter runs barriers,
copies and matmuls on any machine and finds races. It can neither multiply onto a value nor take the
left operand from registers: `accumulate_onto` then adds afterwards, and `left_operand` goes through
shared memory.

Names that are not defined here (`wgmma`, `barrier_wait`, `copy_gmem_to_smem`, ...) are those of
jax.experimental.pallas.mosaic_gpu, which is imported when the first is used.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.choose import device_kind, no_64_bits
from pallas_kernels.gpus import H100_TARGET, generation

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

# A wgmma reads shared memory in swizzled rows of 128 bytes: 64 elements of 16 bits.
SWIZZLE_BYTES = 128
SWIZZLE_ELEMENTS = 64

# Bytes that the scratch of one program may fill; jax takes the rest for reductions.
SHARED_MEMORY_BYTES = H100_TARGET.shared_memory_per_block - 1024
SHARED_MEMORY_ALIGNMENT = 1024  # bytes, of each array

MISCOMPILING_CUDA = 12080, 12090  # versions, first and last


def _plgpu() -> Any:  # its names and types differ between versions of jax
    from jax.experimental.pallas import mosaic_gpu  # not at import: jax 0.10 has a different one

    return mosaic_gpu


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_plgpu(), name)


def refusal(interpreted: bool) -> str:
    """Says why kernels for Hopper cannot run here; "" if they can.

    Refused rather than tried: compiling one for another GPU ends the process.
    """
    if jax.__version_info__ < (0, 11):
        return f"needs jax 0.11 or later, this is {jax.__version__}"
    if (refused := no_64_bits()) or interpreted:
        return refused
    if generation(device_kind()) != "hopper":
        return f"needs an NVIDIA GPU of sm_90 (Hopper), this is {device_kind()}"
    first, last = MISCOMPILING_CUDA
    if first <= _cuda_version() <= last:
        return (
            "CUDA 12.8.0 to 12.9.0 compile causal attention wrongly (jax refuses its own there "
            "too): needs 12.9.1"
        )
    return ""


def _cuda_version() -> int:
    """Returns the version of jax's CUDA toolkit, such as 12090; 0: none, or hidden."""
    try:
        from jax._src.lib import cuda_versions
    except ImportError:
        return 0
    return cuda_versions.cuda_runtime_get_version() if cuda_versions is not None else 0


def call(
    kernel: Callable,
    *,
    grid: dict[str, int],
    outputs,
    scratch: Sequence[Any],
    warpgroups: int,
    interpret: bool,
    name: str,
) -> Callable[..., Any]:
    """Returns a function of arrays that runs `kernel(*inputs, *outputs, *scratch)` per program.

    All arguments of the kernel are references to whole arrays. `grid` has sizes by name, the
    fastest first; "warpgroup" is the axis of a program's warpgroups. `outputs` are
    ShapeDtypeStructs, `scratch` comes from `shared_memory` and `barriers`.

    Interpreted warpgroups block threads of XLA, which has one per core or simulated device: with
    fewer than 8 they can wait for each other forever.
    """
    plgpu = _plgpu()
    used = shared_memory_bytes(scratch)
    if not interpret and used > SHARED_MEMORY_BYTES:
        raise ValueError(f"{name}: {used} bytes of shared memory, of {SHARED_MEMORY_BYTES}")
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


# Scratch


def shared_memory(shape: tuple[int, ...], dtype, *, swizzle_floats: bool = False) -> Any:
    """Returns an array in shared memory, tiled and swizzled for copies and wgmma if possible.

    That needs 16-bit elements and a last dim that is a multiple of SWIZZLE_ELEMENTS, or with
    `swizzle_floats` 32-bit ones and half of that.
    """
    plgpu = _plgpu()
    dtype = jnp.dtype(dtype)
    elements = SWIZZLE_BYTES // dtype.itemsize
    has_tiles = dtype.itemsize == 2 or (dtype.itemsize == 4 and swizzle_floats)
    transforms = ()
    if has_tiles and len(shape) > 1 and shape[-1] % elements == 0:
        transforms = (plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(SWIZZLE_BYTES))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def barriers(count: int, arrivals: int = 1) -> Any:
    """Returns `count` barriers; each releases its waiters after `arrivals`, then restarts."""
    return _plgpu().Barrier(num_arrivals=arrivals, num_barriers=count)


def shared_memory_bytes(scratch: Sequence[Any]) -> int:
    """Returns the bytes that the arrays of `scratch` fill, including alignment."""
    total = 0
    for part in scratch:
        if hasattr(part, "transforms"):  # an array, not barriers
            size = prod(part.shape) * jnp.dtype(part.dtype).itemsize
            total += -(-size // SHARED_MEMORY_ALIGNMENT) * SHARED_MEMORY_ALIGNMENT
    return total


# Matmuls. `issue(accumulator, ...)` issues calls of `wgmma`, which run while the warpgroup
# continues.


def accumulate_from_zero(
    issue: Callable, shape: tuple[int, int], meanwhile: Callable[[], None] = lambda: None
) -> jax.Array:
    """Returns, in float32 `shape`, the sum of the matmuls that `issue` issues.

    `meanwhile` runs at the same time.
    """

    def run(accumulator):
        issue(accumulator)
        meanwhile()
        return accumulator[...]  # waits for the matmuls

    return pl.run_scoped(run, _plgpu().ACC(shape, jnp.float32))


def accumulate_onto(
    starts: tuple[jax.Array, ...], issue: Callable, interpret: bool
) -> tuple[jax.Array, ...]:
    """Returns `starts`, each plus the sum of the matmuls onto its accumulator."""
    acc = _plgpu().ACC
    if not interpret:
        return pl.run_state(lambda into: issue(*into))(tuple(acc.init(start) for start in starts))

    def run(*into):
        issue(*into)
        return tuple(accumulator[...] for accumulator in into)

    sums = pl.run_scoped(run, *(acc(start.shape, jnp.float32) for start in starts))
    return tuple(start + total for start, total in zip(starts, sums, strict=True))


def left_operand(x: jax.Array, staging, interpret: bool):
    """Returns x, in registers, as the left operand of a `wgmma`.

    `staging` is this warpgroup's own shared memory of x's shape, used only when interpreted.
    """
    if not interpret:
        return x
    staging[...] = x
    _plgpu().commit_smem()
    return staging


# Arrays in registers. A vector belongs to dim 0 of scores (a value per row) or to dim 1 (a value
# per column), and its layout says which.


def full(shape: tuple[int, ...], value: float) -> jax.Array:
    """Returns float32 [64, n], or [64] for dim 0."""
    layout = _plgpu().Layout.WGMMA if len(shape) > 1 else _plgpu().Layout.WGMMA.reduce(1)
    return _plgpu().layout_cast(jnp.full(shape, value, jnp.float32), layout)


def broadcast(x: jax.Array, shape: tuple[int, ...], dim: int) -> jax.Array:
    """Returns the vector x [shape[dim]], which belongs to `dim`, repeated along the other one."""
    return jax.lax.broadcast_in_dim(x, shape, [dim])


def iota(length: int, dim: int) -> jax.Array:
    """Returns int32 0, 1, ..., length - 1, belonging to `dim`."""
    layout = _plgpu().Layout.WGMMA.reduce(1 - dim)
    return _plgpu().broadcasted_iota(jnp.int32, (length,), 0, layout=layout)


def load_global_vector(ref, dim: int) -> jax.Array:
    """Loads a vector from global memory, to belong to `dim`."""
    return _plgpu().load(ref, layout=_plgpu().Layout.WGMMA.reduce(1 - dim), optimized=False)


def load_shared_vector(ref, dim: int) -> jax.Array:
    """Loads a vector from shared memory, to belong to `dim`."""
    return _plgpu().load(ref, layout=_plgpu().Layout.WGMMA.reduce(1 - dim))


def load_transposed(ref, *, optimized: bool = True) -> jax.Array:
    """Loads the transpose of a matrix [n, 64]: shared memory is read as fast as untransposed."""
    x = _plgpu().load(ref.T, layout=_plgpu().Layout.WGMMA_TRANSPOSED, optimized=optimized)
    return _plgpu().layout_cast(x, _plgpu().Layout.WGMMA)


def store_transposed(ref, x: jax.Array) -> None:
    """Stores the transpose of x [64, n]."""
    ref.T[...] = _plgpu().layout_cast(x, _plgpu().Layout.WGMMA_TRANSPOSED)


def tanh(x: jax.Array) -> jax.Array:
    """Computes tanh by exp2 and a division.

    The hardware's own instruction is off by 2^-11, which a softcap of 50 turns into 0.02.
    """
    return 1 - 2 / (jnp.exp2(x * (2 * LOG2E)) + 1)
