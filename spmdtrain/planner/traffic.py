"""Bytes that a device has to send in one step, by mesh axis: what theory needs of this layout.

`hlo.traffic` says what the compiled step sends. Both count a ring: of `whole` bytes, an all-gather
and a reduce-scatter over n devices send (n - 1) / n each, an all-reduce sends both. Scalars are not
counted.
"""

from spmdtrain.planner.cost.memory import FLOAT32, resident_elements
from spmdtrain.planner.cost.workload import Workload


def needed_traffic(workload: Workload) -> dict[str, float]:
    """Mesh axis of more than one device -> bytes that each device sends over it in one step."""
    sizes = workload.mesh.sizes
    rings = {
        "pipeline": 2 * _vocabulary_bytes(workload),
        "data": _data_bytes(workload),
        "fsdp": _fsdp_bytes(workload),
        "context": _context_bytes(workload),
        "tensor": 2 * _tensor_bytes(workload),
    }
    sent = {axis: (sizes[axis] - 1) / sizes[axis] * whole for axis, whole in rings.items()}
    sent["pipeline"] += _hop_bytes(workload)
    return {axis: size for axis, size in sent.items() if sizes[axis] > 1}


def _fsdp_bytes(workload: Workload) -> float:
    """Weights are gathered in compute precision, and float32 gradients scattered.

    With a pipeline this happens once per step. Without one it happens for each microbatch, and
    layers are gathered a second time for the backward.
    """
    elements = resident_elements(workload)
    once = (workload.compute_bytes + FLOAT32) * elements
    if workload.mesh.pipeline > 1:
        return once
    layers = elements - _table_elements(workload)
    return workload.accumulation * (once + workload.compute_bytes * layers)


def _table_elements(workload: Workload) -> float:
    model = workload.model
    return model.vocab * model.vocabulary_tables * model.embed / workload.mesh.tensor


def _data_bytes(workload: Workload) -> float:
    """A float32 all-reduce of gradients; with ZeRO-1 their scatter, and a gather of new weights in
    compute precision."""
    elements = resident_elements(workload) / workload.mesh.fsdp
    back = workload.compute_bytes if workload.zero else FLOAT32
    return (FLOAT32 + back) * elements


def _tensor_bytes(workload: Workload) -> float:
    """Activations that are summed: two per layer in the forward and two in the backward.

    With remat "full" the first of them is summed again. With sequence parallelism a sum is a gather
    before a matmul and a scatter behind one, each half as much; the tokens that the two matmuls
    of a layer gathered are gathered again for the gradients of their weights, and for remat "full"
    (arXiv:2205.05198, section 4.2.2). The embedding and the input's gradient of
    the head are sums over `tensor` too. Where stages share the vocabulary, three slices of a stream
    that is whole are gathered besides; a gather moves half of what a sum does.
    """
    per_layer = 5.0 if workload.remat == "full" else 4.0
    if workload.stream_ways > 1:
        per_layer += 3 / 2 if workload.remat == "full" else 1
    sums = workload.layers_per_stage * per_layer + 2.0
    if workload.mesh.pipeline > 1 and workload.sum_ways > workload.stream_ways:
        sums += 3 / 2
    return workload.accumulation * sums * workload.activation_bytes


def _vocabulary_bytes(workload: Workload) -> float:
    """Activations summed over the stages, which share the vocabulary: the embedding, what the head
    reads, and the gradients of both. Devices that differ in `tensor` sum different tokens."""
    return 4 * workload.accumulation * workload.activation_bytes / workload.sum_ways


def _hop_bytes(workload: Workload) -> float:
    """Activations and their gradients that a stage sends to the next one, on average."""
    hops = workload.chunks - 1 / workload.mesh.pipeline
    return 2 * workload.accumulation * hops * workload.activation_bytes / workload.stream_ways


def _context_bytes(workload: Workload) -> float:
    """Keys and values gathered for each layer, again where they are computed again, and their
    gradients scattered; and the gradients of all weights summed once."""
    model = workload.model
    mesh = workload.mesh
    tokens = workload.tokens * mesh.context
    width = 2 * model.kv_heads * model.head_dim / mesh.tensor
    gathers = 1 if workload.remat == "none" else 2
    per_layer = (gathers + 1) * workload.compute_bytes * tokens * width
    gradients = 2 * FLOAT32 * resident_elements(workload) / mesh.fsdp
    return workload.accumulation * workload.layers_per_stage * per_layer + gradients
