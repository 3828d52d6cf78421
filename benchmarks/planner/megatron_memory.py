"""Bytes per device that published runs of Megatron-LM and its relatives held.

They hold 16 or 18 bytes per parameter, and activations as counted by Korthikanti et al. (arXiv
2205.05198, table 2).
"""

from dataclasses import replace

from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.memory import Memory
from spmdtrain.planner.cost.schedules import SCHEDULES, Pipeline
from spmdtrain.planner.cost.workload import Workload

# Bytes per parameter: a 16-bit weight and gradient, and in float32 the weight and two moments.
BYTES_PER_PARAMETER = 16  # 18 with float32 gradients
WEIGHT_BYTES = 2
OPTIMIZER_BYTES = 12


def megatron_memory(
    workload: Workload,
    bytes_per_parameter: int = BYTES_PER_PARAMETER,
    distributed_optimizer: bool = False,
) -> Memory:
    """Returns the memory of a run's fullest stage.

    The distributed optimizer splits 12 of the bytes over `data`. With `fsdp` (ZeRO-3) all bytes are
    split over it, and the weights and gradients of one layer at a time are whole.
    """
    last = workload.mesh.pipeline - 1
    stages = sorted({0, min(1, last), last})  # those in between are like stage 1, or hold less
    found = [
        _stage_memory(workload, stage, bytes_per_parameter, distributed_optimizer)
        for stage in stages
    ]
    return max(found, key=lambda memory: memory.total)


def _stage_memory(
    workload: Workload, stage: int, bytes_per_parameter: int, distributed_optimizer: bool
) -> Memory:
    model = workload.model
    mesh = workload.mesh
    at_end = stage in (0, mesh.pipeline - 1)
    layers = workload.layers_per_stage
    if at_end and mesh.pipeline > 1:
        layers = layers - workload.short_ends
    layer = shape.layer_parameters(model) / mesh.tensor
    tables = model.embed * (shape.vocab(model) + shape.position_rows(model)) / mesh.tensor
    parameters = (layers * layer + (tables if at_end else 0)) / mesh.fsdp
    optimizer_ways = mesh.data if distributed_optimizer else 1

    pipeline = Pipeline(mesh.pipeline, workload.accumulation, workload.chunks)
    held = SCHEDULES[workload.schedule].held_microbatches(pipeline, stage)
    recomputed = 0.0
    if workload.remat == "full":
        recomputed = layer_activations(replace(workload, remat="none"))
    whole_layer = 2 * WEIGHT_BYTES * layer if mesh.fsdp > 1 else 0.0
    gradient_bytes = bytes_per_parameter - WEIGHT_BYTES - OPTIMIZER_BYTES
    return Memory(
        parameters=int(WEIGHT_BYTES * parameters),
        gradients=int(gradient_bytes * parameters),
        optimizer=int(OPTIMIZER_BYTES * parameters / optimizer_ways),
        activations=int(held * layers * layer_activations(workload) + recomputed),
        logits=0,
        buffers=int(whole_layer),
    )


def layer_activations(workload: Workload) -> float:
    """Returns the bytes that a layer keeps of one microbatch: Korthikanti et al., table 2.

    Activations have 16 bits; dropout is included.
    """
    model = workload.model
    tensor = workload.mesh.tensor
    elements = workload.tokens * model.embed
    sequence_ways = tensor if workload.sequence_parallel else 1
    if workload.remat == "full":
        return 2 * elements / sequence_ways
    scores = 0
    if workload.remat != "attention":
        scores = 5 * model.heads * workload.train.sequence_length / (model.embed * tensor)
    return elements * (10 / sequence_ways + 24 / tensor + scores)
