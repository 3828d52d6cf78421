"""The figures of docs/ that come from steps compiled for GPUs that are not there.

    python benchmarks/absent_gpus.py [--only TEXT]
    python benchmarks/absent_gpus.py step [--only TEXT]
    python benchmarks/absent_gpus.py recurrence [--only TEXT]

Of each program: temporary bytes on a device and on the host, the bytes that a device sends over
each axis, and over groups of a part of it, and how many matmuls multiply 8-bit floats. `--only`
takes the programs whose names contain TEXT.

`step` takes the step of GPT-2 124M with 32 x 1024 tokens on an H200 in its forms, and of four
layers of Llama 3 8B with 2 x 4096, with the kernels that were measured there and cuBLAS's matmuls.
It prints the bytes that kernels read and write, how many are launched, and temporary bytes, and
ends with code 1 if one is above its bound.

`recurrence` takes the recurrence of layers in linear time, by XLA and by our kernels, and prints
and bounds the same figures: recurrence_text.py.

Needs what `make cuda-compiler` installs, jax 0.11 or later. Half a minute a program on two cores.
"""

import argparse
import math
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import recurrence_text
from step_text import Bounds, StepText, step_text

import spmdtrain as st
from pallas_kernels.chosen import IN_PLACE, using
from pallas_kernels.gpus import GPUS
from pallas_kernels.tuning import Table
from spmdtrain.compiled import hlo
from spmdtrain.parallel.mesh import AXES
from spmdtrain.planner import deviceless
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.processes import xla_flags

CONFIGS = Path(__file__).parents[1] / "configs"
AS_LOOP = "train.scan_layers=true"


@dataclass(frozen=True)
class Program:
    """A step to compile: a config, the axes of more than one device, and other settings."""

    name: str
    config: str
    mesh: str = ""
    settings: str = ""
    hardware: str = "h100"
    kernels: Mapping[str, str] = field(default_factory=dict)  # chosen beside the measured ones

    def compiled(self):
        """Returns (the compiled step, its mesh)."""
        config = st.load(CONFIGS / f"{self.config}.toml", self.settings.split())
        asked = dict(part.split("=") for part in self.mesh.split())
        sizes = {axis: int(asked.get(axis, 1)) for axis in AXES}
        return deviceless.executable(config, sizes, hardware(self.hardware))


def llama(layers: int, embed: int, microbatch: int, shards: int) -> str:
    """Returns the settings that make of Llama 3 8B a smaller model, without recomputation, on a
    microbatch of sequences of 2,048 tokens for each shard of data.

    Its layers are a loop, so that the text has the matmuls of one.
    """
    heads = embed // 128
    return (
        f"model.layers={layers} model.embed={embed} model.heads={heads} model.kv_heads={heads // 2}"
        f" model.ffn={4 * embed} model.vocab=32000 train.sequence_length=2048"
        f" train.global_batch={microbatch * shards} train.microbatch={microbatch} train.remat=none"
        f" {AS_LOOP}"
    )


WIDE = llama(layers=8, embed=2048, microbatch=1, shards=8)
ON_HOSTS = llama(layers=8, embed=2048, microbatch=1, shards=16)
NARROW = llama(layers=8, embed=1024, microbatch=4, shards=1)
LONG = "train.sequence_length=32768 model.max_length=32768 train.global_batch=8"
GPT2 = "train.global_batch={} train.microbatch={} train.sequence_length=1024 train.remat={}"
INT8 = "compression.codec=int8"
WITHIN = "compression.within=8"
PROGRAMS = (
    Program("compression, float32", "llama3_8b", "data=8", WIDE),
    Program("compression, int8", "llama3_8b", "data=8", f"{WIDE} {INT8}"),
    Program("compression, float32, ZeRO-1", "llama3_8b", "data=8", f"{WIDE} train.zero=1"),
    Program("compression, int8, ZeRO-1", "llama3_8b", "data=8", f"{WIDE} {INT8} train.zero=1"),
    Program("two hosts, float32", "llama3_8b", "data=16", ON_HOSTS),
    Program("two hosts, int8", "llama3_8b", "data=16", f"{ON_HOSTS} {INT8}"),
    Program("two hosts, within", "llama3_8b", "data=16", f"{ON_HOSTS} {INT8} {WITHIN}"),
    Program(
        "two hosts, within, ZeRO-1",
        "llama3_8b",
        "data=16",
        f"{ON_HOSTS} {INT8} {WITHIN} train.zero=1",
    ),
    Program("small Llama", "llama3_8b", "", NARROW),
    Program("small Llama, float8", "llama3_8b", "", f"{NARROW} precision.matmul=float8"),
    Program(
        "small Llama, float8, delayed",
        "llama3_8b",
        "",
        f"{NARROW} precision.matmul=float8 precision.scaling=delayed",
    ),
    Program("small Llama, half frozen", "llama3_8b", "", f"{NARROW} finetune.frozen_layers=4"),
    Program("offload, 8B, full", "llama3_8b", "fsdp=8", f"{LONG} train.remat=full"),
    Program("offload, 8B, offload", "llama3_8b", "fsdp=8", f"{LONG} train.remat=offload"),
)
# Without a GPU to time them on, XLA takes its own matmuls, which it fuses with less.
CUBLAS = "--xla_gpu_enable_triton_gemm=false"
STEP = GPT2.format(32, 32, "none")
LOOP = Program("loop", "gpt2_124m", "", f"{STEP} {AS_LOOP}", "h200")
ATTENTION = "attention bfloat16 32x1024x12x64 causal"
# 170.0 GB and 1,683 launches were those of 2026-11-27. Memory: no more than the loop takes.
BOUND = Bounds(moved=105, launches=740, hidden=0.8)
MOVED_IN_PLACE = 98
LLAMA = "four layers of Llama"
LLAMA_BOUND = Bounds(moved=173, launches=320, hidden=0.8)
STEPS = (
    Program("as it is", "gpt2_124m", "", STEP, "h200"),
    Program("bfloat16 logits", "gpt2_124m", "", f"{STEP} precision.logits=bfloat16", "h200"),
    Program(IN_PLACE, "gpt2_124m", "", STEP, "h200", {f"{ATTENTION} joined": IN_PLACE}),
    Program("data 8", "gpt2_124m", "data=8", GPT2.format(256, 32, "none"), "h200"),
    Program(
        LLAMA,
        "llama3_8b",
        "",
        "model.layers=4 train.global_batch=2 train.microbatch=2 train.sequence_length=4096 "
        "train.remat=dots",
        "h200",
    ),
)


def matmuls_in_8_bits(hlo_text: str) -> list[bool]:
    """Returns, for each matmul in a text, whether it multiplies 8-bit floats.

    Without a GPU to time them on, XLA takes Triton for most: dots inside of fusions.
    """
    found = []
    for listed in hlo.computations(hlo_text)[0].values():
        types = {each.name: each.type for each in listed}
        for each in listed:
            if each.opcode == "dot" or "__cublas" in each.line:
                operands = [word.split()[-1] for word in each.operands.split(", ")]
                found.append(types[operands[0]].startswith("f8"))
    return found


def figures(program: Program) -> dict[str, str]:
    """Returns what the text and the memory of a compiled program say."""
    made, mesh = program.compiled()
    memory = made.memory_analysis()
    text = made.as_text()
    sent: dict[str, float] = defaultdict(float)
    for each in hlo.traffic(text, dict(mesh.shape)):
        sent[each["axis"]] += each["sent"]
    for each in hlo.instructions(text, dict(mesh.shape)):
        if each.members < math.prod(mesh.shape.get(axis, 1) for axis in each.axis.split("+")):
            part = each.passes * each.bytes * hlo.sent_per_output(each.kind, each.members)
            sent[f"{each.axis} in groups of {each.members}"] += part
    in_8_bits = matmuls_in_8_bits(text)
    return {
        "temporaries": f"{memory.temp_size_in_bytes / 1e6:,.0f} MB",
        "on the host": f"{memory.host_temp_size_in_bytes / 1e6:,.0f} MB",
        **{f"sent over {axis}": f"{size / 1e6:,.1f} MB" for axis, size in sorted(sent.items())},
        "matmuls in 8 bits": f"{sum(in_8_bits)} of {len(in_8_bits)}",
    }


def measured(program: Program) -> StepText:
    """Returns the figures of a step with the kernels that were measured on its GPU."""
    with using(Table().chosen(GPUS[program.hardware].device_kinds[0]) | dict(program.kernels)):
        return step_text(*program.compiled())


def print_steps(only: str) -> bool:
    """Prints the figures of the steps; returns False if one is above its bound."""
    loop = measured(LOOP)
    bounds = replace(BOUND, temporaries=loop.temporaries)
    others = {IN_PLACE: replace(bounds, moved=MOVED_IN_PLACE), LLAMA: LLAMA_BOUND}
    steps = {LOOP.name: loop}
    for program in STEPS:
        if only in program.name:
            steps[program.name] = measured(program)
    for name, step in steps.items():
        for line in step.lines():
            print(f"step, {name}, {line}", flush=True)
    broken = [
        f"step, {name}, {line}"
        for name, step in steps.items()
        if name != LOOP.name
        for line in others.get(name, bounds).broken_by(step)
    ]
    print(*broken, sep="\n", file=sys.stderr, end="\n" if broken else "")
    return not broken


def print_documents(only: str) -> bool:
    """Prints the figures of the documents."""
    for program in PROGRAMS:
        if only in program.name:
            for what, figure in figures(program).items():
                print(f"{program.name}, {what}: {figure}", flush=True)
    return True


def print_recurrences(only: str) -> bool:
    """Prints the figures of recurrences; returns False if kernels need more than their bound."""
    broken = []
    for title, by in recurrence_text.figures(only):
        for implementation, program in by.items():
            for line in program.lines():
                print(f"recurrence, {title}, {implementation}, {line}", flush=True)
        broken += [f"recurrence, {title}, {line}" for line in recurrence_text.broken(by)]
    print(*broken, sep="\n", file=sys.stderr, end="\n" if broken else "")
    return not broken


WHAT = {"documents": print_documents, "step": print_steps, "recurrence": print_recurrences}


def main() -> int:
    """Compiles the programs and prints their figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=WHAT, default="documents")
    parser.add_argument("--only", default="", metavar="TEXT")
    chosen = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # or the plugin would look for a GPU
    if chosen.what != "documents":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CUBLAS}"
    xla_flags.set_xla_flags(deviceless=True)
    return 0 if WHAT[chosen.what](chosen.only) else 1


if __name__ == "__main__":
    sys.exit(main())
