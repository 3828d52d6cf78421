"""Bytes per device of a training step, by category.

Two accountings. `ours` is that of this framework's step, whose parameter and optimizer bytes `exact_state` reads off
the abstract state; its other terms follow what the executors keep alive (train/grad_accumulation.py,
parallel/pipeline/executor.py),
and `total` is the largest of the moments a step goes through. `megatron` is that of published runs: 16 or 18 bytes per
parameter, and activations as Korthikanti et al. (arXiv 2205.05198, table 2) count them.

RESERVE is what the driver, NCCL and the allocator hold beside the tensors. Fujii et al. (arXiv 2411.06465) found that
runs whose estimate is at most 80 % of the memory never ran out of it: that is `fits`.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from pallas_kernels.attention.xla import BLOCK
from pallas_kernels.loss.api import CHUNK_LOGITS
from spmdtrain.config.schema import RunConfig
from spmdtrain.parallel.pipeline.choose import choose_table
from spmdtrain.parallel.pipeline.schedule import KINDS
from spmdtrain.planner.hardware import Hardware
from spmdtrain.planner.job import Job, Shape

SAFE = 0.8  # of the memory; the 80 % rule
MEGATRON_BYTES = 16  # fp16 weight and gradient, float32 weight and two moments; 18 with float32 gradients


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device. `buffers`: copies of weights in compute precision, gathered weights, what passes
    between stages, one layer's workspace."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def fits(self, device: Hardware) -> bool:
        return self.total <= SAFE * device.memory

    def describe(self) -> dict[str, int]:
        return asdict(self) | {"total": self.total}


# What this framework's step holds


def exact_state(config: RunConfig, sizes: dict[str, int]) -> tuple[int, int]:
    """(parameter bytes, optimizer bytes) per device, off the abstract state on a mesh of these sizes; no devices.
    Refuses what does not divide, as a run does."""
    import jax

    from spmdtrain.parallel.mesh import AXES
    from spmdtrain.train.setup import shard_on
    from spmdtrain.train.state import bytes_per_device

    mesh = jax.sharding.AbstractMesh(tuple(sizes[axis] for axis in AXES), AXES)
    abstract = shard_on(config, mesh).state
    return bytes_per_device(abstract.params), bytes_per_device((abstract.opt_state, abstract.step))


def state(job: Job) -> tuple[int, int]:
    """The same in closed form, for a search: a few per mille off where a dim is not split."""
    parameters = local_parameters(job) / job.layout.fsdp
    split = job.layout.data if job.zero else 1
    return int(job.resting * parameters), int(job.resting * job.moments * parameters / split)


def local_parameters(job: Job) -> float:
    """Elements on one device, whole over data and fsdp; padding of a pipeline included."""
    shape, layout = job.shape, job.layout
    return job.layers_per_stage * _layer_elements(shape, layout.tensor) + _outside_elements(job)


def _layer_elements(shape: Shape, tensor: int) -> float:
    whole = (shape.layer_parameters - shape.layer_matrices) if shape.bias else 2 * shape.embed
    return shape.layer_matrices / tensor + whole  # biases are counted whole: small


def _outside_elements(job: Job) -> float:
    shape, layout = job.shape, job.layout
    tables = shape.vocab * (1 if shape.tied else 2) / (layout.pipeline * layout.tensor)
    return shape.embed * (tables + shape.positions + 2)


def kept(job: Job, remat: str | None = None) -> int:
    """Bytes that one layer keeps of one microbatch for its backward (LayerGradient.kept, tested equal to it)."""
    return _kept(job.shape, job.tokens, job.layout.tensor, _size(job), remat or job.remat)


@lru_cache(maxsize=10_000)
def _kept(shape: Shape, tokens: int, tensor: int, size: int, remat: str) -> int:
    e = shape.embed
    if remat == "full":
        return size * tokens * e
    attention = size * shape.attention_width + 4 * shape.heads  # its result, and its log-sum-exp in float32
    if remat == "dots":
        return tokens * (2 * size * e + (size * (shape.qkv_width + shape.up_width) + attention) // tensor)
    norm = tokens * (2 * size * e + (8 if shape.centred else 4))  # input and output; mean and deviation in float32
    attention += size * (shape.qkv_width + shape.attention_width)  # and what it reads, what the matrix behind it reads
    return 2 * norm + tokens * (attention + size * (shape.up_width + shape.hidden)) // tensor


def deferred(job: Job) -> int:
    """Bytes that a layer's split backward leaves for its weight gradient."""
    size, shape, t = _size(job), job.shape, job.layout.tensor
    return job.tokens * ((2 * size + 16) * shape.embed + size * (shape.up_width + shape.qkv_width) // t)


def rings(job: Job) -> tuple[int, int, int]:
    """(stash, cotangent, deferred) places of the schedule's table, the trash of each ring included; for schedules with
    names in closed form, tested equal to their tables."""
    m, p, v = job.accumulation, job.layout.pipeline, job.chunks
    if job.schedule == "gpipe":
        return m + 1, m + 1, 0
    if job.schedule in KINDS:
        stash = min(m * v, (v - 1) * p + 2 * (p - 1) + 1)
        return stash + 1, 0, min(m * v, p) + 1 if job.schedule == "zero_bubble" else 0
    table = choose_table(job.schedule, p, v, m)
    ring = lambda slots: slots + 1 if slots else 0  # noqa: E731
    return table.slots + 1, ring(table.cotangent_slots), ring(table.deferred_slots)


def ours(job: Job, exact: tuple[int, int] | None = None) -> Memory:
    """Of this framework's step; `exact` as `exact_state` gives it."""
    parameters, optimizer = exact or state(job)
    return (_accumulated if job.layout.pipeline == 1 else _pipelined)(job, parameters, optimizer)


def _accumulated(job: Job, parameters: int, optimizer: int) -> Memory:
    """Microbatches one after the other. Three moments: the head, the layers' backward, the optimizer."""
    shape, layout, size = job.shape, job.layout, _size(job)
    elements = parameters / job.resting
    copy = size * elements if size < job.resting else 0.0
    layer, table = _layer_elements(shape, layout.tensor), shape.vocab * shape.embed / layout.tensor
    split = layout.fsdp > 1
    gathered = size * (2 * layer + table) if split else 0.0  # a layer in use and the next one
    partial = size * (layer + table) if split else 0.0  # gradients before they are scattered
    sums = 4 * elements if job.accumulation > 1 else 0.0
    made = size * elements
    activations = shape.layers * kept(job) + 3 * size * job.tokens * shape.embed  # in, out, and what the head reads
    logits = _logits(job, layout.tensor)
    head = sums + copy + gathered + activations + logits
    back = sums + copy + gathered + partial + made + activations + _again(job) + _workspace(job)
    step = 4 * elements + (made if sums else 0.0)
    peak = max(head, back, step)
    if peak == step:
        return _memory(job, parameters, optimizer, (4 * elements, 0, 0), peak)
    gradients = sums + (made if peak == back else 0.0)
    return _memory(job, parameters, optimizer, (gradients, activations, logits if peak == head else 0), peak)


def _pipelined(job: Job, parameters: int, optimizer: int) -> Memory:
    """Rings of the schedule's table, one float32 gradient; weights gathered over fsdp once, in compute precision."""
    shape, layout, size = job.shape, job.layout, _size(job)
    elements = local_parameters(job)
    per_chunk = job.layers_per_stage // job.chunks
    stash, cotangents, waiting = rings(job)
    x = size * job.tokens * shape.embed
    unit = x if job.remat == "full" else per_chunk * kept(job)
    activations = stash * unit + waiting * per_chunk * deferred(job) + (cotangents + 2) * x
    weights = size * elements if size < job.resting or layout.fsdp > 1 else 0.0
    chunk = size * per_chunk * _layer_elements(shape, layout.tensor)  # its gradients, before they are added
    made = _again(job)  # by remat full for all layers of a chunk at once, by dots for one
    # of a unit, what the forward makes and what the backward reads
    working = 2 * per_chunk * made if job.remat == "full" else 2 * per_chunk * kept(job) + made
    if per_chunk > 1:  # a scan of one layer is no loop: XLA keeps less of it
        working += _workspace(job)
    logits = _logits(job, layout.pipeline * layout.tensor)
    working += 2 * per_chunk * deferred(job) if waiting else 0
    ticks = 4 * elements + weights + activations + chunk + working + logits
    return _memory(job, parameters, optimizer, (4 * elements, activations, logits), ticks)


def _memory(job: Job, parameters: int, optimizer: int, parts: tuple[float, float, float], peak: float) -> Memory:
    gradients, activations, logits = map(int, parts)
    batch = 3 * 4 * job.tokens * job.accumulation
    rest = max(0, int(peak) - gradients - activations - logits) + batch
    return Memory(parameters, gradients, optimizer, activations, logits, rest)


def _logits(job: Job, ways: int) -> float:
    """Of a chunk: float32, and in compute precision for the matmuls of the gradients; and where there are more chunks
    than one, two float32 gradients of the table, which gathers them."""
    rows = job.shape.vocab / ways
    chunks = max(1, math.ceil(job.tokens * rows / CHUNK_LOGITS))
    return job.tokens * rows / chunks * (4 + _size(job)) + (8 * rows * job.shape.embed if chunks > 1 else 0.0)


def _again(job: Job) -> float:
    """What one layer's backward makes again before it starts, by remat."""
    return kept(job, "none") if job.remat != "none" else 0.0


def _workspace(job: Job) -> float:
    """Of one layer's backward: two float32 tiles of attention's scores and the float32 gradients of queries, keys and
    values, or the gradients of the mlp. Where the layer was made again, XLA reuses its places."""
    if job.remat == "dots" or (job.remat == "full" and job.layout.pipeline == 1):
        return 0.0
    shape, t = job.shape, job.layout.tensor
    tile = min(BLOCK, job.sequence) * min(BLOCK, job.tokens // job.microbatch)
    attention = 8 * job.microbatch * shape.heads / t * tile + 4 * job.tokens * shape.qkv_width / t
    return max(attention, job.tokens * (shape.up_width + shape.hidden) / t * _size(job))


def _size(job: Job) -> int:
    return 4 if job.dtype == "float32" else 2


# What published runs held


def layer_activations(job: Job) -> float:
    """What a layer keeps: Korthikanti et al., table 2, in bytes of one microbatch, 16-bit, dropout included."""
    shape, t = job.shape, job.layout.tensor
    wide = job.tokens * shape.embed
    scores = 5 * shape.heads * job.sequence / (shape.embed * t)
    split = t if job.sequence_parallel else 1
    if job.remat == "full":
        return 2 * wide / split
    return wide * (10 / split + 24 / t + (0 if job.remat == "attention" else scores))


def megatron(job: Job, per_parameter: int = MEGATRON_BYTES, sharded: bool = False) -> Memory:
    """Of a published run on its fullest stage. `sharded`: the distributed optimizer, 12 of the bytes over data. With
    `fsdp` (ZeRO-3) all of them are split; one layer's weights and its gradient are whole at a time."""
    shape, layout = job.shape, job.layout
    p, layers = layout.pipeline, job.layers_per_stage
    tables = shape.embed * (shape.vocab + shape.positions) / layout.tensor
    layer = shape.layer_parameters / layout.tensor
    again = layer_activations(replace(job, remat="none")) if job.remat == "full" else 0.0
    whole = 2 * 2 * layer if layout.fsdp > 1 else 0.0
    best = None
    for stage in sorted({0, min(1, p - 1), p - 1}):
        end = stage in (0, p - 1)
        own = layers - (job.short_ends if end and p > 1 else 0)
        in_flight = _in_flight(job, stage)
        parameters = (own * layer + (tables if end else 0)) / layout.fsdp
        held = in_flight * own * layer_activations(job)
        optimizer = 12 * parameters / (layout.data if sharded else 1)
        found = Memory(
            parameters=int(2 * parameters),
            gradients=int((per_parameter - 14) * parameters),
            optimizer=int(optimizer),
            activations=int(held + again),
            logits=0,
            buffers=int(whole),
        )
        best = found if best is None or found.total > best.total else best
    return best


def _in_flight(job: Job, stage: int) -> float:
    """Microbatches whose activations of all its layers a stage holds at most, by schedule."""
    m, p, v = job.accumulation, job.layout.pipeline, job.chunks
    if job.schedule == "gpipe":
        return m
    if job.schedule == "zero_bubble_2p":
        return min(m, 2 * p - 1)
    if job.schedule == "zero_bubble":
        return min(m, p)
    if job.schedule == "interleaved":
        return min(m, ((v - 1) * p + 2 * (p - 1 - stage) + 1) / v)
    return min(m, p - stage)
