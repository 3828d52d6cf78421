"""Bounds the share of a GPU's peak that the main loop of an assembled attention kernel can reach.

A core has four schedulers. Each issues an instruction in a cycle, its tensor core takes a quarter
of the core's FLOPs, and its special units 4 exponentials; a warp's 32 take 8 cycles. At best all
three overlap with those of other warps, so a turn takes as long as the longest of them. Memory
reads, waiting and the masked tiles at the edges are extra. Nothing here imports jax.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pallas_kernels.assembled.loops import main_loops
from pallas_kernels.gpus import Gpu

SCHEDULERS = 4  # of a core
EXPONENTIAL_CYCLES = 8  # of a warp's instruction: 16 a cycle and core (CUDA C++ guide, throughput)
REGISTERS = 65536  # of a core
MATMULS = {"attention_forward": 2, "attention_dq": 3, "attention_dkv": 4}
COUNTED = 5  # of the 7 matmuls backward, as papers count: two kernels make the scores twice
# Dense bfloat16 FLOPs of a core's tensor cores in a cycle: the data sheets' peak by their clock.
FLOPS_OF_A_CYCLE = {"ampere": 2048, "hopper": 4096}


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """An assembled kernel. A scheduler's cycles are those of a warp's turn."""

    name: str
    registers: int  # of a thread
    threads: int  # of a program
    spilled: int  # bytes that a thread writes to memory for lack of registers
    matmul_cycles: float  # of all matmuls of the loop
    needed_cycles: float  # of those that its tile needs; the rest are computed twice
    exponential_cycles: float
    issue_cycles: float

    @property
    def share(self) -> float:
        """The largest share of the peak that its matmuls can reach."""
        longest = max(self.matmul_cycles, self.exponential_cycles, self.issue_cycles)
        return self.needed_cycles / longest

    @property
    def programs(self) -> int:
        """The number of programs that a core has registers for."""
        return REGISTERS // (self.threads * self.registers)

    @property
    def limit(self) -> str:
        """The unit that bounds the turn at best."""
        cycles = {
            "matmuls": self.matmul_cycles,
            "exponentials": self.exponential_cycles,
            "instructions": self.issue_cycles,
        }
        limit = max(cycles, key=lambda name: cycles[name])
        if limit == "matmuls" and self.matmul_cycles > self.needed_cycles:
            limit = "matmuls made twice"
        return f"{limit}, spills" if self.spilled else limit


def assembled(
    gpu: Gpu, ptx: str, said: str, text: str, needed: float, own_loops: int = 1
) -> Assembled:
    """Returns the figures of a kernel.

    Args:
      ptx: what was assembled.
      said: by `ptxas -v`.
      text: by `nvdisasm -c`.
      needed: FLOPs of a warp in a turn, of the tile's matmuls.
      own_loops: how many loops run concurrently, each in its own warpgroup: a scheduler has a
        warp of each.
    """
    loops = main_loops(text)[:own_loops]
    flops, exponentials, instructions = (
        sum(counts) / own_loops
        for counts in zip(
            *((loop.flops, loop.exponentials, loop.instructions) for loop in loops), strict=True
        )
    )
    rate = FLOPS_OF_A_CYCLE[gpu.generation] / SCHEDULERS
    return Assembled(
        name=_found(r"\.entry (\w+?)(?:_mosaic_gpu_kernel)?\(", ptx),
        registers=int(_found(r"Used (\d+) registers", said)),
        threads=int(_found(r"\.(?:max|req)ntid (\d+)", ptx)),
        spilled=int(_found(r"(\d+) bytes spill stores", said)),
        matmul_cycles=flops / rate,
        needed_cycles=needed / rate,
        exponential_cycles=EXPONENTIAL_CYCLES * exponentials,
        issue_cycles=instructions,
    )


def forward_and_backward(kernels: Mapping[str, Assembled]) -> tuple[float, float]:
    """Returns the shares of the peak, as papers count FLOPs, of both passes."""
    backward = sum(
        MATMULS[name] / kernels[name].share for name in ("attention_dq", "attention_dkv")
    )
    return kernels["attention_forward"].share, COUNTED / backward


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern} in {text[:200]}"
    return match[1]
