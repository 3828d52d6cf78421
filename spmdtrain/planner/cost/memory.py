"""Estimates the bytes per device that a training step of this framework holds, by category.

`exact_state` reads the bytes of parameters and optimizer off the abstract state. The other terms
follow what the executors keep alive (train/gradients/grad_accumulation.py, pipeline/executor.py). A
step goes through several moments, and `Memory.total` is the largest of them.

`SAFE_SHARE` leaves room for what the driver, NCCL and the allocator hold in addition to the
tensors. Fujii et al. (arXiv 2411.06465) found that runs whose estimate is at most 80 % of the
memory never ran out of it: that is `Memory.fits`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pallas_kernels.attention.xla import BLOCK
from pallas_kernels.loss.api import KERNEL
from pallas_kernels.loss.chunks import CHUNK_LOGITS
from spmdtrain.config.schema import RunConfig, TransformerConfig
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.hardware import Hardware
from spmdtrain.planner.cost.loss import loss_of
from spmdtrain.planner.cost.schedules import SCHEDULES, RingSlots, lay_out, pipeline_of
from spmdtrain.planner.cost.workload import Workload, bytes_of

if TYPE_CHECKING:
    from spmdtrain.train.updates.optimizers import Optimizer

SAFE_SHARE = 0.8  # of a device's memory
BETWEEN_HOST_AND_DEVICE = 2  # layers whose input is on its way, if the host keeps it
FLOAT32 = 4  # bytes; gradients are accumulated in float32
# Arrays alive at once in the backward of a round: of messages and of rows, as wide as the stream,
# and of rows as wide as an expert.
ROUND_MESSAGES, ROUND_ROWS, ROUND_COLUMNS = 3, 2, 2
ROUTER_ARRAYS = 4  # of one float32 for each token and expert that a router keeps


@dataclass(frozen=True)
class Memory:
    """The bytes on the fullest device.

    `buffers` holds the rest: copies of weights in compute precision, gathered weights, what stages
    send each other, and one layer's workspace. `copies` are those of the state for
    guard.replay_check.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    copies: int = 0

    @property
    def of_step(self) -> int:
        """The bytes of a step that is taken once, as XLA accounts for them."""
        return self.total - self.copies

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def fits(self, hardware: Hardware) -> bool:
        return self.total <= SAFE_SHARE * hardware.memory

    def by_category(self) -> dict[str, int]:
        return asdict(self) | {"total": self.total}


def step_memory(
    workload: Workload, state: tuple[int, int] | None = None, resident: float | None = None
) -> Memory:
    """Returns the memory of one step.

    `state` are the (parameter, optimizer) bytes of `exact_state`, if known. `resident` replaces the
    count of `resident_elements` for a custom model.
    """
    parameters, optimizer = state or closed_form_state(workload)
    if resident is None:
        resident = resident_elements(workload)
    of_executor = _accumulated_memory if workload.mesh.pipeline == 1 else _pipelined_memory
    memory = of_executor(workload, parameters, optimizer, resident)
    if not workload.replays_steps:
        return memory
    # The state from before the step, and its copy on other devices, from which the step is taken
    # again while its first result is there (running/guards/other_devices.py).
    return replace(memory, copies=2 * (parameters + optimizer))


# Parameters and optimizer


def exact_state(
    config: RunConfig, mesh_sizes: Mapping[str, int], optimizer: "Optimizer | None" = None
) -> tuple[int, int]:
    """Returns (parameter bytes, other bytes in the state) per device; needs no devices.

    Refuses what does not divide, by the same functions as a run.
    """
    import jax

    from spmdtrain.parallel.mesh import AXES
    from spmdtrain.train.shard import shard_on
    from spmdtrain.train.state import resting_bytes

    # An abstract mesh has all that is needed here: sizes by axis.
    mesh: Any = jax.sharding.AbstractMesh(tuple(mesh_sizes[axis] for axis in AXES), AXES)
    setup = shard_on(config, mesh, optimizer=optimizer)
    return resting_bytes(setup.state, setup.items)


def host_bytes(workload: Workload) -> int:
    """Returns the bytes of moments that rest on the host, for one device."""
    if not workload.moments_on_host:
        return 0
    return int(workload.moment_bytes * workload.moments * _updated_elements(workload))


def closed_form_state(workload: Workload) -> tuple[int, int]:
    """Returns `exact_state` for a search; a few per cent off if a dim is unsplit or padded."""
    frozen, _ = held_elements(workload, resident_elements(workload))
    elements = _updated_elements(workload)
    parameters = workload.stored_bytes * elements + workload.frozen_bytes * frozen
    if workload.trained.base_bytes is not None:
        adapted = workload.trained.adapted_elements(workload.model, workload.mesh.tensor)
        fewer = workload.frozen_bytes - workload.trained.base_bytes
        parameters -= fewer * workload.layers_per_stage * adapted / workload.mesh.fsdp
    parameters += workload.frozen_bytes * second_elements(workload)
    return int(parameters), int(workload.optimizer_bytes * elements)


def second_elements(workload: Workload) -> float:
    """Counts the elements at rest on a device of second models, which ZeRO-1 does not split."""
    runs = workload.forward_only.values()
    return sum((resident_elements(run) / run.mesh.fsdp for run in runs), 0.0)


def _updated_elements(workload: Workload) -> float:
    """Counts the trained elements at rest on a device, which it updates there."""
    _, elements = held_elements(workload, resident_elements(workload))
    if workload.zero:
        whole = _whole_under_zero(workload) * workload.trained.share
        elements = whole + (elements - whole) / workload.mesh.data
    return elements


def held_elements(workload: Workload, resident: float) -> tuple[float, float]:
    """Counts the elements (frozen, trained) at rest on a device, if ZeRO-1 splits none.

    `resident`: of the model's own weights, before `fsdp` splits them.
    """
    own = resident / workload.mesh.fsdp
    share = workload.trained.share
    return (1 - share) * own, share * own + _adapter_elements(workload)


def _adapter_elements(workload: Workload) -> float:
    adapters = workload.trained.adapter_elements(workload.model, workload.mesh.tensor)
    return workload.layers_per_stage * adapters


def _whole_under_zero(workload: Workload) -> float:
    """Counts the weight elements on a device that ZeRO-1 cannot split.

    For these `reduce.scatter_dim` finds no dim: fsdp and tensor split both dims of a matrix, and
    `data` divides neither. Attention's matrices have a dim that can be padded, that of a head.
    """
    mesh = workload.mesh
    model = workload.model
    if mesh.fsdp == 1 or model.embed % (mesh.fsdp * mesh.data) == 0:
        return 0.0
    whole = 0.0
    layers = workload.layers_per_stage // workload.chunks
    if mesh.tensor > 1 and workload.chunks % mesh.data and layers % mesh.data:
        mlp = shape.mean_of_mlps(model, shape.mlp_matrices)
        whole += workload.layers_per_stage * mlp / mesh.tensor
    if mesh.tensor * mesh.pipeline > 1:
        whole += _outside_elements(workload)
    return whole / mesh.fsdp


def resident_elements(workload: Workload) -> float:
    """Counts the weight elements at rest on one device, before `data` and `fsdp` split them.

    This includes layers that pad a pipeline. step_time.stage_parameters is a simpler count.
    """
    return _elements(workload, workload.dense_ways)


def gathered_elements(workload: Workload) -> float:
    """Counts the weight elements of one device's share of the model once they are gathered."""
    return _elements(workload, 1)


def _elements(workload: Workload, dense_ways: int) -> float:
    """Counts a stage's elements; `dense_ways` devices split those outside experts."""
    dense = workload.layers_per_stage * _dense_layer_elements(workload)
    return (dense + _outside_elements(workload)) / dense_ways + own_expert_elements(workload)


def own_expert_elements(workload: Workload) -> float:
    """Counts the elements of the experts of a device's layers that it owns, before `fsdp`."""
    return workload.layers_per_stage * _expert_elements(workload)


def _layer_elements(workload: Workload) -> float:
    """Counts the elements of a gathered layer, with the device's own experts."""
    return _dense_layer_elements(workload) + _expert_elements(workload)


def _dense_layer_elements(workload: Workload) -> float:
    """Counts the elements outside experts: matrices split over `tensor`, and whole vectors."""
    model = workload.model
    vectors = shape.layer_parameters(model) - shape.layer_matrices(model)
    split = shape.layer_matrices(model) - shape.whole_matrices(model)
    return split / workload.mesh.tensor + shape.whole_matrices(model) + vectors


def _expert_elements(workload: Workload) -> float:
    """Counts the elements of a layer's experts: `expert` owns some, and `tensor` splits them."""
    mesh = workload.mesh
    return shape.expert_parameters(workload.model) / (mesh.expert * mesh.tensor)


def _outside_elements(workload: Workload) -> float:
    model = workload.model
    ways = workload.mesh.pipeline * workload.mesh.tensor
    vocabulary = shape.vocab(model) * shape.vocabulary_tables(model) / ways
    joining = 2 * shape.further_tokens(model) * model.embed  # of further tokens, with the stream
    frozen = 0 if shape.further_tokens(model) else shape.further_parameters(model) / ways
    of_layers = shape.token_table(model) / ways
    outside = model.embed * (vocabulary + shape.position_rows(model) + 2 + joining)
    return outside + frozen + of_layers


# Activations


def kept_bytes(workload: Workload, remat: str | None = None) -> int:
    """Returns the bytes that one layer keeps of one microbatch for its backward.

    A test holds it equal to `LayerGradient.saved`.
    """
    policy = remat or workload.remat
    keeping = _Keeping(
        workload.tokens,
        workload.mesh.tensor,
        workload.compute_bytes,
        policy,
        workload.stream_ways,
    )
    of_dense = _kept_of_layer(workload.model, keeping)
    return int(of_dense + shape.expert_share(workload.model) * _kept_of_experts(workload, policy))


def _kept_of_experts(workload: Workload, remat: str) -> float:
    """Returns the bytes that a layer with experts keeps beyond one without: those of its router.

    The experts keep only the router's input, a token's gates and its choices. With "dots" the
    logits are kept, and the rest is recomputed, except for what was exchanged, which nothing reads.
    """
    experts = workload.model.experts
    if experts is None or remat == "full":
        return 0.0
    tokens = workload.tokens / workload.stream_ways
    if remat == "dots":
        return tokens * FLOAT32 * experts.count
    read = FLOAT32 * workload.model.embed  # the router reads its input in float32
    scores = (ROUTER_ARRAYS * FLOAT32 + experts.chosen) * experts.count  # and a mask of the choices
    return tokens * (read + scores + FLOAT32 * (3 * experts.chosen + 1))


class _Keeping(NamedTuple):
    """The sizes by which a part of a layer keeps bytes: of one microbatch, on one device."""

    tokens: int
    tensor: int
    size: int  # bytes of an element
    remat: str
    stream_ways: int  # as in Workload


@lru_cache(maxsize=10_000)
def _kept_of_layer(model: TransformerConfig, keeping: _Keeping) -> float:
    """Returns the bytes that a layer keeps without its experts."""
    tokens, tensor, size, remat, stream_ways = keeping
    if remat == "full":
        return size * tokens * model.embed // stream_ways
    mixer = shape.mean_of_mixers(model, lambda alike: _kept_of_mixer(alike, keeping))
    mlp = shape.mean_of_mlps(model, lambda alike: _kept_of_mlp(alike, keeping))
    parts = shape.parts(model)
    if remat == "dots":
        # The input of each part; a norm behind the last one reads its output.
        streams = parts + shape.share_with_out_norms(model)
        return tokens * (streams * size * model.embed // stream_ways) + mixer + mlp

    # A norm keeps its input and output, and in float32 its deviation (and its mean, if centred).
    statistics = 2 * FLOAT32 if model.norm == "layernorm" else FLOAT32
    norm = tokens * (2 * size * model.embed + statistics) // stream_ways
    # The output of a norm after attention or mlp is added to the stream, and not kept.
    out_norm = tokens * (size * model.embed + statistics) // stream_ways
    norms = parts * (norm + (shape.norms_of_part(model) - 1) * out_norm)
    return norms + mixer + mlp


def _kept_of_mixer(model: TransformerConfig, keeping: _Keeping) -> int:
    """Returns the bytes that a mixer keeps, without its norms."""
    tokens, tensor, size, remat, _ = keeping
    # Attention keeps its result, and its log-sum-exp in float32.
    heads = 0 if shape.linear_mixer(model) else model.heads
    attention = size * shape.attention_width(model) + FLOAT32 * heads
    of_heads, whole = shape.qkv_columns(model)
    if remat == "dots":
        if model.sinks:
            attention *= 2  # once more for what the sinks take of it
        return tokens * ((size * of_heads + attention) // tensor + size * whole)
    # It also keeps its input, and the matmul after it keeps its own.
    attention += size * (shape.qkv_width(model) + shape.attention_width(model))
    if model.query_norm != "none":
        attention += size * shape.query_key_width(model)
    if model.value_norm:
        attention += size * model.kv_heads * model.head_dim
    if model.output_gate != "none":  # the output before its gates, and those of heads
        of_heads = model.heads if model.output_gate == "head" else 0
        attention += size * (shape.attention_width(model) + of_heads)
    # Latents, before and after their norms, are whole on every device of `tensor`.
    latents = 2 * size * shape.latent_norm_width(model) if model.latent else 0
    return tokens * (attention // tensor + latents)


def _kept_of_mlp(model: TransformerConfig, keeping: _Keeping) -> int:
    """Returns the bytes that an mlp keeps, without its norms."""
    tokens, tensor, size, remat, _ = keeping
    columns = shape.up_width(model) + (0 if remat == "dots" else model.ffn)
    return tokens * (size * columns // tensor)


def deferred_bytes(workload: Workload) -> int:
    """Returns the bytes that a layer's split backward leaves for its weight gradient.

    A test holds it equal to `LayerGradient.deferred`.
    """
    model, size = workload.model, workload.compute_bytes
    tensor, tokens = workload.mesh.tensor, workload.tokens

    def of_mixer(alike: TransformerConfig) -> int:
        of_heads, others = shape.qkv_columns(alike)
        columns = size * of_heads // tensor + size * others
        # The gradients of these vectors are complete in float32.
        vectors = shape.query_norm_size(alike) + shape.latent_norm_width(alike)
        return tokens * columns + FLOAT32 * (vectors + shape.head_sinks(alike))

    def of_mlp(alike: TransformerConfig) -> int:
        return tokens * (size * shape.up_width(alike) // tensor) + FLOAT32 * shape.slopes(alike)

    stream = tokens * (size * shape.parts(model) + 8 * shape.norms(model)) * model.embed
    deferred = stream + shape.mean_of_mixers(model, of_mixer) + shape.mean_of_mlps(model, of_mlp)
    return int(deferred + shape.expert_share(model) * _deferred_of_experts(workload))


def _deferred_of_experts(workload: Workload) -> float:
    """Returns the bytes that a layer's experts leave: both factors of each weight's gradient.

    If several rounds are possible they run in a loop, which leaves the gradients themselves.
    """
    model, experts = workload.model, workload.model.experts
    if experts is None:
        return 0.0
    dispatch = workload.dispatch()
    if not dispatch.is_one_round:
        return workload.compute_bytes * _expert_elements(workload) / shape.expert_share(model)
    columns = _expert_columns(workload)
    router = workload.tokens * FLOAT32 * (model.embed + experts.count)
    narrow = workload.tokens * workload.compute_bytes * 2 * (experts.width or 0)
    of_row = 2 * model.expert_width + columns
    return router + narrow + dispatch.padded * workload.compute_bytes * of_row


def _expert_columns(workload: Workload) -> float:
    """Returns the widths, on a device, of an expert's first result and of what its second reads."""
    experts = workload.model.experts
    assert experts is not None, "a model with experts"
    split = 1 if workload.experts_over_tensor else workload.mesh.tensor
    return experts.ffn * (3 if workload.model.is_gated else 2) / split


def ring_slots(workload: Workload) -> RingSlots:
    """Returns the slots of the pipeline's rings, from a closed form or else from the table."""
    pipeline = pipeline_of(workload)
    table = lay_out(workload.schedule, pipeline, closed_form=True)
    if table is None:
        return SCHEDULES[workload.schedule].ring_slots(pipeline)
    return RingSlots(
        stash=table.slots + 1,
        cotangents=_with_trash(table.cotangent_slots),
        deferred=_with_trash(table.deferred_slots),
    )


def _with_trash(slots: int) -> int:
    """Adds the trash slot that each ring has on top of the used ones; an unused ring has none."""
    return slots + 1 if slots else 0


# The two executors


def _accumulated_memory(
    workload: Workload, parameters: int, optimizer: int, resident: float
) -> Memory:
    """Returns the memory of running microbatches one after another.

    One of three moments is the fullest: the head, a layer's backward, or the optimizer. With ZeRO-1
    a step begins with a copy of the parameters in compute precision, gathered over `data`.
    """
    model = workload.model
    tensor = workload.mesh.tensor
    size = workload.compute_bytes
    frozen, elements = held_elements(workload, resident)
    if workload.trained.share == 1 and not workload.zero:
        # Exact, where the state was read.
        own = parameters - workload.frozen_bytes * second_elements(workload)
        elements = own / workload.stored_bytes
    narrower = size < workload.stored_bytes
    gathers = workload.zero and workload.mesh.data > 1
    copied = narrower or gathers or not workload.config.optimizer.gradients_at_weights
    compute_copy = size * elements if copied else 0.0
    if size < workload.frozen_bytes:
        compute_copy += size * (frozen + second_elements(workload))
    below = workload.frozen_per_stage  # which keep nothing, and whose gradients are zeros
    gradients = size * elements * (1 - workload.trained.share_below(model))
    sums = FLOAT32 * elements if workload.accumulation > 1 else 0.0

    # Experts that `fsdp` does not split are neither gathered nor scattered.
    layer = _layer_elements(workload)
    if workload.mesh.fsdp == 1:
        layer = _dense_layer_elements(workload)
    table = shape.vocab(model) * model.embed / tensor
    gathered = 0.0
    unscattered = 0.0
    if workload.mesh.fsdp * workload.dense_ways > 1:
        gathered = size * (2 * layer + table)  # the layer in use and the next one
        # Gradients before they are scattered.
        unscattered = size * (layer + table) * workload.trained.share
        if workload.scans_layers:
            # XLA gathers the other layers of a round ahead, and scatters their gradients late.
            others = shape.layers_of_loop(model) - 1
            gathered += size * others * layer
            unscattered += FLOAT32 * others * layer * workload.trained.share

    # The first layer's input, the last one's output, and what the head reads; a further token has
    # two more joined streams.
    ends = (3 + 4 * shape.further_tokens(model)) * size * workload.tokens * model.embed
    layers = workload.layers_per_stage - below
    if workload.offloads:
        layers = min(layers, BETWEEN_HOST_AND_DEVICE)
    activations = layers * kept_bytes(workload) + ends
    logits = _logit_bytes(workload, tensor)
    if workload.second_models:
        logits = _logits_of_all(workload)

    of_layer = (
        unscattered
        + _recomputed_bytes(workload)
        + _workspace_bytes(workload)
        + _widened_bytes(workload)
        + _gathered_token_bytes(workload)
        + _round_bytes(workload)
        + _recurrence_bytes(workload)
    )
    # A block of a further token leaves a gradient of the table, until that of the model is added.
    waiting = shape.further_tokens(model) * FLOAT32 * table
    at_head = sums + compute_copy + gathered + activations + logits + waiting
    # Written out, a layer's arrays are freed as its backward pass goes on; a loop holds them all.
    freed = 0.0 if workload.scans_layers else kept_bytes(workload) / 2
    at_backward = sums + compute_copy + gathered + gradients + activations + of_layer + waiting
    at_backward -= freed
    at_optimizer = FLOAT32 * elements + (gradients if sums else 0.0) + _streamed_bytes(workload)
    at_embedding = sums + compute_copy + gradients + _whole_table_gradients(workload)
    # In a microbatch that is written out XLA leaves the gradients of matrices for last: what layers
    # keep is still there when the gradient of the embedding is scattered, in float32.
    at_scatter = 0.0
    if sums and not workload.scans_layers and workload.trained.share == 1:
        at_scatter = sums + compute_copy + gradients + activations + FLOAT32 * table + waiting

    peak = max(at_head, at_backward, at_optimizer, at_embedding, at_scatter)
    if peak == at_optimizer:
        return _memory(workload, parameters, optimizer, peak, gradients=FLOAT32 * elements)
    if peak == at_embedding:
        return _memory(workload, parameters, optimizer, peak, gradients=sums + gradients)
    if peak in (at_backward, at_scatter):
        return _memory(
            workload,
            parameters,
            optimizer,
            peak,
            gradients=sums + gradients,
            activations=activations,
            logits=logits if peak == at_head else 0,
        )
    return _memory(
        workload,
        parameters,
        optimizer,
        peak,
        gradients=sums,
        activations=activations,
        logits=logits,
    )


def _whole_table_gradients(workload: Workload) -> float:
    """Returns the bytes of the gradients of both tables at the end of a microbatch, before they are
    scattered over `fsdp`.

    XLA scatters that of the head together with that of the embedding: it waits in compute
    precision, and both are then whole in float32.
    """
    model, mesh = workload.model, workload.mesh
    if model.tied or mesh.fsdp * workload.dense_ways == 1 or workload.trained.share < 1:
        return 0.0
    table = shape.vocab(model) * model.embed / mesh.tensor
    return (2 * FLOAT32 + workload.compute_bytes) * table


def _pipelined_memory(
    workload: Workload, parameters: int, optimizer: int, elements: float
) -> Memory:
    """Counts the rings of the schedule's table, one float32 gradient, and a tick's working set.

    Weights are gathered over `fsdp` once per step, in compute precision.
    """
    mesh = workload.mesh
    size = workload.compute_bytes
    share = workload.trained.share
    elements += gathered_elements(workload) - resident_elements(workload)
    trained = share * elements + _adapter_elements(workload)
    layers_per_chunk = workload.layers_per_stage // workload.chunks
    kept_of_chunk = layers_per_chunk * kept_bytes(workload)
    deferred = layers_per_chunk * deferred_bytes(workload)
    rings = ring_slots(workload)
    full = workload.remat == "full"

    # A slot of the stash holds a chunk's input if its layers are recomputed.
    stream_bytes = workload.activation_bytes // workload.stream_ways
    stashed = stream_bytes if full else kept_of_chunk
    # Received, sent back, and the embedding that enters next.
    carried = 3 * stream_bytes
    activations = (
        rings.stash * stashed
        + rings.deferred * deferred
        + rings.cotangents * stream_bytes
        + carried
    )
    narrower = size < workload.stored_bytes
    gathers = mesh.fsdp * workload.dense_ways > 1 or bool(workload.zero)
    copies = narrower or gathers or not workload.config.optimizer.gradients_at_weights
    weights = size * trained if copies else 0.0
    if size < workload.frozen_bytes or mesh.fsdp * workload.dense_ways > 1:
        weights += size * (elements - share * elements)
    # A chunk's gradients, before they are added to the sum.
    chunk_elements = layers_per_chunk * _layer_elements(workload)
    chunk_gradients = size * share * chunk_elements

    # The forward makes one set of what layers keep, and the backward reads another. With remat
    # "full" all layers of a chunk are recomputed at once, with "dots" one at a time.
    recomputed = _recomputed_bytes(workload)
    if full:
        working = 2 * layers_per_chunk * recomputed
    else:
        working = 2 * kept_of_chunk + recomputed
    working += _gathered_token_bytes(workload) + _widened_bytes(workload)
    working += _round_bytes(workload)
    if layers_per_chunk > 1:  # a scan of one layer is no loop: XLA keeps less of it
        working += _workspace_bytes(workload)
    if workload.chunks > 1:  # its weights are sliced from the stage's, in addition to a tick's work
        working += size * chunk_elements
    if rings.deferred:
        working += 2 * deferred
    logits = _logit_bytes(workload, mesh.pipeline * mesh.tensor)

    gradients = FLOAT32 * trained
    peak = gradients + weights + activations + chunk_gradients + working + logits
    return _memory(
        workload,
        parameters,
        optimizer,
        peak,
        gradients=gradients,
        activations=activations,
        logits=logits,
    )


def _memory(
    workload: Workload,
    parameters: int,
    optimizer: int,
    peak: float,
    *,
    gradients: float,
    activations: float = 0,
    logits: float = 0,
) -> Memory:
    """Makes a `Memory`. `peak` is the most bytes on top of the state; the rest is `buffers`."""
    batch = 4 * workload.token_numbers * workload.tokens * workload.accumulation
    named = int(gradients) + int(activations) + int(logits)
    return Memory(
        parameters=parameters,
        gradients=int(gradients),
        optimizer=optimizer,
        activations=int(activations),
        logits=int(logits),
        buffers=max(0, int(peak) - named) + batch,
    )


def _streamed_bytes(workload: Workload) -> float:
    """Returns the bytes of moments on the device during an update, if they rest on the host.

    Those of a table come whole, of both tables at once if embedding and head have one each. Those
    of the layers on their way in and out are fewer.
    """
    if not workload.moments_on_host:
        return 0.0
    mesh = workload.mesh
    table = shape.vocab(workload.model) * workload.model.embed / (mesh.tensor * mesh.pipeline)
    tables = shape.vocabulary_tables(workload.model) * table
    largest = max(tables, BETWEEN_HOST_AND_DEVICE * _layer_elements(workload))
    ways = mesh.fsdp * (mesh.data if workload.zero else 1)
    return workload.moment_bytes * workload.moments * largest / ways


def _logit_bytes(workload: Workload, ways: int) -> float:
    """Returns the bytes of the logits of one chunk of the vocabulary, split `ways` ways.

    They are kept in their own dtype, and in compute precision for the matmuls of the gradients,
    which takes the place of logits of the same dtype where a kernel computes it.
    With more than one chunk, a float32 gradient of the table accumulates over them. What logits are
    compared with is spread over the rows of a chunk as well.
    """
    rows = shape.vocab(workload.model) / ways
    arrays = 2 if workload.compares_logits else 1
    size = FLOAT32 if workload.compares_logits else bytes_of(workload.config.precision.logits)
    implementation, chunks = loss_of(workload, ways)
    if workload.compares_logits:
        chunks = max(1, math.ceil(arrays * workload.tokens * rows / CHUNK_LOGITS))
    in_place = implementation == KERNEL and size == workload.compute_bytes
    of_gradient = 0 if in_place else workload.compute_bytes
    logits = workload.tokens * rows / chunks * (arrays * size + of_gradient)
    table_gradients = 0.0
    if chunks > 1 and workload.trained.share:
        table_gradients = FLOAT32 * rows * workload.model.embed
    return logits + table_gradients


def _logits_of_all(workload: Workload) -> float:
    """Returns the bytes of a chunk's logits of all models, and of the second ones' hidden states.

    All share the size of a chunk. Those of second models have no gradient in compute precision.
    """
    arrays = 1 + len(workload.second_models)
    rows = shape.vocab(workload.model) / workload.mesh.tensor
    chunks = max(1, math.ceil(arrays * workload.tokens * rows / CHUNK_LOGITS))
    size = workload.compute_bytes
    logits = workload.tokens * rows / chunks * (arrays * FLOAT32 + size)
    table_gradients = FLOAT32 * rows * workload.model.embed * (chunks > 1)
    hidden = sum(size * workload.tokens * second.model.embed for second in workload.second_models)
    return logits + table_gradients + hidden


def _recomputed_bytes(workload: Workload) -> float:
    """Returns the bytes that one layer's backward recomputes before it starts."""
    if workload.remat == "none":
        return 0.0
    return kept_bytes(workload, "none")


def _gathered_token_bytes(workload: Workload) -> float:
    """Returns the bytes that collective matmuls assemble in a layer's backward.

    These are the input of the two matmuls that gather and the gradient of the two that scatter,
    each with the tokens of all devices.
    """
    return 4.0 * workload.activation_bytes if workload.collective_matmul else 0.0


def _widened_bytes(workload: Workload) -> float:
    """Returns the bytes of a layer's largest matrix, dequantised, if it is stored in few bits."""
    if workload.trained.base_bytes is None:
        return 0.0
    model = workload.model
    up_width = shape.mean_of_mlps(model, shape.up_width)
    widths = (shape.qkv_width(alike) for _, alike in shape.mixer_shares(model))
    widest = model.embed * max(up_width, *widths) / workload.mesh.tensor
    return (FLOAT32 + workload.compute_bytes) * widest


def _workspace_bytes(workload: Workload) -> float:
    """Returns the temporary bytes of one layer's backward: attention's or the MLP's, if larger.

    Attention has two float32 tiles of scores, and the float32 gradients of queries, keys and
    values; the MLP has its gradients. If the layer was recomputed, XLA reuses its buffers.
    """
    without_pipeline = workload.mesh.pipeline == 1
    if workload.remat == "dots" or (workload.remat == "full" and without_pipeline):
        return 0.0
    model = workload.model
    tensor = workload.mesh.tensor
    queries = workload.tokens // workload.microbatch
    tile = min(BLOCK, workload.train.sequence_length) * min(BLOCK, queries)
    scores = 2 * FLOAT32 * workload.microbatch * model.heads / tensor * tile
    widths = [shape.qkv_width(alike) for _, alike in shape.mixer_shares(model)]
    qkv_gradients = FLOAT32 * workload.tokens * max(widths, default=0) / tensor
    mlp_columns = shape.mean_of_mlps(model, lambda layer: shape.up_width(layer) + layer.ffn)
    mlp_gradients = workload.tokens * mlp_columns / tensor * workload.compute_bytes
    return max(scores + qkv_gradients, mlp_gradients)


def _recurrence_bytes(workload: Workload) -> float:
    """Returns the bytes of what the recurrences of a turn of the loop write, backward.

    XLA makes these arrays at the start of the turn, those of all its layers: outputs, each time
    that they are computed again, and gradients of inputs, also by the maps of pieces of a sequence.
    """
    model = workload.model
    recomputed = 2 if workload.remat == "full" else 1
    in_pieces = workload.mesh.context > 1 and workload.context_method != "ulysses"

    def of_mixer(alike: TransformerConfig) -> float:
        sizes = shape.linear_mixer(alike)
        if sizes is None or not sizes.map_bytes:
            return 0.0
        return recomputed * sizes.width + (2 if in_pieces else 1) * sizes.mixed

    layers = shape.layers_of_loop(model) if workload.scans_layers else 1
    columns = layers * shape.mean_of_mixers(model, of_mixer)
    return workload.compute_bytes * workload.tokens * columns / workload.mesh.tensor


def _round_bytes(workload: Workload) -> float:
    """Returns the temporary bytes of one round of a layer's experts, backward.

    It holds the tokens and gradients of messages as they are sent and as they arrive, the rows made
    of them, and what the experts compute of these rows. The gradients of the device's own experts
    are sums over the rounds in float32. All routings need as much: their number of rounds differs.
    """
    model, experts = workload.model, workload.model.experts
    if experts is None:
        return 0.0
    dispatch = workload.dispatch()
    columns = _expert_columns(workload)
    width = model.expert_width
    moved = ROUND_MESSAGES * dispatch.messages * width
    of_rows = dispatch.padded * (ROUND_ROWS * width + ROUND_COLUMNS * columns)
    bytes_of_element = workload.compute_bytes + (0 if dispatch.is_one_round else FLOAT32)
    # Those of a layer that has experts, not the mean over layers.
    of_layer = _expert_elements(workload) / shape.expert_share(model)
    of_weights = bytes_of_element * workload.trained.share * of_layer
    return workload.compute_bytes * (moved + of_rows) + of_weights
