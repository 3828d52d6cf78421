"""Seconds per training step, from sizes and a handful of constants; every term is kept for the breakdown.

A layer's terms are (forward, backward by input, backward by weight) seconds of one microbatch on one device. A
pipeline takes m microbatches of its slowest stage, and a bubble: our own executor ticks in lockstep, as its schedule
table says, and shares the head over the stages; other frameworks' stages run their own orders, head on the last.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from spmdtrain.parallel.pipeline import schedule, timing
from spmdtrain.parallel.pipeline.choose import choose_table
from spmdtrain.planner.flops import model_flops_per_token
from spmdtrain.planner.hardware import Hardware
from spmdtrain.planner.job import Job
from spmdtrain.planner.kernels import all_reduce, fused_attention, gather, hop, matmul, memory_pass
from spmdtrain.planner.stack import BESIDE, Stack

Work = tuple[float, float, float]  # forward, backward by input, backward by weight
OPTIMIZER_BYTES = 30  # per parameter: gradient, weight and two moments read, three written, and the compute copy
LOGIT_BYTES = (18, 14)  # per logit in forward and backward: float32, its maximum, its sum, the gradient's copies
HALVES = ("attention", "mlp")  # of a layer
MOST_CELLS = 40_000  # ticks x stages of a schedule that is laid out to price it; larger ones follow its formula
BOUND: Mapping[str, str] = {
    "matmul": "compute",
    "attention": "compute",
    "elementwise": "memory",
    "recompute": "compute",
    "head": "compute",
    "embedding": "memory",
    "tensor_collectives": "network",
    "context_collectives": "network",
    "pipeline_bubble": "idle",
    "pipeline_hops": "network",
    "exchanges": "host",
    "vocabulary_collectives": "network",
    "fsdp_collectives": "network",
    "data_reduction": "network",
    "optimizer": "memory",
    "outside_the_device": "host",
    "stragglers": "network",
}


@dataclass(frozen=True)
class Price:
    """What a step costs. `seconds`: term -> seconds, all of them exposed; `bound`: term -> what limits it."""

    job: Job
    device: Hardware
    stack: Stack
    seconds: Mapping[str, float]
    scale: float = 1.0  # measured / predicted of a run that the prediction was anchored on

    @property
    def step(self) -> float:
        return self.scale * sum(self.seconds.values())

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.job.tokens_per_step / self.step / self.job.layout.devices

    @property
    def model_flops_per_device(self) -> float:
        """FLOP/s that count: forward and backward once, causal attention."""
        return model_flops_per_token(self.job.shape, self.job.sequence) * self.tokens_per_second_per_device

    @property
    def mfu(self) -> float:
        """Of the data sheet's peak, whatever the power limit."""
        full = replace(self.device, power_limit=0.0)
        return self.model_flops_per_device / full.peak(self.job.dtype)

    @property
    def bubble_fraction(self) -> float:
        return self.seconds["pipeline_bubble"] / sum(self.seconds.values())

    def bound(self, term: str) -> str:
        if term == "attention" and not self.stack.flash:
            return "memory"
        return BOUND[term]

    def worst(self, limit: str) -> float:
        """Share of the step in terms bound by `limit`."""
        return sum(s for term, s in self.seconds.items() if self.bound(term) == limit) / sum(self.seconds.values())


def price(job: Job, device: Hardware, stack: Stack, bubble: Callable[..., float] | None = None) -> Price:
    """The step of `job`. `bubble(job, layers, hop)`: seconds in which the fullest stage waits; default: by the table
    of our executor, or by the stages' orders."""
    layers, layer = job.layers_per_stage, layer_work(job, device, stack)
    m, p, t = job.accumulation, job.layout.pipeline, job.layout.tensor
    stage = {term: layers * sum(work) for term, work in layer.items()}
    embed, head = _embedding(job, device, stack), _head(job, device, stack)
    seconds = dict.fromkeys(BOUND, 0.0)
    if p == 1:
        spent = {term: m * s for term, s in stage.items()} | {"head": m * head, "embedding": m * embed}
    elif stack.lockstep:
        share = {"head": m * head / p, "embedding": m * embed}
        spent = {term: m * s for term, s in stage.items()} | share
        spent["vocabulary_collectives"] = m * _vocabulary(job, device)
    else:
        spent = _slowest(stage, embed, head, job, m)
    seconds |= spent
    if p > 1:
        carried = job.tokens * job.shape.embed * _size(job) / (t if stack.scatter_hops else 1)
        one_hop = hop(carried, job.layout.stride("pipeline"), device)
        times = timing.Times(*(layers * sum(work[i] for work in layer.values()) for i in range(3)), hop=one_hop)
        seconds["pipeline_bubble"] = (bubble or _bubble)(job, times, stack)
        if not stack.lockstep and not job.schedule.startswith("zero_bubble"):  # those put weight gradients beside hops
            seconds["pipeline_hops"] = 2 * m * job.chunks * one_hop * (1 - stack.hop_overlap)
        seconds["exchanges"] = 2 * m * stack.exchange
    seconds["fsdp_collectives"] = _fsdp(job, device, stack, sum(stage.values()))
    seconds["data_reduction"] = _reduction(job, device, stack)
    share = job.layout.fsdp * (job.layout.data if job.zero or stack.gathered_bytes else 1)
    seconds["optimizer"] = memory_pass(OPTIMIZER_BYTES * local_parameters(job, stack) / share, device)
    seconds["outside_the_device"] = stack.step
    seconds["stragglers"] = stack.gap * math.log2(job.layout.devices) * sum(seconds.values())
    return Price(job, device, stack, seconds)


def _size(job: Job) -> int:
    return 4 if job.dtype == "float32" else 2


def local_parameters(job: Job, stack: Stack) -> float:
    """On the fullest stage, whole over data and fsdp."""
    shape, layout = job.shape, job.layout
    inside = job.layers_per_stage * shape.layer_parameters / layout.tensor
    outside = shape.outside / layout.tensor
    if layout.pipeline == 1:
        return inside + outside
    if stack.lockstep:
        return inside + outside / layout.pipeline
    ends = inside - job.short_ends * shape.layer_parameters / layout.tensor
    return max(inside, ends + shape.vocab * shape.embed / layout.tensor)


# One layer


def layer_work(job: Job, device: Hardware, stack: Stack) -> dict[str, Work]:
    """Term -> work of one layer and microbatch on one device."""
    return _layer(*_layer_key(job), device, stack)


def _layer_key(job: Job) -> tuple:
    layout = job.layout
    context = (layout.context, layout.stride("context"))
    parallel = (layout.tensor, context, job.sequence_parallel)
    return job.shape, (job.microbatch, job.sequence), parallel, job.remat, job.dtype


@lru_cache(maxsize=50_000)
def _layer(shape, batch, parallel, remat, dtype, device: Hardware, stack: Stack) -> dict[str, Work]:
    halves = [_half(kind, shape, batch, parallel, remat, dtype, device, stack) for kind in HALVES]
    return {term: tuple(map(sum, zip(*(half[term] for half in halves), strict=True))) for term in halves[0]}


def half_work(kind: str, job: Job, device: Hardware, stack: Stack, tensor: int) -> dict[str, Work]:
    """Term -> work of the "attention" or the "mlp" of a layer, norm and residual included, split `tensor` ways."""
    shape, batch, (_, *rest), *more = _layer_key(job)
    return _half(kind, shape, batch, (tensor, *rest), *more, device, stack)


@lru_cache(maxsize=50_000)
def _half(kind, shape, batch, parallel, remat, dtype, device: Hardware, stack: Stack) -> dict[str, Work]:
    (microbatch, sequence), (tensor, (context, context_stride), split_tokens) = batch, parallel
    size, tokens, e = 4 if dtype == "float32" else 2, microbatch * sequence // context, shape.embed
    each = tokens * size / tensor  # bytes of one column that is split

    def matrix(columns: int, inner: int) -> Work:
        run = lambda *sizes: matmul(*sizes, device, stack, dtype)  # noqa: E731
        return run(tokens, columns, inner), run(tokens, inner, columns), run(inner, columns, tokens)

    if kind == "attention":
        matrices = matrix(shape.qkv_width // tensor, e), matrix(e, shape.attention_width // tensor)
        attention = _attention(shape, microbatch, sequence, tensor, context, dtype, device, stack)
        forward, backward = 2 * shape.qkv_width * each, 5 / 3 * shape.qkv_width * each
        keys = 2 * microbatch * sequence * shape.kv_heads * shape.head_dim * size / min(tensor, shape.kv_heads)
        ring = gather(keys, context, context_stride, device) * (1 - stack.tensor_overlap)
    else:
        matrices = matrix(shape.up_width // tensor, e), matrix(e, shape.hidden // tensor)
        attention, ring = (0.0, 0.0, 0.0), 0.0
        ahead, back = (3, 5) if shape.gated else (2, 3)
        forward, backward = ahead * shape.hidden * each, back * shape.hidden * each

    whole = tokens * e * size / (tensor if split_tokens else 1)  # norm and residual, with dropout's mask
    forward += (5.5 if shape.dropout else 5) * whole
    backward += (6.5 if shape.dropout else 6) * whole
    summed = all_reduce(tokens * e * size, tensor, 1, device) * (1 - stack.tensor_overlap)
    work = {
        "matmul": tuple(map(sum, zip(*matrices, strict=True))),
        "attention": attention,
        "elementwise": (*(stack.passes * memory_pass(moved, device) for moved in (forward, backward)), 0.0),
        "tensor_collectives": (summed, summed, 0.0),
        "context_collectives": (ring, 2 * ring, 0.0),
    }
    again = {
        "none": 0.0,
        "dots": work["elementwise"][0],
        "matmuls": work["elementwise"][0] + work["attention"][0],
        "attention": work["attention"][0],
        "half": work["elementwise"][0] + work["matmul"][0] / 2,
        "full": sum(done[0] for done in work.values()),
    }[remat]
    return work | {"recompute": (0.0, again, 0.0)}


def _attention(shape, microbatch, sequence, tensor, context, dtype, device: Hardware, stack: Stack) -> Work:
    heads, queries = max(1, shape.heads // tensor), sequence // context
    if stack.flash:
        flops = 2 * microbatch * heads * shape.head_dim * queries * sequence  # causal: half of 4 b h d s^2
        run = lambda factor: fused_attention(factor * flops, sequence, shape.head_dim, device, stack, dtype)  # noqa: E731
        return run(1.0), run(2.5), 0.0
    count = microbatch * heads
    one = matmul(queries, sequence, shape.head_dim, device, stack, dtype, count)
    other = matmul(queries, shape.head_dim, sequence, device, stack, dtype, count)
    entries = count * queries * sequence * stack.score_bytes * stack.scores
    forward = memory_pass((6.5 if shape.dropout else 4.0) * entries, device)
    backward = memory_pass((5.5 if shape.dropout else 4.0) * entries, device)
    return one + other + forward, 2 * (one + other) + backward, 0.0


# Around the layers


def vocabulary_work(job: Job, device: Hardware, stack: Stack) -> float:
    """Seconds of the embedding and the head of one microbatch, on all of their stage."""
    return _embedding(job, device, stack) + _head(job, device, stack)


def _head(job: Job, device: Hardware, stack: Stack) -> float:
    """Of one microbatch, on all of its stage: logits, loss, both gradients."""
    shape, tokens, t = job.shape, job.tokens, job.layout.tensor
    vocab = -(-shape.vocab // t)
    run = lambda *sizes: matmul(*sizes, device, stack, job.dtype)  # noqa: E731
    matrices = run(tokens, vocab, shape.embed), run(tokens, shape.embed, vocab), run(vocab, shape.embed, tokens)
    logits = memory_pass(sum(LOGIT_BYTES) * tokens * vocab, device)
    return sum(matrices) + logits + all_reduce(tokens * shape.embed * _size(job), t, 1, device)


def _embedding(job: Job, device: Hardware, stack: Stack) -> float:
    moved = job.tokens * job.shape.embed * _size(job)
    return stack.passes * memory_pass(6 * moved, device) + all_reduce(moved, job.layout.tensor, 1, device)


def _vocabulary(job: Job, device: Hardware) -> float:
    """Of one microbatch: the sums over `pipeline` of its embedding, its last activation and that one's gradient."""
    moved = job.tokens * job.shape.embed * _size(job)
    return 3 * all_reduce(moved, job.layout.pipeline, job.layout.stride("pipeline"), device)


def _slowest(stage: dict[str, float], embed: float, head: float, job: Job, m: int) -> dict[str, float]:
    """Term -> seconds of the slowest stage of a pipeline with the embedding on the first and the head on the last."""
    kept = 1 - job.short_ends / job.layers_per_stage
    ends = {term: kept * s for term, s in stage.items()}
    stages = [stage] if job.layout.pipeline > 2 else []
    stages += [ends | {"embedding": embed}, ends | {"head": head}]
    return {term: m * s for term, s in max(stages, key=lambda each: sum(each.values())).items()}


def _fsdp(job: Job, device: Hardware, stack: Stack, stage: float) -> float:
    """Weights split over `fsdp`. With a pipeline gathered and their gradients scattered once per step, beside nothing.
    Else for each microbatch: those of the layers gathered for its forward and backward and scattered after it, beside
    the layers' work, which they slow; the first gather and the last scatter, of what is outside the layers, beside
    nothing."""
    layout, shape = job.layout, job.shape
    if layout.fsdp == 1:
        return 0.0
    ring = lambda elements, pieces: gather(  # noqa: E731
        elements * _size(job), layout.fsdp, layout.stride("fsdp"), device, stack.rings, pieces
    )
    back = (stack.scattered_bytes or _size(job)) / _size(job)
    layers, outside = job.layers_per_stage, shape.outside / layout.tensor
    if layout.pipeline > 1:
        return (1 + back) * ring(local_parameters(job, stack), 1)
    layer = shape.layer_parameters / layout.tensor
    running = (2 + back) * ring(layers * layer, layers * stack.pieces)
    hidden = min(running, stack.fsdp_overlap * stage / (1 - BESIDE * stack.fsdp_overlap))
    ends = ring(layer, stack.pieces) + (1 + back) * ring(outside, 1)
    return job.accumulation * (ends + running - hidden + BESIDE * hidden)


def _reduction(job: Job, device: Hardware, stack: Stack) -> float:
    """Gradients over `data`, once per step."""
    layout = job.layout
    local = local_parameters(job, stack) / layout.fsdp
    ring = lambda moved: gather(moved, layout.data, layout.stride("data"), device, stack.rings)  # noqa: E731
    back = stack.gathered_bytes or stack.gradient_bytes
    both = ring(stack.gradient_bytes * local) + ring(back * local)
    return both * (1 - stack.data_overlap)


# Pipelines


def _bubble(job: Job, times: timing.Times, stack: Stack) -> float:
    """Seconds in which the fullest stage waits for others."""
    m, p, v = job.accumulation, job.layout.pipeline, job.chunks
    if not stack.lockstep:
        return order_bubble(job.schedule, p, v, times)
    if job.schedule in schedule.KINDS and m * v * p > MOST_CELLS:
        return lockstep_time(job.schedule, p, m, v, times) - m * times.microbatch
    return timing.lockstep_time(choose_table(job.schedule, p, v, m), times) - m * times.microbatch


def closed_bubble(job: Job, times: timing.Times, stack: Stack) -> float:  # noqa: ARG001  (as `price` calls it)
    """The same in closed form, of the schedules that have names: what a search asks thousands of times."""
    m = job.accumulation
    return lockstep_time(job.schedule, job.layout.pipeline, m, job.chunks, times) - m * times.microbatch


def lockstep_time(kind: str, p: int, m: int, v: int, times: timing.Times) -> float:
    """What `timing.lockstep_time` gives for the table of that name, from the ticks at which each kind of work begins
    and ends; a search cannot lay out thousands of tables. Tested to be equal."""
    n, split = m * v, kind == "zero_bubble"
    starts = {"gpipe": (0, m + p - 1, 0)}.get(kind, (0, v * p - 1, v * p + p - 2))
    tick = np.arange(starts[1] + n + p - 1)
    runs = (tick < n + p - 1, tick >= starts[1], (tick >= starts[2]) & split)
    f = times.forward / v * runs[0]
    b = (times.backward + (0.0 if split else times.weight)) / v * runs[1]
    w = times.weight / v * runs[2]
    sent = (tick < n + p - 2, runs[1] & (tick < tick[-1]))
    beside = (b + w, w + np.append(f[1:], 0.0))
    exposed = sum(there * np.maximum(0.0, times.hop - other) for there, other in zip(sent, beside, strict=True))
    return float((f + b + w + exposed).sum())


def order_bubble(kind: str, p: int, v: int, times: timing.Times) -> float:
    """Waiting of the middle stages where each goes through its own order: Megatron-LM's (1f1b, interleaved), ZB-H1
    (zero_bubble) and ZB-H2 with its optimised order (zero_bubble_2p). Qi et al., arXiv 2401.10241, tables 2 and 5."""
    f, b, w, one_hop = times.forward, times.backward, times.weight, times.hop
    if kind == "zero_bubble":
        return (p - 1) * (f + b - w + 4 * one_hop)
    if kind == "zero_bubble_2p":
        return (p - 1) * one_hop
    return (p - 1) * ((f + b + w) / v + 2 * one_hop)
