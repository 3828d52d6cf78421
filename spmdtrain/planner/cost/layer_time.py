"""Estimates the seconds of one transformer layer: each term of one microbatch on one device.

A layer has two halves, attention and MLP. Each half is two matmuls, its elementwise passes (norm,
residual, activation function), its collectives and what the backward recomputes. A half can be
estimated alone, because `plan --rules` splits the two in different ways.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.mixer_sizes import MixerSizes, chunk_of
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.collective_time import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    members_on_a_host,
    relayed_seconds,
)
from spmdtrain.planner.cost.experts import BACKWARD_EXCHANGES, FORWARD_EXCHANGES, Dispatch
from spmdtrain.planner.cost.hardware import Hardware
from spmdtrain.planner.cost.kernel_time import (
    fused_attention_seconds,
    matmul_seconds,
    memory_seconds,
)
from spmdtrain.planner.cost.memory import FLOAT32
from spmdtrain.planner.cost.overlap import exposed, left_over
from spmdtrain.planner.cost.software import LAUNCH_SECONDS, Software
from spmdtrain.planner.cost.workload import Group, Workload, bytes_of, pieces_of


class Work(NamedTuple):
    """The seconds of one microbatch on one device."""

    forward: float
    backward: float  # the gradient of the input
    weight: float  # the gradient of the weights


NO_WORK = Work(0.0, 0.0, 0.0)
# Per layer.
TERMS = (
    "matmul",
    "attention",
    "elementwise",
    "tensor_collectives",
    "context_collectives",
    "expert_exchange",
    "recompute",
)
FORWARD_KERNELS = 1 / 3  # of those of a layer, as of its matmuls
TILE = 128  # channels of the heads of published recurrences, whose products are of such tiles
# The kernels of a chunk of a recurrence, forward and backward, with its share of those of a block:
# counted in the compiled step of Qwen3.5 27B for H200s (jax 0.12).
CHUNK_KERNELS = (8, 27)
ROUTER_PASSES = 6  # over a router's float32 scores: softmax, choice, counts and side losses


def add_work(*parts: Work) -> Work:
    return Work(*map(sum, zip(*parts, strict=True)))


def scale_work(share: float, work: Work) -> Work:
    return Work(*(share * seconds for seconds in work))


@dataclass(frozen=True)
class LayerSizes:
    """The part of a workload on which one layer's time depends: the key of the cache.

    A search tries many workloads, but few different layers.
    """

    model: TransformerConfig
    microbatch: int
    sequence_length: int
    tensor: int
    context: Group
    context_method: str
    sequence_parallel: bool
    collective_matmul: bool
    remat: str
    dtype: str
    matmul: str
    exchange: Group  # of the devices that own the experts
    experts_over_tensor: bool

    @property
    def tokens(self) -> int:
        return self.microbatch * self.sequence_length // self.context.size

    @property
    def pieces(self) -> int:
        """The pieces of a sequence over `context`: a ring gives each device two, side by side."""
        return pieces_of(self.context_method, self.context.size)

    @property
    def finds_maps(self) -> bool:
        """True if devices have pieces of a sequence, and each finds what its own do to a state."""
        return self.context.size > 1 and self.context_method != "ulysses"

    @property
    def activation_bytes(self) -> int:
        return self.tokens * self.model.embed * bytes_of(self.dtype)


def layer_time(workload: Workload, hardware: Hardware, software: Software) -> Mapping[str, Work]:
    """Returns term -> work of one layer."""
    return _layer_time(_layer_sizes(workload, workload.mesh.tensor), hardware, software)


def half_time(
    half: str, workload: Workload, hardware: Hardware, software: Software, tensor: int
) -> Mapping[str, Work]:
    """Returns term -> work of the "attention" or "mlp" half of a layer, split `tensor` ways."""
    return _half_time(half, _layer_sizes(workload, tensor), hardware, software)


def _layer_sizes(workload: Workload, tensor: int) -> LayerSizes:
    return LayerSizes(
        model=workload.model,
        microbatch=workload.microbatch,
        sequence_length=workload.train.sequence_length,
        tensor=tensor,
        context=workload.mesh.group("context"),
        context_method=workload.context_method,
        sequence_parallel=workload.sequence_parallel,
        collective_matmul=workload.collective_matmul,
        remat=workload.remat,
        dtype=workload.dtype,
        matmul=workload.config.precision.matmul,
        exchange=workload.exchange_group,
        experts_over_tensor=workload.experts_over_tensor,
    )


@lru_cache(maxsize=50_000)
def _layer_time(sizes: LayerSizes, hardware: Hardware, software: Software) -> Mapping[str, Work]:
    attention = _half_time("attention", sizes, hardware, software)
    mlp = _half_time("mlp", sizes, hardware, software)
    layer = {term: add_work(attention[term], mlp[term]) for term in attention}
    waits = add_work(_launch_wait(sizes, layer, software), _chunk_wait(sizes, hardware, software))
    return layer | {"launches": waits}


def _launch_wait(sizes: LayerSizes, layer: Mapping[str, Work], software: Software) -> Work:
    """Returns the seconds for which a device waits for its host to launch a layer's kernels.

    Both run concurrently, and the slower one sets the pace: the host cannot run ahead to the next
    layer, since it reads from the device how many rows each expert gets.
    """
    if sizes.model.experts is None:
        return NO_WORK
    kernels = software.layer_kernels + _expert_kernels(sizes, software)
    seconds = shape.expert_share(sizes.model) * kernels * software.launch_wait
    beside = add_work(*layer.values()) if software.launches_ahead else NO_WORK
    return Work(
        forward=max(0.0, FORWARD_KERNELS * seconds - beside.forward),
        backward=max(0.0, (1 - FORWARD_KERNELS) * seconds - beside.backward - beside.weight),
        weight=0.0,
    )


def _expert_kernels(sizes: LayerSizes, software: Software) -> int:
    """Returns the number of kernels of a device's experts, if each has its own."""
    assert sizes.model.experts is not None, "a model with experts"
    is_narrow = sizes.matmul != "compute" and software.narrow_experts
    kernels = software.expert_kernels + is_narrow * software.narrow_kernels
    return kernels * max(1, sizes.model.experts.count // sizes.exchange.size)


class _Half(NamedTuple):
    """The parts in which the halves differ; bytes are those of the elementwise passes."""

    matmul: Work
    attention: Work
    forward_bytes: float
    backward_bytes: float
    context: Work  # seconds in which keys and values, or heads, move over `context`


@lru_cache(maxsize=50_000)
def _half_time(
    half: str, sizes: LayerSizes, hardware: Hardware, software: Software
) -> Mapping[str, Work]:
    """Returns term -> work of a half: the mean over the layers."""
    model = sizes.model
    shares = shape.mixer_shares(model) if half == "attention" else shape.mlp_shares(model)
    works = [
        (share, _dense_half_time(half, replace(sizes, model=alike), hardware, software))
        for share, alike in shares
    ]
    if half == "mlp" and model.experts is not None:
        works.append((shape.expert_share(model), _expert_time(sizes, hardware, software)))
    return works[0][1] if len(works) == 1 and works[0][0] == 1 else _mean_work(works)


def _mean_work(parts: Iterable[tuple[float, Mapping[str, Work]]]) -> Mapping[str, Work]:
    """Returns term -> work of parts, each (its share, its work)."""
    parts = list(parts)
    return {
        term: add_work(*(scale_work(share, work[term]) for share, work in parts if term in work))
        for term in TERMS
    }


def _dense_half_time(
    half: str, sizes: LayerSizes, hardware: Hardware, software: Software
) -> Mapping[str, Work]:
    parts = _attention_half if half == "attention" else _mlp_half
    own = parts(sizes, hardware, software)

    # The norm and the residual, with dropout's mask. They are whole on every device of `tensor`
    # unless the tokens are split (sequence parallelism).
    norm_bytes = sizes.activation_bytes
    if sizes.sequence_parallel:
        norm_bytes = norm_bytes / sizes.tensor
    forward_bytes = own.forward_bytes + (5.5 if sizes.model.dropout else 5) * norm_bytes
    backward_bytes = own.backward_bytes + (6.5 if sizes.model.dropout else 6) * norm_bytes
    # A further norm reads and writes; its backward reads its input and a gradient and writes one.
    more_norms = shape.norms_of_part(sizes.model) - 1
    forward_bytes += 2 * more_norms * norm_bytes
    backward_bytes += 3 * more_norms * norm_bytes

    work = {
        "matmul": own.matmul,
        "attention": own.attention,
        "elementwise": Work(
            software.elementwise_factor * memory_seconds(forward_bytes, hardware),
            software.elementwise_factor * memory_seconds(backward_bytes, hardware),
            0.0,
        ),
        "tensor_collectives": _tensor_collectives(sizes, own.matmul, hardware, software),
        "context_collectives": own.context,
        "expert_exchange": NO_WORK,
    }
    again = _recomputation(sizes.remat, work)
    if "norms" in software.again:
        again += software.elementwise_factor * memory_seconds(2 * norm_bytes, hardware)
    if half == "attention" and "latents" in software.again:
        again += _latents_again(sizes, hardware, software)
    return work | {"recompute": Work(0.0, again, 0.0)}


def _tensor_collectives(
    sizes: LayerSizes, matmul: Work, hardware: Hardware, software: Software
) -> Work:
    """Returns the seconds of the sums over `tensor` that the half's own `matmul` leaves exposed."""
    if matmul == NO_WORK:
        return NO_WORK
    group = Group(sizes.tensor, 1)
    one_sum = all_reduce_seconds(sizes.activation_bytes, group, hardware)
    if not sizes.collective_matmul:
        alone = exposed(one_sum, software.overlap.tensor)
        return Work(alone, alone, 0.0)

    def in_pieces(moving: float, matmul: float) -> float:
        # One piece is local from the start: no transfer overlaps with its matmul.
        beside = (sizes.tensor - 1) / sizes.tensor * matmul
        return left_over(moving, min(software.overlap.collective_matmul * moving, beside))

    # For the gradient of the weights the input's tokens are gathered again: half a sum.
    return Work(in_pieces(one_sum, matmul.forward), in_pieces(1.5 * one_sum, matmul.backward), 0.0)


def _recomputation(remat: str, work: Mapping[str, Work]) -> float:
    """Returns the seconds of forward that the backward repeats; `Workload` explains the names."""
    elementwise = work["elementwise"].forward
    attention = work["attention"].forward
    if remat == "full":
        return sum(term_work.forward for term_work in work.values())
    return {
        "none": 0.0,
        "dots": elementwise,
        "matmuls": elementwise + attention,
        "attention": attention,
        "half": elementwise + work["matmul"].forward / 2,
    }[remat]


def _latents_again(sizes: LayerSizes, hardware: Hardware, software: Software) -> float:
    """Returns the seconds of computing queries, keys and values from their latents again."""
    model = sizes.model
    if model.latent is None or shape.linear_mixer(model):
        return 0.0
    matmuls = sum(
        _matmul_work(sizes, columns // sizes.tensor, rows, hardware, software).forward
        for columns, rows, splits in shape.qkv_matmuls(model)
        if splits
    )
    passes = 2 * (shape.qkv_width(model) / sizes.tensor + shape.latent_norm_width(model))
    moved = passes * sizes.tokens * bytes_of(sizes.dtype)
    return matmuls + software.elementwise_factor * memory_seconds(moved, hardware)


def _attention_half(sizes: LayerSizes, hardware: Hardware, software: Software) -> _Half:
    model = sizes.model
    tensor = sizes.tensor
    qkv = add_work(
        *(
            _matmul_work(sizes, columns // (tensor if splits else 1), rows, hardware, software)
            for columns, rows, splits in shape.qkv_matmuls(model)
        )
    )
    projection = _matmul_work(
        sizes, model.embed, shape.attention_width(model) // tensor, hardware, software
    )

    column_bytes = sizes.tokens * bytes_of(sizes.dtype) / tensor  # of a column split over `tensor`
    if mixer := shape.linear_mixer(model):
        # The convolution and its activation, the unit length of queries and keys, the gate.
        columns = shape.qkv_width(model) + shape.attention_width(model)
        return _Half(
            matmul=add_work(qkv, projection),
            attention=_recurrence_work(sizes, mixer, hardware, software),
            forward_bytes=2 * columns * column_bytes,
            backward_bytes=4 * columns * column_bytes,
            context=_state_collectives(sizes, mixer, hardware, software),
        )
    attention = _attention_work(sizes, hardware, software)
    # Norms of queries and keys are one pass more over them, and so are those of latents, which no
    # axis splits.
    normed = 0 if model.query_norm == "none" else shape.query_key_width(model)
    if model.latent:
        normed += shape.latent_norm_width(model) * tensor
    return _Half(
        matmul=add_work(qkv, projection),
        attention=attention,
        forward_bytes=2 * (shape.qkv_width(model) + normed) * column_bytes,
        backward_bytes=(5 / 3 * shape.qkv_width(model) + 3 * normed) * column_bytes,
        context=_context_collectives(sizes, attention, hardware, software),
    )


def _recurrence_work(
    sizes: LayerSizes, mixer: MixerSizes, hardware: Hardware, software: Software
) -> Work:
    """Returns the seconds of a recurrence in chunks, as XLA runs it.

    Its products are small, and what lies between them goes through memory: about six times the
    width of its inputs and outputs, in float32. The backward computes the forward again. Where
    devices have pieces of a sequence, each first finds what its own does to the state. Nothing of
    this was measured on a GPU.
    """
    chunk = chunk_of(sizes.sequence_length)
    of_token = mixer.flops(chunk) + (mixer.map_flops(chunk) if sizes.finds_maps else 0.0)
    if not of_token:
        return NO_WORK
    flops = sizes.tokens * of_token / sizes.tensor
    products = matmul_seconds(
        chunk,
        TILE,
        TILE,
        hardware=hardware,
        software=software,
        dtype=sizes.dtype,
        count=max(1, round(flops / (2 * chunk * TILE**2))),
    )
    passes = 2 if sizes.finds_maps else 1
    moved = 6 * FLOAT32 * (mixer.mixed + mixer.width) / sizes.tensor * sizes.tokens
    forward = products + memory_seconds(passes * moved, hardware)
    return Work(forward=forward, backward=3 * forward, weight=0.0)


def _chunk_wait(sizes: LayerSizes, hardware: Hardware, software: Software) -> Work:
    """Returns the seconds for which a device waits for the kernels of recurrences, the mean over
    the layers: XLA starts them one by one, chunk after chunk, however small they are.
    """
    shares = shape.mixer_shares(sizes.model)
    waits = [
        scale_work(share, _wait_of_recurrence(replace(sizes, model=alike), hardware, software))
        for share, alike in shares
    ]
    return add_work(NO_WORK, *waits)


def _wait_of_recurrence(sizes: LayerSizes, hardware: Hardware, software: Software) -> Work:
    mixer = shape.linear_mixer(sizes.model)
    if mixer is None or not mixer.map_bytes:
        return NO_WORK
    work = _recurrence_work(sizes, mixer, hardware, software)
    of_piece = sizes.sequence_length / (sizes.pieces if sizes.finds_maps else 1)
    chunks = (2 if sizes.finds_maps else 1) * of_piece / chunk_of(sizes.sequence_length)
    forward, backward = (
        max(0.0, chunks * kernels * LAUNCH_SECONDS - seconds)
        for kernels, seconds in zip(CHUNK_KERNELS, work, strict=False)
    )
    again = forward if sizes.remat == "full" else 0.0
    return Work(forward=forward, backward=backward + again, weight=0.0)


def _state_collectives(
    sizes: LayerSizes, mixer: MixerSizes, hardware: Hardware, software: Software
) -> Work:
    """Returns the seconds in which maps of the state, or heads, move over `context`.

    The maps of all pieces are gathered; the backward gathers them again and scatters their
    gradients. Ulysses exchanges inputs and outputs, each way once.
    """
    if sizes.context_method == "ulysses":
        columns = (mixer.mixed + 2 * mixer.width) / sizes.tensor  # also gates
        moved = sizes.tokens * columns * bytes_of(sizes.dtype)
        sent = (sizes.context.size - 1) / sizes.context.size * moved
        once = all_to_all_seconds(sent, sizes.context, hardware)
        one_way = exposed(once, software.overlap.context)
        return Work(one_way, one_way, 0.0)
    maps = sizes.microbatch * sizes.pieces * mixer.map_bytes / sizes.tensor
    gather = exposed(all_gather_seconds(maps, sizes.context, hardware), software.overlap.context)
    return Work(gather, 2 * gather, 0.0)


def _context_collectives(
    sizes: LayerSizes, attention: Work, hardware: Hardware, software: Software
) -> Work:
    """Returns the seconds of keys, values and their gradients on their way over `context`.

    A gather moves the bytes of n - 1 hops of a ring. The backward of a gather gathers again and
    scatters the gradients; that of a ring sends keys again, and gradients in float32. Ulysses
    exchanges queries, keys, values and outputs instead, each way once.
    """
    model = sizes.model
    tokens = sizes.microbatch * sizes.sequence_length  # over all of `context`
    head_bytes = tokens * shape.mean_dim(model) * bytes_of(sizes.dtype)
    kv_heads = max(1, model.kv_heads // sizes.tensor)
    moving = all_gather_seconds(2 * kv_heads * head_bytes, sizes.context, hardware)
    if sizes.context_method == "ring":
        ways = sizes.context.size

        def beside(seconds: float, work: float) -> float:
            # A device's own tokens overlap with the first hop, and the last hop's work with none.
            return left_over(seconds, min(seconds, (ways - 1) / ways * work))

        backward = (1 + 2 * FLOAT32 / (2 * bytes_of(sizes.dtype))) * moving
        return Work(beside(moving, attention.forward), beside(backward, attention.backward), 0.0)
    share = software.overlap.context
    if sizes.context_method == "ulysses":
        heads = 2 * max(1, model.heads // sizes.tensor) + 2 * kv_heads
        whole = heads * head_bytes / sizes.context.size
        one_way = exposed(all_gather_seconds(whole, sizes.context, hardware), share)
        return Work(one_way, one_way, 0.0)
    gather = exposed(moving, share)
    return Work(gather, 2 * gather, 0.0)


def _mlp_half(sizes: LayerSizes, hardware: Hardware, software: Software) -> _Half:
    model = sizes.model
    tensor = sizes.tensor
    if not model.ffn:  # the mlp next to experts, none of which are shared
        return _Half(NO_WORK, NO_WORK, 0.0, 0.0, NO_WORK)
    up = _matmul_work(sizes, shape.up_width(model) // tensor, model.embed, hardware, software)
    down = _matmul_work(sizes, model.embed, model.ffn // tensor, hardware, software)

    # Columns that the activation function reads and writes.
    forward_columns, backward_columns = (3, 5) if model.is_gated else (2, 3)
    column_bytes = sizes.tokens * bytes_of(sizes.dtype) / tensor
    return _Half(
        matmul=add_work(up, down),
        attention=NO_WORK,
        forward_bytes=forward_columns * model.ffn * column_bytes,
        backward_bytes=backward_columns * model.ffn * column_bytes,
        context=NO_WORK,
    )


def _expert_time(sizes: LayerSizes, hardware: Hardware, software: Software) -> Mapping[str, Work]:
    """Returns term -> work of the router and the experts of a layer that has them."""
    experts = sizes.model.experts
    assert experts is not None, "a model with experts"
    slices = sizes.tensor if sizes.experts_over_tensor else 1
    tokens = -(-sizes.tokens // slices)
    dispatch = Dispatch(experts, tokens, sizes.exchange.size, software.expert_imbalance)
    once = _exchange_seconds(sizes, dispatch, hardware, software)
    about_rows = _in_rounds(dispatch.routing_bytes / 2, dispatch, sizes, hardware)
    once, about_rows = (exposed(seconds, software.overlap.expert) for seconds in (once, about_rows))
    back = FORWARD_EXCHANGES if software.keeps_dispatched else BACKWARD_EXCHANGES
    router = _router_work(sizes, hardware, software)
    elementwise = _dispatch_passes(sizes, dispatch, hardware, software)
    again = router.forward if sizes.remat == "full" else 0.0
    if "activations" in software.again:
        moved = _activation_columns(sizes, software)[0] * _column_bytes(sizes, dispatch)
        again += software.elementwise_factor * memory_seconds(moved, hardware)
    return {
        "matmul": add_work(router, _grouped_work(sizes, dispatch, hardware, software)),
        "elementwise": elementwise,
        "tensor_collectives": _expert_sums(sizes, hardware, software),
        "expert_exchange": Work(
            FORWARD_EXCHANGES * once + about_rows, back * once + about_rows, 0.0
        ),
        "recompute": Work(0.0, again, 0.0),
    }


def _exchange_seconds(
    sizes: LayerSizes, dispatch: Dispatch, hardware: Hardware, software: Software
) -> float:
    """Returns the seconds that all tokens take to travel one way."""
    width, size = sizes.model.expert_width, bytes_of(sizes.dtype)
    if software.copies_per == "rows":
        return all_to_all_seconds(dispatch.row_bytes(width, size), sizes.exchange, hardware)
    sent = dispatch.sent_bytes(width, size)
    if software.copies_per == "devices":
        return _in_rounds(sent, dispatch, sizes, hardware)
    hosts = sizes.exchange.size // members_on_a_host(sizes.exchange, hardware)
    across = dispatch.host_bytes(hosts, width, size)
    return relayed_seconds(sent, across, sizes.exchange, hardware)


def _in_rounds(sent: float, dispatch: Dispatch, sizes: LayerSizes, hardware: Hardware) -> float:
    """Returns the seconds of all rounds, which send `sent` bytes; each waits for its messages."""
    rounds = dispatch.rounds
    return rounds * all_to_all_seconds(sent / rounds, sizes.exchange, hardware)


def _router_work(sizes: LayerSizes, hardware: Hardware, software: Software) -> Work:
    """Returns the work of the router's logits and scores, in float32, and around narrow experts."""
    assert sizes.model.experts is not None, "a model with experts"
    count = sizes.model.experts.count
    tokens = sizes.tokens // (sizes.tensor if sizes.sequence_parallel else 1)
    in_float32 = replace(sizes, dtype="float32", matmul="compute", collective_matmul=False)
    single = replace(in_float32, microbatch=1, sequence_length=tokens * sizes.context.size)
    matmul = _matmul_work(single, count, sizes.model.embed, hardware, software)
    if width := sizes.model.experts.width:
        for columns, inner in ((width, sizes.model.embed), (sizes.model.embed, width)):
            matmul = add_work(matmul, _matmul_work(sizes, columns, inner, hardware, software))
    passes = memory_seconds(ROUTER_PASSES * FLOAT32 * tokens * count, hardware)
    return add_work(matmul, Work(passes, 2 * passes, 0.0))


def _grouped_work(
    sizes: LayerSizes, dispatch: Dispatch, hardware: Hardware, software: Software
) -> Work:
    """Returns the work of the experts' matmuls on the device that has most rows."""
    model, experts = sizes.model, sizes.model.experts
    assert experts is not None, "a model with experts"
    ffn = experts.ffn // (1 if sizes.experts_over_tensor else sizes.tensor)
    up_width = ffn * (2 if model.is_gated else 1)
    rows, embed = dispatch.rows_of_expert, model.expert_width
    is_narrow = sizes.matmul != "compute" and software.narrow_experts
    seconds = partial(
        matmul_seconds,
        hardware=hardware,
        software=replace(software, matmul_share=software.grouped_share * software.matmul_share),
        dtype=sizes.matmul if is_narrow else sizes.dtype,
        count=dispatch.own,
    )
    up, down = seconds(rows, up_width, embed), seconds(rows, embed, ffn)
    backward = seconds(rows, embed, up_width) + seconds(rows, ffn, embed)
    again = 0.0 if software.keeps_dispatched else up
    weight = seconds(embed, up_width, rows) + seconds(ffn, embed, rows)
    starts = LAUNCH_SECONDS * _expert_kernels(sizes, software)
    work = Work(
        forward=up + down + FORWARD_KERNELS * starts,
        backward=backward + again + (1 - FORWARD_KERNELS) * starts,
        weight=weight,
    )
    if not is_narrow:
        return work
    moved = _narrowing_bytes(sizes.dtype) * dispatch.own * rows
    forward = memory_seconds(moved * (embed + ffn), hardware)
    backward = memory_seconds(moved * (embed + up_width), hardware)
    return add_work(work, Work(forward, backward, 0.0))


def _narrowing_bytes(dtype: str) -> int:
    """Returns the bytes moved to narrow a number: read for the maximum, read again, written in 8
    bits.
    """
    return 2 * bytes_of(dtype) + 1


def _dispatch_passes(
    sizes: LayerSizes, dispatch: Dispatch, hardware: Hardware, software: Software
) -> Work:
    """Returns the work of sorting tokens into buckets and tiles and back, and of activations.

    Each lookup reads and writes the rows once: by message when they leave, by expert when they
    arrive, then by message and by token on the way back.
    """
    model, experts = sizes.model, sizes.model.experts
    assert experts is not None, "a model with experts"
    size = bytes_of(sizes.dtype)
    token = size * model.expert_width * dispatch.rounds
    outward = 2 * token * (dispatch.messages + dispatch.padded)
    back = token * (dispatch.padded + 2 * dispatch.messages + 2 * dispatch.tokens)
    forward_columns, backward_columns = _activation_columns(sizes, software)
    column = _column_bytes(sizes, dispatch)
    if not software.keeps_dispatched:
        backward_columns += forward_columns
    arrivals = 1 if software.keeps_dispatched else 2
    return Work(
        software.elementwise_factor
        * memory_seconds(outward + back + forward_columns * column, hardware),
        software.elementwise_factor
        * memory_seconds(arrivals * outward + back + backward_columns * column, hardware),
        0.0,
    )


def _activation_columns(sizes: LayerSizes, software: Software) -> tuple[int, int]:
    """Returns the columns that an expert's activation moves, forward and backward."""
    return software.activation_columns or ((3, 5) if sizes.model.is_gated else (2, 3))


def _column_bytes(sizes: LayerSizes, dispatch: Dispatch) -> float:
    """Returns the bytes of a column as wide as an expert, over the rows of all rounds."""
    ffn = dispatch.experts.ffn / (1 if sizes.experts_over_tensor else sizes.tensor)
    return bytes_of(sizes.dtype) * ffn * dispatch.rounds * dispatch.padded


def _expert_sums(sizes: LayerSizes, hardware: Hardware, software: Software) -> Work:
    """Returns the seconds of summing, or joining, the results of the devices of `tensor`.

    If each device sent its own tokens they are joined, which costs half a sum, or nothing if the
    stream is split.
    """
    one_sum = all_reduce_seconds(sizes.activation_bytes, Group(sizes.tensor, 1), hardware)
    if sizes.experts_over_tensor:
        one_sum = 0.0 if sizes.sequence_parallel else one_sum / 2
    alone = exposed(one_sum, software.overlap.tensor)
    return Work(alone, alone, 0.0)


def _matmul_work(
    sizes: LayerSizes, columns: int, inner: int, hardware: Hardware, software: Software
) -> Work:
    """Returns the work of [tokens, inner] x [inner, columns] and its two gradients.

    A collective matmul consists of several with fewer tokens each; the gradient of the weights
    takes one.
    """
    dtype = sizes.dtype if sizes.matmul == "compute" else sizes.matmul
    seconds = partial(matmul_seconds, hardware=hardware, software=software, dtype=dtype)
    pieces = sizes.tensor if sizes.collective_matmul else 1
    tokens = -(-sizes.tokens // pieces)
    work = Work(
        forward=pieces * seconds(tokens, columns, inner),
        backward=pieces * seconds(tokens, inner, columns),
        weight=seconds(inner, columns, sizes.tokens),
    )
    if sizes.matmul == "compute":
        return work
    moved = _narrowing_bytes(sizes.dtype)
    operands = sizes.tokens * inner + inner * columns
    scaling = Work(
        forward=memory_seconds(moved * operands, hardware),
        backward=memory_seconds(moved * sizes.tokens * columns, hardware),
        weight=0.0,
    )
    return add_work(work, scaling)


def _attention_work(sizes: LayerSizes, hardware: Hardware, software: Software) -> Work:
    if software.attention_share:
        return _fused_attention_work(sizes, hardware, software)
    return _unfused_attention_work(sizes, hardware, software)


def _fused_attention_work(sizes: LayerSizes, hardware: Hardware, software: Software) -> Work:
    model = sizes.model
    keys = sizes.sequence_length
    queries = keys // sizes.context.size
    heads = max(1, model.heads // sizes.tensor)
    # Causal: half of the 4 b h d s^2 FLOPs of two matmuls over all pairs.
    flops = 2 * sizes.microbatch * heads * shape.mean_dim(model) * queries * keys
    if sizes.context_method == "gather":
        # With tokens in order, those of the last device see nearly all keys, and the other devices
        # wait.
        flops *= (2 * sizes.context.size - 1) / sizes.context.size
    flops *= shape.visible_share(model, keys)
    is_narrow = software.narrow_attention and sizes.matmul != "compute"
    seconds = partial(
        fused_attention_seconds,
        keys=keys,
        head_dim=model.head_dim,
        hardware=hardware,
        software=software,
        dtype=sizes.matmul if is_narrow else sizes.dtype,
    )
    # The backward has five matmuls to the forward's two.
    work = Work(forward=seconds(1.0 * flops), backward=seconds(2.5 * flops), weight=0.0)
    if not is_narrow:
        return work
    moved = _narrowing_bytes(sizes.dtype) * sizes.tokens / sizes.tensor
    return add_work(
        work,
        Work(
            forward=memory_seconds(moved * shape.qkv_width(model), hardware),
            backward=memory_seconds(moved * shape.attention_width(model), hardware),
            weight=0.0,
        ),
    )


def _unfused_attention_work(sizes: LayerSizes, hardware: Hardware, software: Software) -> Work:
    """Counts batched matmuls over all pairs, and passes over scores that are written to memory."""
    model = sizes.model
    keys = sizes.sequence_length
    queries = keys // sizes.context.size
    matrices = sizes.microbatch * max(1, model.heads // sizes.tensor)
    seconds = partial(
        matmul_seconds,
        hardware=hardware,
        software=software,
        dtype=sizes.dtype,
        count=matrices,
    )
    # Tiles beyond a window are skipped.
    visible = shape.visible_share(model, keys)
    scores = visible * seconds(queries, keys, model.head_dim)
    values = visible * seconds(queries, model.value_width, keys)

    # Softmax, mask and dropout: passes over the scores, counted for Megatron-LM of 2021.
    score_bytes = visible * matrices * queries * keys * software.score_bytes * software.score_factor
    forward_passes = 6.5 if model.dropout else 4.0
    backward_passes = 5.5 if model.dropout else 4.0
    return Work(
        forward=scores + values + memory_seconds(forward_passes * score_bytes, hardware),
        backward=2 * (scores + values) + memory_seconds(backward_passes * score_bytes, hardware),
        weight=0.0,
    )
