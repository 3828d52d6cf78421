"""The memory formula against XLA's own figures: the real step compiled for GPUs that are not there.

    python benchmarks/planner/memory.py [--arguments] [--only TEXT] [--first N]

Needs what spmdtrain/planner/deviceless.py names, but for --arguments. Each of the 30 layouts takes
up to a minute.
"""

import argparse
import math
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import numpy as np

from spmdtrain.compiled.step_memory import memory_in
from spmdtrain.config import from_resolved, resolved
from spmdtrain.config.schema import RunConfig
from spmdtrain.planner import deviceless
from spmdtrain.planner.cost import memory
from spmdtrain.planner.cost.hardware import DEVICES, Hardware
from spmdtrain.planner.cost.workload import Workload, workload_of
from spmdtrain.processes import xla_flags

GPT = "model.name=gpt model.layers=8 model.embed=1024 model.heads=16 model.vocab=32768"
LLAMA = (
    "model.name=llama model.layers=8 model.embed=1024 model.heads=16 model.kv_heads=4 "
    "model.ffn=2816 model.vocab=32768"
)
# For the CPU.
SMALL = "model.embed=64 model.vocab=256 train.sequence_length=32 precision.compute=float32"
BATCH = "train.global_batch=32 train.sequence_length=1024 precision.compute=bfloat16"
LAYOUTS = [
    *(f"{model} {BATCH} {layout}" for model in (GPT, LLAMA) for layout in (
        "train.microbatch=2 mesh.data=8",
        "train.microbatch=2 mesh.data=8 train.zero=1 train.remat=dots",
        "train.microbatch=4 mesh.data=8 train.remat=full",
        "train.microbatch=2 mesh.fsdp=8 train.remat=full",
        "train.microbatch=4 mesh.fsdp=8 train.remat=dots",
        "train.microbatch=2 mesh.data=4 mesh.tensor=2",
        "train.microbatch=4 mesh.data=2 mesh.tensor=4 train.remat=full",
        "train.microbatch=2 mesh.fsdp=4 mesh.tensor=2 train.remat=dots",
        "train.microbatch=2 mesh.data=2 mesh.fsdp=2 mesh.tensor=2 train.remat=full train.zero=1",
        "train.microbatch=2 mesh.pipeline=4 mesh.data=2",
        "train.microbatch=2 mesh.pipeline=4 mesh.tensor=2 train.remat=full",
        "train.microbatch=1 mesh.pipeline=2 mesh.fsdp=4 train.remat=dots",
        "train.microbatch=1 mesh.pipeline=4 mesh.data=2 train.remat=full "
        "pipeline.schedule=interleaved pipeline.chunks=2",
        "train.microbatch=1 mesh.pipeline=2 mesh.data=2 mesh.tensor=2 "
        "pipeline.schedule=zero_bubble",
        "train.microbatch=2 mesh.pipeline=2 mesh.data=2 mesh.tensor=2 "
        "pipeline.schedule=gpipe train.remat=dots",
    )),
]  # fmt: skip


def config_of(settings: str) -> RunConfig:
    return from_resolved(
        {"config": {}, "origin": {}} | {"origin": resolved(RunConfig())["origin"]}, settings.split()
    )


def on_gpus(layouts: list[str], hardware: Hardware) -> None:
    """XLA's memory for each layout, compiled for GPUs that are not there, beside the formula's."""
    errors = []
    exact_ones = 0
    for settings in layouts:
        config = config_of(settings)
        sizes = dict(config.mesh.sizes)
        compiled = deviceless.compile_step(config, sizes, hardware)
        xla = memory_in(compiled)
        workload = workload_of(config, sizes)
        state = memory.exact_state(config, sizes)
        ours = memory.step_memory(workload, state)
        error = ours.total / xla.held - 1
        errors.append(error)
        exact_ones += sum(state) + batch_bytes(workload) == xla.argument_bytes
        categories = {name: round(size / 2**20) for name, size in ours.by_category().items()}
        print(
            f"{100 * error:+6.1f} %  XLA {xla.held / 2**20:6.0f} MiB "
            f"(temp {xla.temp_bytes / 2**20:5.0f})  "
            f"{compiled['compile_seconds']:3.0f} s  {short(settings)}\n          {categories}",
            flush=True,
        )
    print(
        f"{len(errors)} layouts: mean {100 * np.abs(errors).mean():.1f} %, "
        f"worst {100 * np.abs(errors).max():.1f} %"
    )
    print(f"argument bytes exact in {exact_ones} of {len(errors)}")


def on_cpu(layouts: list[str]) -> None:
    """Argument bytes of the step, for small models in the same layouts, on eight simulated CPU
    devices.
    """
    import jax

    from spmdtrain.train.shard import shard
    from spmdtrain.train.step import make_step

    exact_ones = 0
    for settings in layouts:
        config = config_of(f"{settings} {SMALL}" + (" model.ffn=96" if "llama" in settings else ""))
        sizes = dict(config.mesh.sizes)
        setup = shard(config, devices=jax.devices()[: math.prod(sizes.values())])
        compiled = make_step(setup).lower(setup.state, setup.batch).compile()
        xla = compiled.memory_analysis().argument_size_in_bytes
        ours = sum(memory.exact_state(config, sizes)) + batch_bytes(workload_of(config, sizes))
        exact_ones += ours == xla
        print(f"{ours:>9} {xla:>9}  {short(settings)}", flush=True)
    print(f"argument bytes exact in {exact_ones} of {len(layouts)}")


def batch_bytes(workload: Workload) -> int:
    """Bytes per device of tokens, targets and mask; only dropout needs the sample indices."""
    return 3 * 4 * workload.tokens * workload.accumulation


def short(settings: str) -> str:
    parts = settings.replace(BATCH, "").replace("model.name=", "").split()
    return " ".join([parts[0], *(part for part in parts[1:] if "model" not in part)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arguments",
        action="store_true",
        help="argument bytes alone, on eight simulated CPU devices",
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="layouts whose settings hold this"
    )
    parser.add_argument("--first", type=int, default=len(LAYOUTS), metavar="N")
    parser.add_argument("--hardware", default="h100")
    parsed = parser.parse_args()
    xla_flags.set_xla_flags(deviceless=True)
    layouts = [layout for layout in LAYOUTS if parsed.only in layout][: parsed.first]
    if parsed.arguments:
        on_cpu(layouts)
    else:
        on_gpus(layouts, DEVICES[parsed.hardware])


if __name__ == "__main__":
    main()
