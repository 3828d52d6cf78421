"""Estimates the seconds of one training step: the layers (layer_time.py), and everything around
them.

Every term is kept, because the breakdown is half of the answer. A pipeline takes m microbatches of
its slowest stage, plus a bubble. Two kinds of executor are estimated (schedules.py): this framework
ticks in lockstep and shares the head among the stages; the stages of other frameworks run their own
orders, with the embedding on the first stage and the head on the last.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from spmdtrain.pipeline import timing
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.collective_time import (
    all_gather_seconds,
    all_reduce_seconds,
    data_sums,
    send_seconds,
)
from spmdtrain.planner.cost.flops import forward_flops_per_token, model_flops_per_token
from spmdtrain.planner.cost.hardware import Hardware
from spmdtrain.planner.cost.kernel_time import matmul_seconds, memory_seconds
from spmdtrain.planner.cost.layer_time import NO_WORK, Work, add_work, layer_time
from spmdtrain.planner.cost.loss import loss_of
from spmdtrain.planner.cost.memory import FLOAT32, host_bytes, kept_bytes
from spmdtrain.planner.cost.overlap import LOST_BESIDE_COLLECTIVES, exposed, left_over
from spmdtrain.planner.cost.schedules import SCHEDULES, lay_out, lockstep_seconds, pipeline_of
from spmdtrain.planner.cost.software import Software
from spmdtrain.planner.cost.workload import SECOND_MODELS, Workload

# Bytes per parameter that the optimizer moves: it reads gradient, weight and two moments, and
# writes weight, moments, and the copy in compute precision.
OPTIMIZER_BYTES = 30
# Bytes per second between a device and its host, each way, over the 63 GB/s of PCIe 5 x16; judged.
HOST_BANDWIDTH = 50e9
# The same for moments, which come and go in turn: measured on an H200 with 1.9 G parameters.
MOMENTS_BANDWIDTH = 25e9
# Bytes per logit that the loss moves in forward and backward: the float32 logit, its maximum and
# its sum, and the copies of the gradient.
LOGIT_BYTES = (18, 14)
# The same beside the matmuls, by who computes the loss and the dtype of the logits, where it was
# timed: benchmarks/results/h200-2026-11-28/loss.json.
TIMED_LOGIT_BYTES: Mapping[tuple[str, str], float] = {
    ("xla", "float32"): 18,
    ("triton", "float32"): 11,
    ("xla", "bfloat16"): 13,
    ("triton", "bfloat16"): 6.5,
}

# Term -> what bounds it. The order is that of the breakdown.
BOUND_BY: Mapping[str, str] = {
    "matmul": "compute",  # of the layers
    "attention": "compute",  # scores, softmax and values
    "elementwise": "memory",  # norms, residuals and activation functions
    "recompute": "compute",  # repeated by remat
    "stacks": "memory",  # what a loop over layers copies into arrays of all layers and out again
    "launches": "host",  # of kernels, where they take longer than the kernels
    "head": "compute",  # logits, loss and their gradients
    **dict.fromkeys(SECOND_MODELS, "compute"),  # their forward passes
    "embedding": "memory",
    "tensor_collectives": "network",  # sums of activations over `tensor`
    "context_collectives": "network",  # keys and values over `context`
    "expert_exchange": "network",  # tokens on their way to their experts and back
    "pipeline_bubble": "idle",  # the fullest stage waits for others
    "pipeline_hops": "network",  # sends between stages
    "host_transfers": "host",  # what layers keep, and moments, on their way to the host and back
    "exchanges": "host",  # the host, around each microbatch of a stage
    "vocabulary_collectives": "network",  # sums over `pipeline` if stages share the vocabulary
    "fsdp_collectives": "network",  # gathered weights and scattered gradients
    "data_reduction": "network",  # gradients over `data`
    "optimizer": "memory",
    "outside_the_device": "host",  # data and logging
    "stragglers": "network",  # waiting for the slowest device
}


@dataclass(frozen=True)
class StepTime:
    """The time of one step. `terms`: term -> exposed seconds, so they add up."""

    workload: Workload
    hardware: Hardware
    software: Software
    terms: Mapping[str, float]
    scale: float = 1.0  # measured / estimated, for a run on which the estimate is anchored

    @property
    def seconds(self) -> float:
        return self.scale * sum(self.terms.values())

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.workload.tokens_per_step / self.seconds / self.workload.mesh.devices

    @property
    def model_flops_per_device(self) -> float:
        """The model FLOP/s: forward and backward once, causal attention, second models forward."""
        workload = self.workload
        length = workload.train.sequence_length
        per_token = model_flops_per_token(workload.model, length, workload.trained)
        second = (forward_flops_per_token(model, length) for _, model in workload.second_models)
        per_token += sum(second)
        return per_token * self.tokens_per_second_per_device

    @property
    def mfu(self) -> float:
        """The model FLOPs utilisation: the share of the data sheet's peak at full power."""
        unlimited = replace(self.hardware, power_limit=0.0)
        return self.model_flops_per_device / unlimited.peak(self.workload.dtype)

    @property
    def bubble_fraction(self) -> float:
        return self.terms["pipeline_bubble"] / sum(self.terms.values())

    def bound_by(self, term: str) -> str:
        if term == "attention" and not self.software.attention_share:
            return "memory"  # scores are written out
        return BOUND_BY[term]


def step_time(
    workload: Workload, hardware: Hardware, software: Software, *, closed_form: bool = False
) -> StepTime:
    """Returns the time of one step.

    With `closed_form`, the bubble comes from the schedule's closed form instead of its table; a
    search uses this.
    """
    share = workload.trained.of_matrices
    layer = {
        term: work._replace(weight=share * work.weight)
        for term, work in layer_time(workload, hardware, software).items()
    }
    adapters = _adapter_work(workload, hardware, software)
    layer["matmul"] = add_work(layer["matmul"], adapters)
    if workload.remat == "full":
        again = NO_WORK._replace(backward=adapters.forward)
        layer["recompute"] = add_work(layer["recompute"], again)
    below = workload.frozen_per_stage  # which have no backward
    stage = {
        term: (workload.layers_per_stage - below) * sum(work) + below * work.forward
        for term, work in layer.items()
    }
    terms = dict.fromkeys(BOUND_BY, 0.0)
    terms |= _work_terms(workload, hardware, software, stage)
    if workload.mesh.pipeline > 1:
        terms |= _pipeline_terms(workload, hardware, software, layer, closed_form)
    terms["stacks"] = _stack_seconds(workload, hardware, software)
    terms["host_transfers"] = _host_seconds(workload, layer)
    # Moments come and go with nothing beside them but their own update.
    terms["host_transfers"] += 2 * host_bytes(workload) / MOMENTS_BANDWIDTH
    terms["fsdp_collectives"] = _fsdp_seconds(workload, hardware, software, sum(stage.values()))
    for term, run in workload.forward_only.items():
        terms[term] = _forward_seconds(run, hardware, software)
    terms["data_reduction"] = _reduction_seconds(workload, hardware, software)
    terms["optimizer"] = _optimizer_seconds(workload, hardware, software)
    terms["outside_the_device"] = software.host_seconds
    terms["data_reduction"] += _dense_reduction_seconds(workload, hardware, software)
    doublings = math.log2(workload.mesh.devices)
    terms["stragglers"] = software.straggler_share * doublings * sum(terms.values())
    return StepTime(workload, hardware, software, terms)


def _stack_seconds(workload: Workload, hardware: Hardware, software: Software) -> float:
    """Returns the seconds of copying kept activations into stacks, if the layers run as a loop."""
    if not workload.scans_layers or workload.offloads:
        return 0.0
    layers = workload.layers_per_stage - workload.trained.frozen_layers
    moved = software.stack_passes * layers * kept_bytes(workload)
    return workload.accumulation * memory_seconds(moved, hardware)


def _host_seconds(workload: Workload, layer: Mapping[str, Work]) -> float:
    """Returns the seconds of transfers to the host and back that no layer's work hides."""
    if not workload.offloads:
        return 0.0
    moved = kept_bytes(workload) / HOST_BANDWIDTH
    forward = sum(work.forward for work in layer.values())
    backward = sum(work.backward + work.weight for work in layer.values())
    exposed_seconds = max(0.0, moved - forward) + max(0.0, moved - backward)
    layers = workload.layers_per_stage - workload.trained.frozen_layers
    return workload.accumulation * layers * exposed_seconds


def stage_parameters(workload: Workload, software: Software) -> float:
    """Counts the parameters on a device of the fullest stage, before `data` and `fsdp` split them.

    Whole layers count as split over `tensor`. Experts are left out, see `stage_expert_parameters`.
    memory.resident_elements is the exact count.
    """
    model = workload.model
    tensor = workload.mesh.tensor
    inside = workload.layers_per_stage * shape.layer_parameters(model) / tensor
    outside = shape.outside_parameters(model) / tensor
    if workload.mesh.pipeline == 1:
        return inside + outside
    if software.lockstep:
        return inside + outside / workload.mesh.pipeline
    last_stage = inside - workload.short_ends * shape.layer_parameters(model) / tensor
    return max(inside, last_stage + shape.vocab(model) * model.embed / tensor)


def stage_expert_parameters(workload: Workload) -> float:
    """Counts the parameters of the experts that a device of a stage owns, before `data` and
    `fsdp`.
    """
    mesh = workload.mesh
    layer = shape.expert_parameters(workload.model) / (mesh.expert * mesh.tensor)
    return workload.layers_per_stage * layer


def trained_parameters(workload: Workload, software: Software) -> float:
    """Counts the parameters of a stage that are trained, as `fsdp` splits them."""
    trained = workload.trained
    stage = stage_parameters(workload, software) / workload.dense_ways
    stage += stage_expert_parameters(workload)
    own = trained.share * stage / workload.mesh.fsdp
    adapters = trained.adapter_elements(workload.model, workload.mesh.tensor)
    return own + workload.layers_per_stage * adapters


# Work of a stage


def _adapter_work(workload: Workload, hardware: Hardware, software: Software) -> Work:
    """Returns the work of one layer's adapters, two matmuls each: to the rank, and from it."""
    trained = workload.trained
    seconds = partial(matmul_seconds, hardware=hardware, software=software, dtype=workload.dtype)
    work = NO_WORK
    tokens, embed = workload.tokens, workload.model.embed
    rank = trained.finetune.rank
    for width in trained.adapter_widths(workload.model, workload.mesh.tensor).values():
        wide = math.ceil(width)
        for side in (embed, wide):
            # The three products of a matrix [side, rank], whichever of them is the forward one.
            to_rank, from_rank = seconds(tokens, rank, side), seconds(tokens, side, rank)
            of_weight = seconds(side, rank, tokens)
            work = add_work(
                work, Work((to_rank + from_rank) / 2, (to_rank + from_rank) / 2, of_weight)
            )
    return work


def _work_terms(
    workload: Workload, hardware: Hardware, software: Software, stage: Mapping[str, float]
) -> dict[str, float]:
    """Returns term -> seconds of all microbatches on the slowest stage.

    `stage`: term -> seconds of one microbatch in the layers of the fullest stage.
    """
    microbatches = workload.accumulation
    embedding = _embedding_seconds(workload, hardware, software)
    head = (1 + shape.further_tokens(workload.model)) * _head_seconds(workload, hardware, software)
    joining = shape.further_tokens(workload.model) * _joining_seconds(workload, hardware, software)
    if workload.mesh.pipeline > 1 and not software.lockstep:
        return _slowest_stage(workload, stage, embedding, head, joining)
    terms = {term: microbatches * seconds for term, seconds in stage.items()}
    terms["matmul"] += microbatches * joining
    terms["embedding"] = microbatches * embedding
    terms["head"] = microbatches * head / workload.mesh.pipeline
    if workload.mesh.pipeline > 1:
        one = _vocabulary_collective_seconds(workload, hardware)
        terms["vocabulary_collectives"] = exposed(microbatches * one, software.overlap.vocabulary)
    return terms


def _slowest_stage(
    workload: Workload, stage: Mapping[str, float], embedding: float, head: float, joining: float
) -> dict[str, float]:
    """Returns term -> seconds, with the embedding on the first stage and the head on the last.

    There it also joins the stream with the embeddings of further tokens.
    """
    layers = workload.layers_per_stage - shape.further_tokens(workload.model)
    stage = {term: layers / workload.layers_per_stage * work for term, work in stage.items()}
    first_share = 1 - workload.short_ends / layers
    last_share = workload.layers_of_last_stage / layers
    first = {term: first_share * seconds for term, seconds in stage.items()}
    first |= {"embedding": embedding}
    last = {term: last_share * seconds for term, seconds in stage.items()} | {"head": head}
    last["matmul"] += joining
    stages = [first, last]
    if workload.mesh.pipeline > 2:
        stages = [stage, first, last]
    slowest = max(stages, key=lambda terms: sum(terms.values()))
    return {term: workload.accumulation * seconds for term, seconds in slowest.items()}


def vocabulary_seconds(workload: Workload, hardware: Hardware, software: Software) -> float:
    """Returns the seconds of embedding and head of a microbatch, on all devices of their stage."""
    embedding = _embedding_seconds(workload, hardware, software)
    return embedding + _head_seconds(workload, hardware, software)


def _head_seconds(workload: Workload, hardware: Hardware, software: Software) -> float:
    """Returns the seconds of logits, loss and both gradients of a microbatch, on one stage."""
    tokens = workload.tokens
    embed = workload.model.embed
    vocab = -(-shape.vocab(workload.model) // workload.mesh.tensor)
    dtype = workload.config.precision.matmul if software.narrow_head else workload.dtype
    seconds = partial(matmul_seconds, hardware=hardware, software=software, dtype=dtype)
    matmuls = (
        seconds(tokens, vocab, embed),
        seconds(tokens, embed, vocab),
        workload.trained.of_matrices * seconds(vocab, embed, tokens),
    )
    logits = memory_seconds(_loss_bytes(workload, software, tokens * vocab), hardware)
    tensor_group = workload.mesh.group("tensor")
    input_gradient = all_reduce_seconds(workload.activation_bytes, tensor_group, hardware)
    return sum(matmuls) + logits + input_gradient


def _loss_bytes(workload: Workload, software: Software, logits: int) -> float:
    """Returns the bytes that the loss of `logits` logits moves apart from its matmuls.

    Each chunk reads and writes the float32 gradient of the table.
    """
    if not software.loss_was_timed:
        return sum(LOGIT_BYTES) * logits
    loss = loss_of(workload, workload.mesh.tensor)
    per_logit = TIMED_LOGIT_BYTES[loss.implementation, workload.config.precision.logits]
    table = shape.vocab(workload.model) * workload.model.embed / workload.mesh.tensor
    of_chunks = loss.chunks * 2 * FLOAT32 * table if loss.chunks > 1 else 0.0
    return per_logit * logits + of_chunks


def _forward_seconds(workload: Workload, hardware: Hardware, software: Software) -> float:
    """Returns the seconds of forward passes alone, with the exposed part of their gathers."""
    layers = sum(work.forward for work in layer_time(workload, hardware, software).values())
    layers *= workload.layers_per_stage
    vocab = -(-shape.vocab(workload.model) // workload.mesh.tensor)
    seconds = partial(matmul_seconds, hardware=hardware, software=software, dtype=workload.dtype)
    head = seconds(workload.tokens, vocab, workload.model.embed)
    embedding = _embedding_seconds(workload, hardware, software) / 2  # without its gradient
    # A layer gathers once, not a second time for a backward.
    gathers = _fsdp_seconds(workload, hardware, software, 2 * layers) / 2
    return workload.accumulation * (layers + head + embedding) + gathers


def _joining_seconds(workload: Workload, hardware: Hardware, software: Software) -> float:
    """Returns the seconds of joining the stream with the embeddings of a further token.

    That is a matmul from twice the width of the stream, and both of its gradients.
    """
    tokens, embed = workload.tokens, workload.model.embed
    seconds = partial(matmul_seconds, hardware=hardware, software=software, dtype=workload.dtype)
    one = seconds(tokens, embed, 2 * embed)
    return one + seconds(tokens, 2 * embed, embed) + seconds(embed, 2 * embed, tokens)


def _embedding_seconds(workload: Workload, hardware: Hardware, software: Software) -> float:
    """Counts the look-up and its gradient: six passes over one microbatch's activations."""
    moved = workload.activation_bytes
    passes = software.elementwise_factor * memory_seconds(6 * moved, hardware)
    return passes + all_reduce_seconds(moved, workload.mesh.group("tensor"), hardware)


def _vocabulary_collective_seconds(workload: Workload, hardware: Hardware) -> float:
    """Returns the seconds of the sums over `pipeline` of one microbatch.

    If all stages share the vocabulary, they sum the embedding, give the last activation to all, and
    sum the gradients of both. Each device of `tensor` sums some of the tokens; a whole stream is
    reassembled after all but the first, whose gather counts as the embedding's.
    """
    moved = workload.activation_bytes
    stages = workload.mesh.group("pipeline")
    sums = 4 * all_reduce_seconds(moved / workload.sum_ways, stages, hardware)
    if workload.sum_ways == workload.stream_ways:
        return sums
    return sums + 3 * all_gather_seconds(moved, workload.mesh.group("tensor"), hardware)


# Pipelines


def _pipeline_terms(
    workload: Workload,
    hardware: Hardware,
    software: Software,
    layer: Mapping[str, Work],
    closed_form: bool,
) -> dict[str, float]:
    """Returns term -> seconds that only a pipeline has. `layer`: term -> work of one layer."""
    ways = workload.mesh.tensor if software.sends_split else workload.stream_ways
    sent = workload.activation_bytes / ways
    one_send = send_seconds(sent, workload.mesh.stride("pipeline"), hardware)
    # Blocks of further tokens run with the head, not in a stage's turn.
    layers = workload.layers_per_stage - shape.further_tokens(workload.model)
    times = timing.Times(
        forward=layers * sum(work.forward for work in layer.values()),
        backward=layers * sum(work.backward for work in layer.values()),
        weight=layers * sum(work.weight for work in layer.values()),
        hop=one_send,
    )
    microbatches = workload.accumulation
    waits = _bubble_seconds(workload, times, software, closed_form)
    terms = {"pipeline_bubble": waits, "exchanges": 2 * microbatches * software.host_wait}
    if software.lockstep:
        bubble = _bubble_seconds(workload, replace(times, hop=0.0), software, closed_form)
        return terms | {"pipeline_bubble": bubble, "pipeline_hops": waits - bubble}
    # By order, a split backward hides the sends under weight gradients.
    if not SCHEDULES[workload.schedule].splits_backward:
        sends = 2 * microbatches * workload.chunks
        # Between two chunks a stage has other work; a single one waits for what it needs next.
        hidden = software.overlap.hops if workload.chunks > 1 else 0.0
        terms["pipeline_hops"] = exposed(sends * one_send, hidden)
    return terms


def _bubble_seconds(
    workload: Workload, times: timing.Times, software: Software, closed_form: bool
) -> float:
    """Returns the seconds that the fullest stage waits for work or for sends, by the table of a
    run.

    `times`: of one microbatch. The closed form, also used for tables too large to lay out, assumes
    lockstep; a search ranks all software by it.
    """
    schedule = workload.schedule
    pipeline = pipeline_of(workload)
    if not software.lockstep and not closed_form:
        return SCHEDULES[schedule].order_bubble(pipeline, times)
    table = lay_out(schedule, pipeline, closed_form=closed_form)
    if table is None:
        # A search assumes that software running its own orders hides whatever it can.
        hops = software.overlap.hops if software.lockstep else 1.0
        whole = lockstep_seconds(schedule, pipeline, times, hops)
    else:
        whole = timing.lockstep_time(table, times, software.overlap.hops)
    frozen = pipeline.frozen // pipeline.stages / pipeline.chunks  # of each stage
    work = times.microbatch - frozen * (times.backward + times.weight)
    return whole - pipeline.microbatches * work


# Split and copied parameters, and the optimizer


def _fsdp_seconds(
    workload: Workload, hardware: Hardware, software: Software, stage_seconds: float
) -> float:
    """Returns the seconds of gathering weights split over `fsdp`, and scattering their gradients.

    With a pipeline this happens once per step and overlaps with nothing. Without one it happens for
    each microbatch: the layers' weights are gathered for the forward and for the backward, and
    their gradients are scattered afterwards, during the layers' work (`stage_seconds` per
    microbatch), which is slowed by it. If the share that overlaps is unknown, it is everything but
    the first gather and what lies outside the layers.
    """
    if workload.dense_group.size == 1:
        return 0.0
    gather = partial(all_gather_seconds, hardware=hardware, all_cards=software.all_network_cards)
    dense = partial(gather, group=workload.dense_group)
    experts = partial(gather, group=workload.mesh.group("fsdp"))
    size = workload.compute_bytes
    scatter_cost = (software.scattered_gradient_bytes or size) / size  # scatter / gather
    scatter_cost *= workload.trained.share
    own_experts = stage_expert_parameters(workload) * size
    if workload.mesh.pipeline > 1:
        whole = dense(stage_parameters(workload, software) * size)
        return (1 + scatter_cost) * (whole + _if_any(experts, own_experts))

    layers = workload.layers_per_stage
    layer = shape.layer_parameters(workload.model) / workload.mesh.tensor
    outside = shape.outside_parameters(workload.model) / workload.mesh.tensor
    pieces = software.gathers_per_layer
    once = dense(layers * layer * size, pieces=layers * pieces)
    once += _if_any(experts, own_experts, layers * pieces)
    of_layers = (2 + scatter_cost) * once
    first_layer = dense(layer * size, pieces=pieces)
    first_layer += _if_any(experts, own_experts / layers, pieces)
    alone = first_layer + (1 + scatter_cost) * dense(outside * size)
    moving = of_layers + alone
    beside_work = of_layers
    if software.overlap.fsdp is not None:
        beside_work = software.overlap.fsdp * moving
    # Collectives slow down concurrent work, and slower work hides more of them.
    slowing = 1 - LOST_BESIDE_COLLECTIVES * software.work_beside_gathers
    hidden = min(beside_work, software.work_beside_gathers * stage_seconds / slowing)
    return workload.accumulation * left_over(moving, hidden)


def _if_any(gather: Callable[..., float], moved: float, pieces: int = 1) -> float:
    """Returns the seconds of gathering experts' weights; 0 if there are none."""
    return gather(moved, pieces=pieces) if moved else 0.0


def _dense_reduction_seconds(workload: Workload, hardware: Hardware, software: Software) -> float:
    """Returns the seconds of summing gradients over `expert`, once per step, without experts.

    If `expert` splits these weights, the sum is counted with `fsdp`.
    """
    if workload.mesh.expert == 1 or workload.dense_over_expert:
        return 0.0
    elements = workload.trained.share * stage_parameters(workload, software) / workload.mesh.fsdp
    moved = software.gradient_bytes * elements
    group = workload.mesh.group("expert")
    return exposed(all_reduce_seconds(moved, group, hardware), software.overlap.data)


def _reduction_seconds(workload: Workload, hardware: Hardware, software: Software) -> float:
    """Returns the seconds of summing gradients over `data`, once per step.

    That is a reduce-scatter and an all-gather: of the gradients, or with a distributed optimizer of
    the parameters that it has updated.
    """
    elements = trained_parameters(workload, software)
    all_cards, gathered = software.all_network_cards, software.gathered_parameter_bytes
    sums = data_sums(workload, software.gradient_bytes, gathered)
    seconds = sum(collective.seconds(elements, hardware, all_cards) for collective in sums)
    share = software.overlap.data
    if _sums_during_backward(workload):
        share = max(share, software.written_out_overlap)
    return exposed(seconds, share)


def _sums_during_backward(workload: Workload) -> bool:
    """Returns True if the gradient of a layer may be summed while other layers work.

    A loop has its gradients only at its end, and so do several microbatches.
    """
    is_plain = workload.zero == 0 and workload.sent_gradient_bytes is None
    return is_plain and workload.accumulation == 1 and not workload.scans_layers


def _optimizer_seconds(workload: Workload, hardware: Hardware, software: Software) -> float:
    ways = 1
    if workload.zero or software.gathered_parameter_bytes:
        ways = workload.mesh.data
    # Items are read and written.
    bytes_of_parameter = OPTIMIZER_BYTES + 2 * workload.held_item_bytes
    moved = bytes_of_parameter * trained_parameters(workload, software) / ways
    return memory_seconds(moved, hardware)
