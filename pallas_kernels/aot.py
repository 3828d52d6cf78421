"""Compiles every case for NVIDIA GPUs that are not there, through ptxas: forward and backward, nothing runs.

    python -m pallas_kernels.aot [--gpus a100-80 h200 b200] [--ops attention norm]
                                 [--implementations mosaic triton cudnn] [--only TEXT] [--first N] [--jobs N]

Needs jax >= 0.11, its CUDA plugin and compiler wheels (jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc,
nvidia-nvvm; `pip install --no-deps`), no driver. Only with nvidia-cudnn-cu13 too is cudnn compiled, for one GPU: what
jax checks of it hardly depends on that, and its own plan it makes where the GPU is. A compiler that aborts takes only
its own case along: cases run in a process of their own that is started anew after it. Prints a line per case, then how
many were refused and why, and fails if one did not compile.
"""

import argparse
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
from typing import NamedTuple

from pallas_kernels import gpus

COMPILED_FOR = ("a100-80", "h200", "b200")  # unless told otherwise: sm_80, sm_90a, sm_100a
CUDNN_GPU = "h200"
CALLS = "__gpu$xla.gpu.triton", "mosaic_gpu_v2", "__cudnn$fmha"  # as compiled programs name them


class Work(NamedTuple):
    """The `first` cases of those whose name holds `only`, of one op with one implementation for one GPU."""

    gpu: str
    op: str
    implementation: str
    first: int
    only: str

    @property
    def title(self) -> str:
        return f"{self.gpu} {self.op} {self.implementation}"


def devices(gpu: str, count: int = 1):
    """`count` devices on one host, which can be compiled for."""
    from jax.experimental import topologies

    target = gpus.xla_target(gpus.GPUS[gpu])
    return topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"1x1x{count}"
    ).devices


def programs(op: str) -> Iterator[tuple[str, Callable, dict]]:
    """(name of the case, `run(implementation, **arrays)` forward and backward, shapes of the arrays)"""
    if op == "attention":
        from pallas_kernels.attention import attention, cases

        for case in dict.fromkeys([*cases.CI, *cases.timed(), *cases.SLOW]):
            yield case.name, _attention(attention, case.options()), case.abstract()
    if op == "norm":
        from pallas_kernels import norm
        from pallas_kernels.norm import cases

        for case in dict.fromkeys([*cases.CI, *cases.timed(), *cases.SLOW]):
            yield case.name, _norm(getattr(norm, case.op)), case.abstract()


def _attention(attention, options):
    import jax

    def run(implementation, q, k, v, dout, bias=None):
        out, pull = jax.vjp(
            lambda *qkv: attention(*qkv, bias=bias, implementation=implementation, **options),
            q,
            k,
            v,
        )
        return out, pull(dout)

    return run


def _norm(norm):
    import jax

    def run(implementation, x, scale, bias, residual, dy, dtotal):
        there = {"x": x, "scale": scale, "bias": bias, "residual": residual}
        there = {name: each for name, each in there.items() if each is not None}
        out, pull = jax.vjp(lambda given: norm(**given, implementation=implementation), there)
        return out, pull(dy if residual is None else (dy, dtotal))

    return run


def mosaic_faults(folder: Path) -> str:
    """What ptxas says against the Mosaic kernels whose reports are in `folder`, "" if nothing; removes the reports."""
    found = []
    for path in sorted(folder.glob("*.ptxas")):
        said = path.read_text()
        if spilled := sum(int(count) for count in re.findall(r"(\d+) bytes spill", said)):
            found.append(f"{path.stem} spills {spilled} bytes of registers")
        if "instructions are serialized" in said:
            found.append(f"{path.stem} waits after each wgmma")
    for path in folder.iterdir():
        path.unlink()
    return "; ".join(found)


def compile_cases(work: Work, skip: int) -> None:
    """In a process of its own, all but the first `skip`: {"case", "seconds", "refused" or "error" or "calls"} per line,
    after {"case"} alone."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_kernels.choose import Refused

    mesh = Mesh(np.array(devices(work.gpu)), ("all",))
    if work.implementation == "cudnn":  # without a GPU jax checks what those before Hopper can
        from jax._src.cudnn import fused_attention_stablehlo

        fused_attention_stablehlo.check_compute_capability = lambda _: True
    reports = tempfile.TemporaryDirectory()
    os.environ["MOSAIC_GPU_DUMP_TO"] = reports.name
    chosen = [each for each in programs(work.op) if work.only in each[0]]
    for name, run, shapes in chosen[skip : work.first]:
        print(json.dumps({"case": name}), flush=True)
        here = NamedSharding(mesh, P())
        given = jax.tree.map(
            lambda x, here=here: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes
        )
        start, found = time.perf_counter(), {"case": name}
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                made = (
                    jax.jit(lambda given, run=run: run(work.implementation, **given))
                    .lower(given)
                    .compile()
                )
            text = made.as_text()
            found["calls"] = sum(text.count(f'="{name}') for name in CALLS)
            if faults := mosaic_faults(Path(reports.name)):
                found["error"] = faults
        except Refused as refused:
            found["refused"] = str(refused)
        except Exception as error:  # whatever the compiler says
            found["error"] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        print(json.dumps(found | {"seconds": round(time.perf_counter() - start, 2)}), flush=True)


def compiled(work: Work) -> Iterator[dict]:
    """What `compile_cases` finds, of cases that abort the compiler too."""
    done = 0
    while True:
        command = [
            sys.executable,
            "-m",
            "pallas_kernels.aot",
            "--child",
            *map(str, work),
            str(done),
        ]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        begun = None
        for line in child.stdout:
            found = json.loads(line)
            begun = found["case"] if len(found) == 1 else None
            if begun is None:
                done += 1
                yield found
        if child.wait() == 0:
            return
        if begun is None:
            raise SystemExit(
                f"the compiling process ended with {child.returncode} outside any case: {' '.join(command)}"
            )
        done += 1
        yield {"case": begun, "error": f"aborted the compiler ({child.returncode})"}


def combinations(
    gpus: list[str], ops: list[str], asked: list[str] | None, first: int, only: str
) -> list[Work]:
    """With the implementations that are kernels, or those of `asked` that the op has."""
    from pallas_kernels import norm
    from pallas_kernels.attention import api

    there = {"attention": api.IMPLEMENTATIONS, "norm": norm.api.IMPLEMENTATIONS}
    wanted = (
        [name for name in {**there["attention"], **there["norm"]} if name != "xla"]
        if asked is None
        else asked
    )
    every = [
        Work(gpu, op, name, first, only)
        for gpu in gpus
        for op in ops
        for name in wanted
        if name in there[op]
    ]
    if left_out := not has_cudnn() and any(each.implementation == "cudnn" for each in every):
        print("cudnn is left out: there is no nvidia-cudnn-cu13")
    return [
        each
        for each in every
        if each.implementation != "cudnn" or (each.gpu == CUDNN_GPU and not left_out)
    ]


def has_cudnn() -> bool:
    try:
        return importlib.util.find_spec("nvidia.cudnn") is not None
    except ModuleNotFoundError:  # no nvidia at all
        return False


def report(work: Work) -> Counter:
    """Prints a line per case. Counts of {"compiled" or "failed" or ("refused", reason)}."""
    counts = Counter()
    for found in compiled(work):
        kind = "failed" if "error" in found else "refused" if "refused" in found else "compiled"
        reason = found.get("refused", "").partition("refuses: ")[2].partition("; try ")[0]
        general = re.split(r",? not |, \d", reason)[0]
        counts[(kind, general) if kind == "refused" else kind] += 1
        said = found.get("error") or reason or f"{found['calls']} kernels"
        print(
            f"{work.title} {found['case']}: {kind}, {said} ({found.get('seconds', 0)} s)",
            flush=True,
        )
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--gpus",
        nargs="+",
        default=COMPILED_FOR,
        choices=[name for name, gpu in gpus.GPUS.items() if gpu.xla],
    )
    parser.add_argument(
        "--ops", nargs="+", default=["attention", "norm"], choices=("attention", "norm")
    )
    parser.add_argument("--implementations", nargs="+", help="default: all but xla")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
    parser.add_argument("--first", type=int, default=10**6, help="only so many cases of each op")
    parser.add_argument(
        "--jobs", type=int, default=max((os.cpu_count() or 1) // 2, 1), help="compilers at a time"
    )
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        *names, first, only, skip = chosen.child
        return compile_cases(Work(*names, int(first), only), int(skip))
    asked = combinations(chosen.gpus, chosen.ops, chosen.implementations, chosen.first, chosen.only)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        counts = dict(zip(asked, pool.map(report, asked), strict=True))
    total = Counter()
    for work, found in counts.items():
        own = {"compiled": found["compiled"], "refused": 0, "failed": found["failed"]}
        for kind, count in found.items():
            if kind not in own:
                own["refused"] += count
                print(f"{work.title} refused {count}: {kind[1]}")
        print(work.title, own)
        total.update(own)
    print(dict(total))
    sys.exit(bool(total["failed"]) or not total["compiled"])


if __name__ == "__main__":
    main()
