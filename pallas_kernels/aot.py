"""Compiles every case for absent NVIDIA GPUs, through ptxas; nothing runs.

    python -m pallas_kernels.aot [--gpus a100-80 h200 b200]
                                 [--ops attention norm grouped recurrence inverse]
                                 [--implementations mosaic triton cudnn]
                                 [--only TEXT] [--first N] [--jobs N]

Forward and backward of each case are one program. Prints a line per case, then how many were
refused and why; fails if one did not compile.

Needs jax >= 0.11, its CUDA plugin and compiler wheels (jax-cuda13-plugin, jax-cuda13-pjrt,
nvidia-cuda-nvcc, nvidia-nvvm; `pip install --no-deps`), no driver. cuDNN is compiled only with
nvidia-cudnn-cu13 too, and for one GPU: jax's checks of a call hardly depend on the GPU, and
cuDNN plans on the GPU that runs it.

A compiler that aborts loses only its own case: cases run in child processes, which are restarted
after an abort. A child compiles for one GPU, whatever else there is to compile for it: to start one
takes longer than most cases.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels import gpus

COMPILED_FOR = ("a100-80", "h200", "b200")  # by default: sm_80, sm_90a, sm_100a
CUDNN_GPU = "h200"
KERNEL_CALLS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2", "__cudnn$fmha")  # in compiled text


class Work(NamedTuple):
    """A child's work: of one op, one implementation and one GPU, the `first` cases named `only`."""

    gpu: str  # of gpus.GPUS
    op: str
    implementation: str
    first: int
    only: str  # part of a case's name

    @property
    def title(self) -> str:
        return f"{self.gpu} {self.op} {self.implementation}"


def described_devices(gpu: str, count: int = 1):
    """Returns `count` devices on one host, which can be compiled for."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        platform="cuda",
        target_config=gpus.xla_target(gpus.GPUS[gpu]),
        topology=f"1x1x{count}",
    ).devices


def programs(op: str) -> Iterator[tuple[str, Callable, dict]]:
    """Yields (name of the case, `run(implementation, **arrays)`, shapes of the arrays).

    `run` is forward and backward.
    """
    if op == "attention":
        from pallas_kernels.attention import cases

        for case in dict.fromkeys([*cases.CI, *cases.timed(), *cases.SLOW]):
            yield case.name, attention_program(case.options()), case.abstract()
    if op == "norm":
        from pallas_kernels.norm import cases

        for case in dict.fromkeys([*cases.CI, *cases.timed(), *cases.SLOW]):
            yield case.name, norm_program(case.op), case.abstract()
    if op == "grouped":
        from pallas_kernels.grouped import cases

        for case in dict.fromkeys([*cases.CI, *cases.timed(), *cases.SLOW]):
            yield case.name, grouped_program, case.abstract()
    if op == "recurrence":
        from pallas_kernels.recurrence import cases

        for case in dict.fromkeys([*cases.CI, *cases.timed(), *cases.SLOW]):
            yield case.name, recurrence_program, case.abstract()
    if op == "inverse":
        from pallas_kernels.inverse import cases

        for case in dict.fromkeys([*cases.CI, *cases.timed(), *cases.SLOW]):
            yield case.name, inverse_program, case.abstract()


def attention_program(options):
    import jax

    from pallas_kernels.attention import attention

    def run(implementation, q, k, v, dout, bias=None):
        def forward(q, k, v):
            return attention(q, k, v, bias=bias, implementation=implementation, **options)

        out, pull = jax.vjp(forward, q, k, v)
        return out, pull(dout)

    return run


def norm_program(op):
    import jax

    from pallas_kernels import norm

    def run(implementation, x, scale, bias, residual, dy, dtotal):
        arrays = {"x": x, "scale": scale, "bias": bias, "residual": residual}
        present = {name: array for name, array in arrays.items() if array is not None}

        def forward(present):
            return getattr(norm, op)(**present, implementation=implementation)

        out, pull = jax.vjp(forward, present)
        return out, pull(dy if residual is None else (dy, dtotal))

    return run


def grouped_program(implementation, x, w, dy, expert_of_tile):
    import jax

    from pallas_kernels.grouped import grouped_matmul

    def forward(x, w):
        return grouped_matmul(x, w, expert_of_tile, implementation=implementation)

    y, pull = jax.vjp(forward, x, w)
    return y, pull(dy)


def recurrence_program(implementation, do, dlast, **arrays):
    import jax

    from pallas_kernels.recurrence import scan_chunks
    from pallas_kernels.recurrence.cases import chunks_in

    present = {name: array for name, array in arrays.items() if array is not None}

    def forward(present):
        return scan_chunks(chunks_in(present), present["state"], implementation=implementation)

    results, pull = jax.vjp(forward, present)
    return results, pull((do, dlast))


def inverse_program(implementation, lower, dy):
    import jax

    from pallas_kernels.inverse import unit_inverse

    y, pull = jax.vjp(lambda lower: unit_inverse(lower, implementation=implementation), lower)
    return y, pull(dy)


def mosaic_faults(folder: Path) -> str:
    """Returns ptxas's complaints about the Mosaic kernels in `folder`; removes the reports.

    These are spilled registers, and a wgmma that is waited for at once: the kernel is correct, but
    slow.
    """
    faults = []
    for path in sorted(folder.glob("*.ptxas")):
        report = path.read_text(encoding="utf-8")
        spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill", report))
        if spilled:
            faults.append(f"{path.stem} spills {spilled} bytes of registers")
        if "instructions are serialized" in report:
            faults.append(f"{path.stem} waits after each wgmma")
    for path in folder.iterdir():
        path.unlink()
    return "; ".join(faults)


def compile_works() -> None:
    """Compiles, as the child, the works that come in, a line of [*work, skip] each.

    Prints what `compile_cases` prints of each, and then null in a line.
    """
    with tempfile.TemporaryDirectory() as reports:
        os.environ["MOSAIC_GPU_DUMP_TO"] = reports
        for line in sys.stdin:
            *work, skip = json.loads(line)
            compile_cases(Work(*work), skip, Path(reports))
            print(json.dumps(None), flush=True)


def compile_cases(work: Work, skip: int, reports: Path) -> None:
    """Compiles, as the child, all cases but the first `skip`; ptxas writes into `reports`.

    Prints two JSON objects per case, one per line: {"case"} before it starts, then {"case",
    "seconds"} with "calls" (kernels in the compiled program), "refused" or "error".
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_kernels.choose import Refused

    mesh = Mesh(np.array(described_devices(work.gpu)), ("all",))
    if work.implementation == "cudnn":  # without a GPU jax assumes one older than Hopper
        from jax._src.cudnn import fused_attention_stablehlo

        fused_attention_stablehlo.check_compute_capability = lambda _: True

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))

    chosen = [program for program in programs(work.op) if work.only in program[0]]
    for name, run, shapes in chosen[skip : work.first]:
        print(json.dumps({"case": name}), flush=True)
        arrays = jax.tree.map(place, shapes)
        outcome: dict[str, Any] = {"case": name}
        start = time.perf_counter()
        try:
            step = jax.jit(lambda arrays, run=run: run(work.implementation, **arrays))
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                text = step.lower(arrays).compile().as_text()
            assert text is not None, "the compiler shows no text"
            outcome["calls"] = sum(text.count(f'="{call}') for call in KERNEL_CALLS)
            if faults := mosaic_faults(reports):
                outcome["error"] = faults
        except Refused as refused:
            outcome["refused"] = str(refused)
        except Exception as error:  # whatever error the compiler raises
            outcome["error"] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        outcome["seconds"] = round(time.perf_counter() - start, 2)
        print(json.dumps(outcome), flush=True)


class Child:
    """The process that compiles for a GPU; another GPU, or an abort, takes another one."""

    def __init__(self) -> None:
        self._gpu = ""
        self._process: subprocess.Popen[str] | None = None

    def outcomes(self, work: Work) -> Iterator[dict]:
        """Yields the outcomes of `compile_cases`, and an "error" for a case that aborts it."""
        done = 0
        while True:
            process = self._process_for(work.gpu)
            assert process.stdin is not None and process.stdout is not None, "they are pipes"
            print(json.dumps([*work, done]), file=process.stdin, flush=True)
            started = None
            for line in process.stdout:
                outcome = json.loads(line)
                if outcome is None:
                    return
                if len(outcome) == 1:
                    started = outcome["case"]
                else:
                    started = None
                    done += 1
                    yield outcome
            code = process.wait()
            if started is None:
                raise SystemExit(
                    f"the compiling process ended with {code} outside any case: {work}"
                )
            self._process = None
            done += 1
            yield {"case": started, "error": f"aborted the compiler ({code})"}

    def close(self) -> None:
        """Ends the process, which ends by itself where no more works come in."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _process_for(self, gpu: str) -> subprocess.Popen[str]:
        if gpu != self._gpu:
            self.close()
        if self._process is None:
            self._gpu = gpu
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pallas_kernels.aot", "--child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
        return self._process


def combinations(
    names: list[str], ops: list[str], implementations: list[str] | None, first: int, only: str
) -> list[Work]:
    """Returns work for every GPU, op and implementation; None: all implementations but XLA's."""
    from pallas_kernels.attention import api as attention
    from pallas_kernels.grouped import api as grouped
    from pallas_kernels.inverse import api as inverse
    from pallas_kernels.norm import api as norm
    from pallas_kernels.recurrence import api as recurrence

    apis = {
        "attention": attention,
        "norm": norm,
        "grouped": grouped,
        "recurrence": recurrence,
        "inverse": inverse,
    }
    if implementations is None:
        every = dict.fromkeys(name for api in apis.values() for name in api.IMPLEMENTATIONS)
        implementations = [name for name in every if name != "xla"]
    works = [
        Work(gpu, op, name, first, only)
        for gpu in names
        for op in ops
        for name in implementations
        if name in apis[op].candidates()
    ]
    if any(work.implementation == "cudnn" for work in works) and not has_cudnn():
        print("cudnn is left out: there is no nvidia-cudnn-cu13")
        return [work for work in works if work.implementation != "cudnn"]
    return [work for work in works if work.implementation != "cudnn" or work.gpu == CUDNN_GPU]


def has_cudnn() -> bool:
    try:
        return importlib.util.find_spec("nvidia.cudnn") is not None
    except ModuleNotFoundError:  # no nvidia package at all
        return False


def report_all(works: Iterator[Work]) -> dict[Work, Counter]:
    """Reports one work after another in a child; other threads may take from the same `works`."""
    with contextlib.closing(Child()) as child:
        return {work: report(work, child) for work in works}


def report(work: Work, child: Child) -> Counter:
    """Prints a line per case; counts "compiled", "failed" and ("refused", reason)."""
    counts = Counter()
    for outcome in child.outcomes(work):
        if "error" in outcome:
            kind = "failed"
            details = outcome["error"]
            counts[kind] += 1
        elif "refused" in outcome:
            kind = "refused"
            details = outcome["refused"].partition("refuses: ")[2].partition("; try ")[0]
            general = re.split(r",? not |, \d", details)[0]  # without this case's own figures
            counts[kind, general] += 1
        else:
            kind = "compiled"
            details = f"{outcome['calls']} kernels"
            counts[kind] += 1
        seconds = outcome.get("seconds", 0)
        print(f"{work.title} {outcome['case']}: {kind}, {details} ({seconds} s)", flush=True)
    return counts


def main() -> None:
    described = [name for name, gpu in gpus.GPUS.items() if gpu.xla is not None]
    ops = ("attention", "norm", "grouped", "recurrence", "inverse")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", nargs="+", default=COMPILED_FOR, choices=described)
    parser.add_argument("--ops", nargs="+", default=ops, choices=ops)
    parser.add_argument("--implementations", nargs="+", help="default: all but xla")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
    parser.add_argument(
        "--first", type=int, default=10**6, help="at most this many cases of each op"
    )
    parser.add_argument(
        "--jobs", type=int, default=max((os.cpu_count() or 1) // 2, 1), help="compilers at a time"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        return compile_works()
    works = combinations(chosen.gpus, chosen.ops, chosen.implementations, chosen.first, chosen.only)
    counts: dict[Work, Counter] = {}
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for reported in pool.map(report_all, [iter(works)] * chosen.jobs):
            counts |= reported
    total = Counter()
    for work in works:
        outcomes = counts[work]
        own = {"compiled": outcomes["compiled"], "refused": 0, "failed": outcomes["failed"]}
        for kind, count in outcomes.items():
            if isinstance(kind, tuple):
                own["refused"] += count
                print(f"{work.title} refused {count}: {kind[1]}")
        print(work.title, own)
        total.update(own)
    print(dict(total))
    sys.exit(bool(total["failed"]) or not total["compiled"])


if __name__ == "__main__":
    main()
