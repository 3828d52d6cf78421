"""Assembles the kernels for absent GPUs and writes what bounds their time.

    python -m pallas_kernels.assembled [--write docs/kernel_bounds.md]

Needs what aot.py needs, and nvidia-cuda-nvdisasm. Nothing runs.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import files
from pathlib import Path
from typing import NamedTuple

from pallas_kernels.assembled.bounds import (
    MATMULS,
    Assembled,
    Streamed,
    assembled,
    forward_and_backward,
    streamed,
)
from pallas_kernels.assembled.recurrences import INVERSES, MODELS, SCANS, inverses_of, scans_of
from pallas_kernels.gpus import GPUS, Gpu

TARGETS = (
    ("h100", "mosaic"),
    ("h100", "triton"),
    ("a100-80", "triton"),
    ("b200", "triton"),
)
HEAD_DIMS = (64, 128, 256)
WIDTHS = (1024, 4096, 8192)  # of norms
EXPERTS = 16  # of the grouped matmul: Qwen3 30B's on one device, the up matmul
GROUPED = (2048, 1536)
ROWS = 65536
NORMS = ("norm_forward", "norm_backward")
LENGTH = 4096
# TFLOP/s of cuDNN on an H100, 16k tokens in sequences of 2k to 16k, not causal, read off the charts
# of arXiv:2407.08608: (forward, backward), by head dim.
CUDNN = {64: ("395 to 413", "395"), 128: ("595 to 617", "465 to 518"), 256: ("580 to 581", "")}
HEADER = """# What bounds the kernels' time

The kernels in bfloat16, assembled for absent GPUs; attention is causal, on {length} tokens. Nothing
ran: what a turn of the main loop must do bounds its time from below. A scheduler (four a core)
issues one instruction in a cycle; cycles are those of one warp. At best matmuls, exponentials and
all instructions overlap, and the longest of them is the turn. Memory, waiting and the tiles at the
edges come on top, so these figures say which kernel cannot win, but not which one does. Written by

    make aot
"""


class Assembly(NamedTuple):
    """The kernels of one call on one GPU.

    `size` is a head dim, a width, the contracted dim of a matmul, the number of a model in MODELS,
    or a number of matrices.
    """

    gpu: str  # of gpus.GPUS
    implementation: str
    op: str
    size: int


class Figures(NamedTuple):
    """The figures of all kernels, by their name."""

    attention: dict[tuple[str, str, int], Mapping[str, Assembled]]
    grouped: dict[tuple[str, str, int], Mapping[str, Assembled]]
    norms: dict[tuple[str, str, int], Mapping[str, Streamed]]
    recurrences: dict[tuple[str, str, str], Mapping[str, Streamed]]  # by the model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page; default: printed")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        gpu, implementation, op, size = chosen.child
        return _compile(Assembly(gpu, implementation, op, int(size)))
    text = page(_all())
    if chosen.write:
        chosen.write.write_text(text, encoding="utf-8")
    else:
        print(text)


def _all() -> Figures:
    figures = Figures({}, {}, {}, {})
    for gpu, implementation in TARGETS:
        for head_dim in HEAD_DIMS:
            at = (gpu, implementation, head_dim)
            figures.attention[at] = kernels_of(Assembly(gpu, implementation, "attention", head_dim))
        at = (gpu, implementation, GROUPED[0])
        figures.grouped[at] = kernels_of(Assembly(gpu, implementation, "grouped", GROUPED[0]))
        for width in WIDTHS if implementation == "triton" else ():
            at = (gpu, implementation, width)
            figures.norms[at] = norms_of(Assembly(gpu, implementation, "norm", width))
        for model in MODELS:
            figures.recurrences[gpu, implementation, model] = recurrences_of(
                gpu, implementation, model
            )
    return figures


def page(figures: Figures) -> str:
    """Returns the page: both passes of attention next to cuDNN's published figures, then each
    kernel.
    """
    lines = [HEADER.format(length=LENGTH), *_passes(figures), "", *_matmuls(figures)]
    if figures.norms:
        lines += ["", *_norms(figures)]
    if figures.recurrences:
        lines += ["", *_recurrences(figures)]
    return "\n".join(lines) + "\n"


def _passes(figures: Figures) -> Iterator[str]:
    yield from (
        "TFLOP/s at most, as papers count them: 2 matmuls forward, 5 backward. The backward pass",
        "is two kernels with 7, so that each sum has one order. cuDNN's figures are published ones",
        "of an H100 (arXiv:2407.08608), measured, and not causal.",
        "",
        "| GPU | implementation | head dim | forward | backward | cuDNN forward | cuDNN backward |",
        "|---|---|---|---|---|---|---|",
    )
    for (gpu, implementation, head_dim), kernels in figures.attention.items():
        peak = GPUS[gpu].bfloat16 / 1e12
        forward, backward = (f"{peak * share:.0f}" for share in forward_and_backward(kernels))
        cudnn = CUDNN[head_dim] if gpu == "h100" else ("", "")
        yield _row(gpu, implementation, head_dim, forward, backward, *cudnn)


def _matmuls(figures: Figures) -> Iterator[str]:
    yield from (
        "Cycles of a warp's turn. Programs are those that a core has registers for. Blackwell's",
        "matmuls do not say their shape: theirs are the cycles that the tile needs.",
        "",
        "| GPU | implementation | head dim | kernel | registers | spilled bytes | programs |"
        " matmuls | exponentials | instructions | of the peak at most | limit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    )
    for (gpu, implementation, size), kernels in (figures.attention | figures.grouped).items():
        for name, kernel in kernels.items():
            of_head = size if name.startswith("attention") else ""
            cells = (gpu, implementation, of_head, name.removeprefix("attention_"))
            cells += (
                kernel.registers,
                kernel.spilled,
                kernel.programs,
                f"{kernel.matmul_cycles:.0f}",
            )
            cells += (f"{kernel.exponential_cycles:.0f}", f"{kernel.issue_cycles:.0f}")
            yield _row(*cells, f"{kernel.share:.0%}", kernel.limit)


def _norms(figures: Figures) -> Iterator[str]:
    yield from (
        "RMSNorm with a residual. Cycles of a core in a program's turn: those of the bytes that it",
        "moves, at the data sheet's bandwidth, those of its instructions, and those of a program",
        "alone, which waits for its bytes (600 cycles), computes and writes: meanwhile only other",
        "programs of the core use the memory. Programs are those that a core runs at once.",
        "",
        "| GPU | width | kernel | registers | spilled bytes | programs | memory | instructions |"
        " alone | of the bandwidth at most | limit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    )
    for (gpu, _, width), kernels in figures.norms.items():
        for name, kernel in kernels.items():
            cells = (gpu, width, name.removeprefix("norm_"), kernel.registers, kernel.spilled)
            cells += (f"{kernel.programs:.2g}", f"{kernel.memory_cycles:.0f}")
            cells += (f"{kernel.issue_cycles:.0f}", f"{kernel.alone_cycles:.0f}")
            yield _row(*cells, f"{kernel.share:.0%}", kernel.limit)


def _recurrences(figures: Figures) -> Iterator[str]:
    yield from (
        "Recurrences of one sequence: the scan over 16 chunks and, by Triton, their inverses.",
        "Cycles of a core in a program's turn, which is a chunk or a matrix. The next chunks of a",
        "scan are copied meanwhile: alone, a program takes what its bytes need into the core, its",
        "matmuls or its instructions, whichever is longest. An inverse is bounded like a norm.",
        "",
        "| GPU | implementation | model | kernel | registers | spilled bytes | programs | memory |"
        " matmuls | instructions | alone | of the bandwidth at most | limit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    )
    for (gpu, implementation, model), kernels in figures.recurrences.items():
        for name, kernel in kernels.items():
            cells = (gpu, implementation, model, name, kernel.registers, kernel.spilled)
            cells += (f"{kernel.programs:.2g}", f"{kernel.memory_cycles:.0f}")
            cells += (f"{kernel.matmul_cycles:.0f}", f"{kernel.issue_cycles:.0f}")
            yield _row(*cells, f"{kernel.alone_cycles:.0f}", f"{kernel.share:.0%}", kernel.limit)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def kernels_of(work: Assembly) -> dict[str, Assembled]:
    """Assembles forward and backward; of two kernels of one name, the slower one."""
    kernels: dict[str, Assembled] = {}
    gpu = GPUS[work.gpu]
    for name, ptx, report, text in _texts(work, MATMULS):
        needed, own_loops = _tile(work, name)
        kernel = assembled(gpu, ptx, report, text, needed, own_loops)
        if name not in kernels or kernel.share < kernels[name].share:
            kernels[name] = kernel
    return {name: kernels[name] for name in MATMULS if name in kernels}


def norms_of(work: Assembly) -> dict[str, Streamed]:
    """Assembles forward and backward of a norm."""
    from pallas_kernels.norm.triton import block_of, programs_of

    gpu = GPUS[work.gpu]
    rows, width = block_of(ROWS, work.size, work.implementation)
    grids = {
        "norm_forward": ROWS / rows,
        "norm_backward": programs_of(ROWS // rows, gpu.device_kinds[0], "triton"),
    }
    # Forward reads x and the residual, and writes y and the sum; backward reads the sum and both
    # gradients, and writes one.
    moved = 4 * 2.0 * rows * width
    kernels = {}
    for name, ptx, report, text in _texts(work, NORMS):
        kernels[name] = streamed(gpu, ptx, report, text, moved, grids[name])
    return {name: kernels[name] for name in NORMS}


def recurrences_of(gpu: str, implementation: str, model: str) -> dict[str, Streamed]:
    """Assembles forward and backward of a model's scan, and of the inverses that it needs."""
    from pallas_kernels.inverse import triton
    from pallas_kernels.recurrence.cases import PUBLISHED

    case = PUBLISHED[model]
    work = Assembly(gpu, implementation, "recurrence", MODELS.index(model))
    kernels = dict(scans_of(GPUS[gpu], implementation, model, _texts(work, SCANS)))
    names = [*SCANS]
    if implementation == "triton" and case.corrects:
        size, matrices = triton.LARGEST, case.chunks * case.heads
        work = Assembly(gpu, implementation, "inverse", matrices)
        kernels |= inverses_of(GPUS[gpu], matrices, size, _texts(work, INVERSES))
        names += INVERSES
    return {name: kernels[name] for name in names}


def _texts(work: Assembly, names) -> Iterator[tuple[str, str, str, str]]:
    """Compiles in a separate process; yields (kernel, PTX, ptxas's report, its instructions)."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_emitter_re=.*"
        environment = {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": folder, "XLA_FLAGS": flags}
        command = [sys.executable, "-m", "pallas_kernels.assembled", "--child"]
        subprocess.run(
            [*command, *map(str, work)],
            env=os.environ | environment,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        for path in sorted(Path(folder).glob("*.ptx")):
            ptx = path.read_text(encoding="utf-8")
            entries = set(re.findall(r"\.entry (\w+?)(?:_mosaic_gpu_kernel)?\(", ptx))
            for name in names:
                if entries & {name, f"{name}_1"}:
                    yield name, ptx, *_assemble(path, GPUS[work.gpu])


def _compile(work: Assembly) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_kernels.aot import described_devices

    mesh = Mesh(np.array(described_devices(work.gpu)), ("all",))
    run, shapes = _program(work)
    placed = NamedSharding(mesh, P())
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), shapes)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(lambda arrays: run(work.implementation, **arrays)).lower(arrays).compile()


def _program(work: Assembly):
    """Returns (`run(implementation, **arrays)`, the shapes of the arrays)."""
    from pallas_kernels import aot

    if work.op == "attention":
        from pallas_kernels.attention import cases

        case = cases.Case(b=1, t=LENGTH, d=work.size, heads=(16, 16), causal=True)
        return aot.attention_program(case.options()), case.abstract()
    if work.op == "norm":
        from pallas_kernels.norm import cases

        case = cases.Case(rows=ROWS, width=work.size, residual="bfloat16")
        return aot.norm_program(case.op), case.abstract()
    if work.op == "recurrence":
        from pallas_kernels.recurrence import cases

        return aot.recurrence_program, cases.PUBLISHED[MODELS[work.size]].abstract()
    if work.op == "inverse":
        from pallas_kernels.inverse import cases

        return aot.inverse_program, cases.Case(size=64, matrices=work.size).abstract()
    from pallas_kernels.grouped import cases

    case = cases.Case(
        tile=128,
        width=work.size,
        out_width=GROUPED[1],
        experts=EXPERTS,
        tiles=LENGTH // 128,
        dtype="bfloat16",
    )
    return aot.grouped_program, case.abstract()


def _assemble(path: Path, gpu: Gpu) -> tuple[str, str]:
    """Returns ptxas's report on a kernel, and its instructions."""
    assert gpu.compute_capability is not None, gpu.name
    major, minor = gpu.compute_capability
    architecture = f"sm_{major}{minor}" + "a" * (major >= 9)
    cubin = path.with_suffix(".cubin")
    assembler = _tool("nvidia-cuda-nvcc", "ptxas")
    command = [assembler, f"-arch={architecture}", "-v", path, "-o", cubin]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    command = [_tool("nvidia-cuda-nvdisasm", "nvdisasm"), "-c", cubin]
    return report, subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _tool(package: str, name: str) -> Path:
    for file in files(package) or ():
        if file.name == name:
            return Path(str(file.locate()))
    raise SystemExit(f"there is no {name} in {package}")


def _tile(work: Assembly, name: str) -> tuple[float, int]:
    """Returns the FLOPs of a warp's share of a tile, and the number of loops that run
    concurrently.
    """
    if work.op == "grouped":
        return _tile_of_grouped(work.implementation, name), 1
    from pallas_kernels.attention import tiling

    own_loops = 1
    if work.implementation == "mosaic":
        table = {
            "attention_forward": tiling.HOPPER_FORWARD,
            "attention_dq": tiling.HOPPER_DQ,
            "attention_dkv": tiling.HOPPER_DKV,
        }[name]
        tile = table[work.size]
        # Two warpgroups of 4 warps compute; in the forward kernel each has its own tile.
        warps = 4 if name == "attention_forward" else 8
        if name == "attention_dkv" and tile.k < 128:  # one makes dk and one dv, of the same keys
            own_loops = 2
    else:
        kind = GPUS[work.gpu].device_kinds[0]
        tile = tiling.triton_table(name, kind)[2][work.size]
        warps = tile.warps
    return 2.0 * MATMULS[name] * tile.q * tile.k * work.size / warps, own_loops


def _tile_of_grouped(implementation: str, name: str) -> float:
    """Returns the FLOPs of a warp's share of a block; both have 8 computing warps."""
    from pallas_kernels.grouped import mosaic, triton

    if implementation == "mosaic":
        return 2.0 * mosaic.SIDE**2 * mosaic.STEP / 8
    block = (triton.WEIGHTS if name.endswith("weights") else triton.MULTIPLY)[2]
    return 2.0 * block.rows * block.contracted * block.columns / 8


if __name__ == "__main__":
    main()
