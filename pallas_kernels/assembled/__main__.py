"""Assembles the attention kernels for absent GPUs and writes what bounds their time.

    python -m pallas_kernels.assembled [--write docs/kernel_bounds.md]

Needs what aot.py needs, and nvidia-cuda-nvdisasm. Nothing runs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from importlib.metadata import files
from pathlib import Path

from pallas_kernels.assembled.bounds import (
    MATMULS,
    Assembled,
    assembled,
    forward_and_backward,
)
from pallas_kernels.gpus import GPUS, Gpu

TARGETS = (("h100", "mosaic"), ("h100", "triton"), ("a100-80", "triton"))
HEAD_DIMS = (64, 128, 256)
LENGTH = 4096
# TFLOP/s of cuDNN on an H100, 16k tokens in sequences of 2k to 16k, not causal, read off the charts
# of arXiv:2407.08608: (forward, backward), by head dim.
CUDNN = {64: ("395 to 413", "395"), 128: ("595 to 617", "465 to 518"), 256: ("580 to 581", "")}
HEADER = """# What bounds the kernels' time

The attention kernels in bfloat16, assembled for GPUs that are not there, {length} tokens, causal.
Nothing ran: what a turn of the main loop must do bounds its time from below. A scheduler (four a
core) issues one instruction in a cycle; cycles are those of one warp. At best matmuls, exponentials
and all instructions overlap, and the longest of them is the turn. Memory, waiting and the tiles
at the edges come on top, so that these figures say which kernel cannot win, and not which one
does. Written by

    make aot
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page; default: printed")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        gpu, implementation, head_dim = chosen.child
        return _compile(gpu, implementation, int(head_dim))
    found = {
        (gpu, implementation, head_dim): kernels_of(GPUS[gpu], implementation, head_dim)
        for gpu, implementation in TARGETS
        for head_dim in HEAD_DIMS
    }
    text = page(found)
    if chosen.write:
        chosen.write.write_text(text, encoding="utf-8")
    else:
        print(text)


def page(found: dict[tuple[str, str, int], dict[str, Assembled]]) -> str:
    """Returns the page: both passes next to cuDNN's published figures, then each kernel."""
    lines = [HEADER.format(length=LENGTH)]
    lines += [
        "TFLOP/s at most, as papers count them: 2 matmuls forward, 5 backward. The backward pass",
        "is two kernels with 7, so that each sum has one order. cuDNN's figures are published ones",
        "of an H100 (arXiv:2407.08608), measured, and not causal.",
        "",
        "| GPU | implementation | head dim | forward | backward | cuDNN forward | cuDNN backward |",
        "|---|---|---|---|---|---|---|",
    ]
    for (gpu, implementation, head_dim), kernels in found.items():
        peak = GPUS[gpu].bfloat16 / 1e12
        forward, backward = (f"{peak * share:.0f}" for share in forward_and_backward(kernels))
        cudnn = CUDNN[head_dim] if gpu == "h100" else ("", "")
        cells = (gpu, implementation, str(head_dim), forward, backward, *cudnn)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Cycles of a warp's turn. Programs are those that a core has registers for.",
        "",
        "| GPU | implementation | head dim | kernel | registers | spilled bytes | programs |"
        " matmuls | exponentials | instructions | of the peak at most | limit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (gpu, implementation, head_dim), kernels in found.items():
        for name, each in kernels.items():
            cells = (gpu, implementation, head_dim, name.removeprefix("attention_"))
            cells += (each.registers, each.spilled, each.programs, f"{each.matmul_cycles:.0f}")
            cells += (f"{each.exponential_cycles:.0f}", f"{each.issue_cycles:.0f}")
            cells += (f"{each.share:.0%}", each.limit)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def kernels_of(gpu: Gpu, implementation: str, head_dim: int) -> dict[str, Assembled]:
    """Compiles forward and backward in a separate process and assembles its output."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_emitter_re=.*"
        environment = {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": folder, "XLA_FLAGS": flags}
        command = [sys.executable, "-m", "pallas_kernels.assembled", "--child"]
        subprocess.run(
            [*command, gpu.name, implementation, str(head_dim)],
            env=os.environ | environment,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        found = {}
        for path in sorted(Path(folder).glob("*.ptx")):
            ptx = path.read_text(encoding="utf-8")
            name = next((name for name in MATMULS if f".entry {name}" in ptx), None)
            if name is not None:
                said, text = _assemble(path, gpu)
                needed, own_loops = _tile(gpu, implementation, name, head_dim)
                found[name] = assembled(gpu, ptx, said, text, needed, own_loops)
    return {name: found[name] for name in MATMULS}


def _compile(gpu: str, implementation: str, head_dim: int) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_kernels.aot import attention_program, described_devices
    from pallas_kernels.attention.cases import Case

    mesh = Mesh(np.array(described_devices(gpu)), ("all",))
    case = Case(b=1, t=LENGTH, d=head_dim, heads=(16, 16), causal=True)
    run = attention_program(case.options())
    placed = NamedSharding(mesh, P())
    arrays = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)
        for name, x in case.abstract().items()
    }
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(lambda arrays: run(implementation, **arrays)).lower(arrays).compile()


def _assemble(path: Path, gpu: Gpu) -> tuple[str, str]:
    """Returns ptxas's report on a kernel, and its instructions."""
    assert gpu.compute_capability is not None, gpu.name
    major, minor = gpu.compute_capability
    architecture = f"sm_{major}{minor}" + "a" * (major >= 9)
    cubin = path.with_suffix(".cubin")
    assembler = _tool("nvidia-cuda-nvcc", "ptxas")
    command = [assembler, f"-arch={architecture}", "-v", path, "-o", cubin]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    command = [_tool("nvidia-cuda-nvdisasm", "nvdisasm"), "-c", cubin]
    return said, subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _tool(package: str, name: str) -> Path:
    for file in files(package) or ():
        if file.name == name:
            return Path(str(file.locate()))
    raise SystemExit(f"there is no {name} in {package}")


def _tile(gpu: Gpu, implementation: str, name: str, head_dim: int) -> tuple[float, int]:
    """Returns the FLOPs of a warp's share of a tile, and the number of loops that run
    concurrently.
    """
    from pallas_kernels.attention import tiling

    own_loops = 1
    if implementation == "mosaic":
        table = {
            "attention_forward": tiling.HOPPER_FORWARD,
            "attention_dq": tiling.HOPPER_DQ,
            "attention_dkv": tiling.HOPPER_DKV,
        }[name]
        tile = table[head_dim]
        # Two warpgroups of 4 warps compute; in the forward kernel each has its own tile.
        warps = 4 if name == "attention_forward" else 8
        if name == "attention_dkv" and tile.k < 128:  # one makes dk and one dv, of the same keys
            own_loops = 2
    else:
        tile = tiling.triton_table(name, gpu.device_kinds[0])[2][head_dim]
        warps = tile.warps
    return 2.0 * MATMULS[name] * tile.q * tile.k * head_dim / warps, own_loops


if __name__ == "__main__":
    main()
