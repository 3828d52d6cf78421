"""The pipelined step compiled for 8 H200s that are not there: memory, and where its permutes run.

    make bench-pipeline-cuda

That installs CUDA's compiler wheels beside jax >= 0.11; no GPU and no driver is needed.
XLA compiles for a described GPU (its public target configuration); nothing runs. Printed: temp
bytes per device for m = 8 to 64 microbatches, the collectives by kind and mesh axis, and for each
`while` body that holds permutes the order of permute starts, permute ends, other collectives, loops
over layers and fusions as scheduled. The share of a tick that permutes take is predicted from their
bytes at 50 GB/s (one 400 Gb/s port per GPU) and the tick's FLOPs at 400 TFLOP/s.
"""

import argparse

from spmdtrain.compiled import hlo
from spmdtrain.compiled.step_memory import memory_of
from spmdtrain.config import (
    GPT,
    DataConfig,
    MeshConfig,
    PipelineConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from spmdtrain.models.size import matmul_parameters
from spmdtrain.planner import deviceless
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.processes import xla_flags

LINK, FLOPS = 50e9, 400e12  # bytes/s between stages on different hosts, FLOP/s of a tick's matmuls


def configuration(chosen: argparse.Namespace, microbatches: int) -> RunConfig:
    model = GPT(layers=chosen.layers, embed=chosen.width, heads=chosen.width // 128, vocab=32768)
    train = TrainConfig(
        global_batch=microbatches * 8 // (4 * chosen.tensor),
        microbatch=1,
        sequence_length=chosen.length,
        remat=chosen.remat,
    )
    return RunConfig(
        model=model,
        mesh=MeshConfig(pipeline=4, data=8 // (4 * chosen.tensor), tensor=chosen.tensor),
        pipeline=PipelineConfig(
            schedule="interleaved" if chosen.chunks > 1 else "1f1b", chunks=chosen.chunks
        ),
        train=train,
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(corpus="synthetic"),
    )


def folded(events: list[str]) -> str:
    """`fusion fusion fusion` -> `3 fusion`."""
    runs: list[list] = []
    for event in events:
        if runs and runs[-1][1] == event:
            runs[-1][0] += 1
        else:
            runs.append([1, event])
    return " | ".join(f"{count} {event}" if count > 1 else event for count, event in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tensor", type=int, default=2, choices=(1, 2))
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--remat", default="full", choices=("none", "dots", "full"))
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32, 64])
    chosen = parser.parse_args()
    xla_flags.set_xla_flags(deviceless=True)
    temp = []
    for microbatches in chosen.microbatches:
        config = configuration(chosen, microbatches)
        step, mesh = deviceless.executable(config, config.mesh.sizes, hardware("h200"))
        temp.append(memory_of(step).temp_bytes)
        print(f"m={microbatches}: {temp[-1] / 2**20:.1f} MiB temp per device", flush=True)
    print(f"largest / smallest: {max(temp) / min(temp):.4f}")
    text = step.as_text()
    for each in hlo.collectives(text, dict(mesh.shape)):
        print(each)
    conditional = [
        each for each in hlo.instructions(text, dict(mesh.shape)) if each.inside_conditional
    ]
    print(f"collectives inside a conditional: {len(conditional)}")
    for each in hlo.overlaps(text, dict(mesh.shape)):
        print(each)
    for name, events in hlo.events(text).items():
        if any(event.startswith("collective-permute") for event, _ in events):
            print(f"{name}: {folded([event for event, _ in events])}")
    hop = chosen.length * chosen.width * 2
    layers = matmul_parameters(config.model) - config.model.vocab * chosen.width
    # Forward, again, and both gradients.
    tick = 8 * chosen.length * layers / (4 * chosen.chunks * chosen.tensor)
    share = 2 * hop / LINK / (tick / FLOPS)
    print(
        f"a hop: {hop / 2**20:.1f} MiB = {1e6 * hop / LINK:.0f} us; "
        f"a tick's layers: {tick:.2e} FLOP = {1e6 * tick / FLOPS:.0f} us; "
        f"both permutes: {share:.1%} of a tick's layers if nothing runs beside them"
    )


if __name__ == "__main__":
    main()
