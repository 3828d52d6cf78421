"""Bounds the share of a GPU's peak that the main loop of an assembled kernel can reach.

A core has four schedulers. Each issues an instruction in a cycle, its tensor core takes a quarter
of the core's FLOPs, and its special units 4 exponentials; a warp's 32 take 8 cycles. At best all
three overlap with those of other warps, so a turn takes as long as the longest of them. Memory
reads, waiting and the masked tiles at the edges are extra. Nothing here imports jax.

A norm or an inverse has no matmuls: its turn moves bytes, and cannot be shorter than its
instructions. A program waits for its bytes, computes and writes; meanwhile only the core's others
use the memory. A scan over chunks is one long loop, which has its next bytes copied meanwhile: its
turn, a chunk, moves bytes too, and cannot be shorter than its instructions or its matmuls.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pallas_kernels.assembled.loops import main_loops, stream
from pallas_kernels.gpus import Gpu

SCHEDULERS = 4  # of a core
EXPONENTIAL_CYCLES = 8  # of a warp's instruction: 16 a cycle and core (CUDA C++ guide, throughput)
REGISTERS = 65536  # of a core
MATMULS = {
    "attention_forward": 2,
    "attention_dq": 3,
    "attention_dkv": 4,
    "grouped_matmul": 1,
    "grouped_matmul_weights": 1,
}
THREADS = 2048  # of a core
LATENCY = 600  # cycles from a read to its bytes: a little below what others measure on all three
PORT = 64  # bytes in a cycle between a core and the cache that all share
COUNTED = 5  # of the 7 matmuls backward, as papers count: two kernels make the scores twice
# Dense bfloat16 FLOPs of a core's tensor cores in a cycle: the data sheets' peak by their clock.
FLOPS_OF_A_CYCLE = {"ampere": 2048, "hopper": 4096, "blackwell": 8192}


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
    gpu: Gpu, ptx: str, report: str, text: str, needed: float, own_loops: int = 1
) -> Assembled:
    """Returns the figures of a kernel.

    Args:
      ptx: the PTX that was assembled.
      report: what `ptxas -v` printed.
      text: what `nvdisasm -c` printed.
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
    registers, threads, spilled = _resources(ptx, report)
    return Assembled(
        name=_first_match(r"\.entry (\w+?)(?:_mosaic_gpu_kernel)?\(", ptx),
        registers=registers,
        threads=threads,
        spilled=spilled,
        # Blackwell's instructions do not say how much they multiply: what is needed, at least.
        matmul_cycles=max(flops, needed if not flops else 0) / rate,
        needed_cycles=needed / rate,
        exponential_cycles=EXPONENTIAL_CYCLES * exponentials,
        issue_cycles=instructions,
    )


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """An assembled kernel that moves bytes. Cycles are those of a core, of a program's turn."""

    registers: int  # of a thread
    threads: int  # of a program
    spilled: int  # bytes
    launched: float  # programs of a core that the grid has
    memory_cycles: float  # of the bytes that a turn reads and writes, at the data sheet's rate
    issue_cycles: float
    alone_cycles: float  # of a turn on an idle GPU
    matmul_cycles: float = 0.0

    @property
    def programs(self) -> float:
        """The number of programs that run on a core at once."""
        fit = min(REGISTERS // (self.threads * self.registers), THREADS // self.threads)
        return min(fit, self.launched)

    @property
    def share(self) -> float:
        """The largest share of the data sheet's bandwidth that it can reach."""
        full, rest = divmod(self.launched, self.programs)
        cycles = full * self._cycles_of(self.programs)
        if rest:
            cycles += self._cycles_of(rest)
        return self.launched * self.memory_cycles / cycles

    @property
    def limit(self) -> str:
        """The resource that bounds it at best."""
        if self.launched > self.programs and self.launched % self.programs:
            full_waves = self.programs * self.memory_cycles / self._cycles_of(self.programs)
            if self.share < 0.99 * full_waves:
                return "a last wave that leaves cores idle"
        cycles = {
            "memory": self.programs * self.memory_cycles,
            "instructions": self.programs * self.issue_cycles,
            "matmuls": self.programs * self.matmul_cycles,
            "one program after another": self.alone_cycles,
        }
        limit = max(cycles, key=lambda name: cycles[name])
        return f"{limit}, spills" if self.spilled else limit

    def _cycles_of(self, programs: float) -> float:
        """Returns the cycles of a core until so many programs have had a turn each."""
        busy = programs * max(self.memory_cycles, self.issue_cycles, self.matmul_cycles)
        return max(busy, self.alone_cycles)


def streamed(gpu: Gpu, ptx: str, report: str, text: str, moved: float, grid: float) -> Streamed:
    """Returns the figures of a kernel that moves `moved` bytes in a turn, in `grid` programs.

    The text is as in `assembled`.
    """
    registers, threads, spilled = _resources(ptx, report)
    clock = gpu.bfloat16 / gpu.cores / FLOPS_OF_A_CYCLE[gpu.generation]
    issue_cycles = stream(text).instructions * threads / 32 / SCHEDULERS
    return Streamed(
        registers=registers,
        threads=threads,
        spilled=spilled,
        launched=grid / gpu.cores,
        memory_cycles=moved / (gpu.memory_bandwidth / gpu.cores / clock),
        issue_cycles=issue_cycles,
        alone_cycles=LATENCY + moved / PORT + issue_cycles,
    )


def carried(  # noqa: PLR0913 - what a text has, and four facts about the call
    gpu: Gpu,
    ptx: str,
    report: str,
    text: str,
    *,
    moved: float,
    grid: float,
    flops: float,
    warps: int,
) -> Streamed:
    """Returns the figures of a kernel with one loop, whose copies of the next turn go on meanwhile.

    Args:
      moved: bytes that a program reads and writes in a turn.
      grid: programs.
      flops: those of a program's matmuls in a turn.
      warps: those of a program that compute.
    """
    registers, threads, spilled = _resources(ptx, report)
    rate = FLOPS_OF_A_CYCLE[gpu.generation]
    issue_cycles = main_loops(text)[0].instructions * warps / SCHEDULERS
    matmul_cycles = flops / rate
    return Streamed(
        registers=registers,
        threads=threads,
        spilled=spilled,
        launched=grid / gpu.cores,
        memory_cycles=moved / (gpu.memory_bandwidth * rate / gpu.bfloat16),
        issue_cycles=issue_cycles,
        alone_cycles=max(moved / PORT, issue_cycles, matmul_cycles),
        matmul_cycles=matmul_cycles,
    )


def _resources(ptx: str, report: str) -> tuple[int, int, int]:
    """Returns the registers of a thread, threads of a program, and bytes that a thread spills."""
    return (
        int(_first_match(r"Used (\d+) registers", report)),
        int(_first_match(r"\.(?:max|req)ntid (\d+)", ptx)),
        int(_first_match(r"(\d+) bytes spill stores", report)),
    )


def forward_and_backward(kernels: Mapping[str, Assembled]) -> tuple[float, float]:
    """Returns the shares of the peak, as papers count FLOPs, of both passes."""
    backward = sum(
        MATMULS[name] / kernels[name].share for name in ("attention_dq", "attention_dkv")
    )
    return kernels["attention_forward"].share, COUNTED / backward


def _first_match(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern} in {text[:200]}"
    return match[1]
