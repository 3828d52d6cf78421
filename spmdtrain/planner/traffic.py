"""Counts the bytes that, in theory, a device sends in one step of a layout, by mesh axis.

`hlo.traffic` says what the compiled step sends. Both count a ring: of `whole` bytes, an all-gather
and a reduce-scatter over n devices send (n - 1) / n each, and an all-reduce sends both. Scalars do
not count.
"""

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.mixer_sizes import MixerSizes
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.collective_time import data_sums
from spmdtrain.planner.cost.experts import BACKWARD_EXCHANGES, FORWARD_EXCHANGES
from spmdtrain.planner.cost.memory import (
    FLOAT32,
    gathered_elements,
    held_elements,
    own_expert_elements,
    resident_elements,
)
from spmdtrain.planner.cost.workload import Workload, pieces_of


def needed_traffic(workload: Workload) -> dict[str, float]:
    """Returns, by mesh axis of more than one device, the bytes each device sends in one step.

    Weights and gradients that `fsdp` and `expert` split together are under "fsdp+expert", as in the
    report of a compiled step.
    """
    sizes = dict(workload.mesh.sizes)
    dense_axes = _dense_axes(workload)
    sizes[dense_axes] = workload.dense_group.size
    experts = own_expert_elements(workload)
    dense = gathered_elements(workload) - experts
    rings = {
        "pipeline": 2 * _vocabulary_bytes(workload),
        "data": 0.0,
        "fsdp": _split_bytes(workload, experts),
        "expert": 0.0 if workload.dense_ways > 1 else _expert_reduction_bytes(workload),
        "context": _gradient_bytes(workload),
        "tensor": 2 * _tensor_bytes(workload),
    }
    of_dense = _split_bytes(workload, dense, _table_elements(workload))
    rings[dense_axes] = rings.get(dense_axes, 0.0) + of_dense
    sent = {axis: (sizes[axis] - 1) / sizes[axis] * whole for axis, whole in rings.items()}
    sent["data"] += _data_bytes(workload)
    sent["expert"] += _exchange_bytes(workload)
    sent["pipeline"] += _hop_bytes(workload)
    sent["context"] += _attention_bytes(workload)
    return {axis: size for axis, size in sent.items() if sizes[axis] > 1}


def _dense_axes(workload: Workload) -> str:
    """Returns the axes that split weights which no expert has."""
    if workload.dense_ways == 1:
        return "fsdp"
    return "fsdp+expert" if workload.mesh.fsdp > 1 else "expert"


def _split_bytes(workload: Workload, elements: float, tables: float = 0.0) -> float:
    """Counts the weights gathered in compute precision, and the float32 gradients scattered.

    With a pipeline this happens once per step. Without one it happens for each microbatch, and
    layers are gathered a second time for the backward. Of `elements`, `tables` are outside them.
    """
    once = (workload.compute_bytes + FLOAT32 * workload.trained.share) * elements
    if workload.mesh.pipeline > 1:
        return once
    layers = elements - tables
    return workload.accumulation * (once + workload.compute_bytes * layers)


def _expert_reduction_bytes(workload: Workload) -> float:
    """Counts a float32 all-reduce of the gradients of all weights that `expert` does not own."""
    mesh, trained = workload.mesh, workload.trained
    dense = gathered_elements(workload) - own_expert_elements(workload)
    adapters = workload.layers_per_stage * trained.adapter_elements(workload.model, mesh.tensor)
    return 2 * FLOAT32 * (trained.share * dense / mesh.fsdp + adapters)


def _exchange_bytes(workload: Workload) -> float:
    """Counts the bytes of tokens on their way to their experts and back, if loads are even.

    If `tensor` owns experts too they travel over both axes, and all count here.
    """
    model = workload.model
    if model.experts is None:
        return 0.0
    dispatch = workload.dispatch()
    large = FORWARD_EXCHANGES + BACKWARD_EXCHANGES
    layer = (
        large * dispatch.sent_bytes(model.expert_width, workload.compute_bytes)
        + dispatch.routing_bytes
    )
    layers = shape.expert_share(model) * workload.layers_per_stage
    return workload.accumulation * layers * layer


def _table_elements(workload: Workload) -> float:
    model = workload.model
    return shape.vocab(model) * shape.vocabulary_tables(model) * model.embed / workload.mesh.tensor


def _data_bytes(workload: Workload) -> float:
    """Counts an all-reduce of gradients, in float32 or compressed.

    With ZeRO-1 it is their scatter, and a gather of new weights in compute precision.
    """
    _, elements = held_elements(workload, resident_elements(workload))
    sums = data_sums(workload, FLOAT32)
    shares = (
        (collective.group.size - 1) / collective.group.size * collective.element_bytes
        for collective in sums
    )
    return sum(shares) * elements


def _tensor_bytes(workload: Workload) -> float:
    """Counts the activations that are summed: one for each mixer and mlp of a layer, in the forward
    and in the backward.

    With remat "full" all but the last of them are summed again. With sequence parallelism a sum is
    a gather before a matmul and a scatter after one, each half as much; the tokens that the matmuls
    of a layer gathered are gathered again for the gradients of their weights, and for remat "full"
    (arXiv:2205.05198, section 4.2.2). The embedding and the input's gradient of the head are sums
    over `tensor` too. If stages share the vocabulary, three slices of a whole stream are also
    gathered; a gather moves half of what a sum does.
    """
    mixers_and_mlps = shape.mixers_and_mlps(workload.model)
    is_recomputed = workload.remat == "full"
    per_layer = 2 * mixers_and_mlps + is_recomputed * (mixers_and_mlps - 1)
    if workload.stream_ways > 1:
        per_layer += (mixers_and_mlps + is_recomputed) / 2
    if workload.experts_over_tensor:  # joins in place of sums, and no tokens gathered
        joined = 1.0 if workload.stream_ways == 1 else 5 / 2
        per_layer -= shape.expert_share(workload.model) * joined
    sums = workload.layers_per_stage * per_layer + 2.0
    if workload.mesh.pipeline > 1 and workload.sum_ways > workload.stream_ways:
        sums += 3 / 2
    return workload.accumulation * sums * workload.activation_bytes


def _vocabulary_bytes(workload: Workload) -> float:
    """Counts the activations summed over the stages, which share the vocabulary.

    These are the embedding, the head's input, and the gradients of both. Devices that differ in
    `tensor` sum different tokens.
    """
    return 4 * workload.accumulation * workload.activation_bytes / workload.sum_ways


def _hop_bytes(workload: Workload) -> float:
    """Counts the activations and gradients that a stage sends to the next one, on average."""
    hops = workload.chunks - 1 / workload.mesh.pipeline
    return 2 * workload.accumulation * hops * workload.activation_bytes / workload.stream_ways


def _gradient_bytes(workload: Workload) -> float:
    """Counts the gradients of all weights, summed once over the devices of `context`."""
    _, elements = held_elements(workload, resident_elements(workload))
    return 2 * FLOAT32 * elements


def _attention_bytes(workload: Workload) -> float:
    """Counts what attention sends over `context`, by its method. See `_of_ring` for the ring.

    Keys and values are gathered for each layer, and again if the layer is recomputed; their
    gradients are scattered. Ulysses exchanges queries, keys, values and outputs, and their
    gradients; a layer that is recomputed exchanges the first three again, or with "full" all.
    """
    sent = 0.0
    for share, alike in shape.mixer_shares(workload.model):
        mixer = shape.linear_mixer(alike)
        of_layer = _of_recurrence(workload, mixer) if mixer else _of_attention(workload, alike)
        sent += share * of_layer
    return workload.accumulation * workload.layers_per_stage * sent


def _of_recurrence(workload: Workload, mixer: MixerSizes) -> float:
    """Counts what a layer with a recurrence sends over `context`: the maps of all pieces of a
    sequence, gathered in the forward and again in the backward, and scattered as gradients; or,
    with Ulysses, heads of inputs, gates and outputs, and of their gradients. The last inputs of a
    piece, for its convolution, are few.
    """
    ways, again = workload.mesh.context, workload.remat == "full"
    if workload.context_method == "ulysses":
        columns = mixer.mixed + 2 * mixer.width
        whole = workload.tokens * workload.compute_bytes * columns * (2 + again)
    else:
        pieces = pieces_of(workload.context_method, ways)
        whole = workload.microbatch * pieces * mixer.map_bytes * (3 + again)
    return (ways - 1) / ways * whole / workload.mesh.tensor


def _of_attention(workload: Workload, model: TransformerConfig) -> float:
    """Counts what one layer of a model, whose layers are all alike, sends over `context`."""
    ways = workload.mesh.context
    heads = model.heads / workload.mesh.tensor
    kv_heads = model.kv_heads / workload.mesh.tensor
    head_bytes = workload.compute_bytes * workload.tokens * shape.mean_dim(model)  # of this device
    if workload.context_method == "ring":
        return 2 * kv_heads * head_bytes * _of_ring(workload)
    if workload.context_method == "ulysses":
        exchanged = heads + 2 * kv_heads
        again = {"none": 0.0, "full": exchanged + heads}.get(workload.remat, exchanged)
        return (ways - 1) / ways * head_bytes * (2 * (exchanged + heads) + again)
    gathers = 1 if workload.remat == "none" else 2
    return (gathers + 1) * (ways - 1) * 2 * kv_heads * head_bytes


def _of_ring(workload: Workload) -> float:
    """Returns how often a device sends keys and values, or as many bytes, for one layer.

    The forward takes n - 1 hops, and runs again with remat "full": other policies keep its results.
    The backward sends keys n times, since its scan also sends those that are no longer read, and
    the gradients in float32 n - 1 times.
    """
    hops = workload.mesh.context - 1
    forward = hops * (2 if workload.remat == "full" else 1)
    keys = hops + 1 if hops > 1 else hops
    return forward + keys + hops * FLOAT32 / workload.compute_bytes
