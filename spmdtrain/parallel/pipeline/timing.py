"""What a schedule costs: the time of each kind of work and of a hop, put on a table or on one-op-per-tick orders.

Two machines are priced. *Lockstep* is ours: a tick lasts as long as the kinds of work present on any stage take
together, because stages without work compute masked garbage meanwhile. *Orders* are Megatron's way: each stage runs its
own list of operations, each as soon as what it needs has come.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spmdtrain.config.errors import ConfigError
from spmdtrain.parallel.pipeline.schedule import WORK, Table, arriving_backward, arriving_forward, units_of


@dataclass(frozen=True)
class Times:
    """In seconds, or any one unit: one microbatch through all chunks of one stage, and one hop between stages.

    Where a schedule does not split backward, its backward takes `backward + weight`. Embedding and head not included.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    hop: float = 0.0

    @property
    def microbatch(self) -> float:
        """Of the work of one microbatch on one stage."""
        return self.forward + self.backward + self.weight


class Operation(NamedTuple):
    """Of an order: `kind` is "forward", "backward" or "weight"."""

    kind: str
    microbatch: int
    chunk: int


class Span(NamedTuple):
    """An operation of a stage from `start` to `stop`."""

    stage: int
    kind: str
    microbatch: int
    chunk: int
    start: float
    stop: float


Orders = list[list[Operation]]


def lockstep_ticks(table: Table, times: Times, overlap: bool = True) -> np.ndarray:
    """[ticks]: how long each lasts, with the hops that follow it.

    A hop sticks out by what it takes longer than the work that can run beside it: an activation's hop beside this
    tick's backward and weight gradient, a cotangent's beside this tick's weight gradient and the next one's forward.
    `overlap=False` lets nothing run beside a hop. One stage hops nowhere.
    """
    cost = _chunk_times(table.split, table.chunks, times)
    present = [(units_of(table, kind)[..., 0] >= 0).any(axis=1) for kind in WORK]
    forward, backward, weight = np.array([cost[kind] for kind in WORK])[:, None] * np.stack(present)
    ticks = forward + backward + weight
    if table.stages == 1:
        return ticks
    for arriving, beside in (
        (arriving_forward(table), backward + weight),
        (arriving_backward(table), weight + np.append(forward[1:], 0.0)),
    ):
        hops = np.append((arriving[1:, :, 0] >= 0).any(1), False)
        ticks += hops * np.maximum(0.0, times.hop - overlap * beside)
    return ticks


def lockstep_time(table: Table, times: Times, overlap: bool = True) -> float:
    """Of the whole schedule, all microbatches."""
    return float(lockstep_ticks(table, times, overlap).sum())


def bubble_fraction(table: Table, times: Times | None = None, overlap: bool = True) -> float:
    """Idle / total: the share of the time in which a stage has no work of its own (hops that stick out included)."""
    total = lockstep_time(table, times or Times(), overlap)
    return 1 - table.microbatches * (times or Times()).microbatch / total


def bubble_over_ideal(table: Table, times: Times | None = None, overlap: bool = True) -> float:
    """Idle / work, as Narayanan et al. (arXiv 2104.04473, section 2.2) state it: (p - 1) / (v m) for interleaved 1F1B.

    Read off the table, like everything here, so the formula is a test and not an assumption.
    """
    ideal = table.microbatches * (times or Times()).microbatch
    return lockstep_time(table, times or Times(), overlap) / ideal - 1


def lockstep_spans(table: Table, times: Times, overlap: bool = True) -> list[Span]:
    """When each unit runs: within a tick every stage has the same slots of time, forward, backward, weight gradient."""
    cost, spans = _chunk_times(table.split, table.chunks, times), []
    starts = np.concatenate([[0.0], lockstep_ticks(table, times, overlap).cumsum()[:-1]])
    for kind in WORK:
        units = units_of(table, kind)
        for tick, stage in np.argwhere(units[..., 0] >= 0).tolist():
            (microbatch, chunk), start = units[tick, stage].tolist(), float(starts[tick])
            spans.append(Span(stage, kind, microbatch, chunk, start, start + cost[kind]))
        starts = starts + cost[kind] * (units[..., 0] >= 0).any(1)
    return spans


def order_spans(orders: Orders, times: Times) -> list[Span]:
    """When each operation runs if every stage goes through its list, waiting for what comes from elsewhere.

    A value made on another stage is there `times.hop` after it is made; hops do not wait for each other.
    ConfigError if the lists wait for each other in a circle.
    """
    chunks = 1 + max(operation.chunk for order in orders for operation in order)
    cost = _chunk_times(any(op.kind == "weight" for order in orders for op in order), chunks, times)
    spans: dict[tuple[int, Operation], Span] = {}
    free, rest = [0.0] * len(orders), [list(reversed(order)) for order in orders]
    while any(rest):
        moved = False
        for stage, order in enumerate(rest):
            while order and (ready := _ready(stage, order[-1], spans, len(orders), chunks, times.hop)) is not None:
                operation, start = order.pop(), max(free[stage], ready)
                free[stage] = start + cost[operation.kind]
                spans[stage, operation] = Span(stage, *operation, start, free[stage])
                moved = True
        if not moved:
            waiting = next((stage, order[-1]) for stage, order in enumerate(rest) if order)
            raise ConfigError("the stages wait for each other", found=f"stage {waiting[0]} before {waiting[1]}")
    return list(spans.values())


def order_time(orders: Orders, times: Times) -> float:
    """Until the last operation ends."""
    return max(span.stop for span in order_spans(orders, times))


def order_bubble_fraction(orders: Orders, times: Times) -> float:
    """(time - m (F + B + W)) / time: the bubble rate of Qi et al., arXiv 2401.10241, table 5."""
    microbatches = 1 + max(operation.microbatch for order in orders for operation in order)
    return 1 - microbatches * times.microbatch / order_time(orders, times)


def table_orders(table: Table) -> Orders:
    """The table's work as lists, to price it without lockstep: tick by tick, forward, backward, weight gradient."""
    by_kind = {kind: units_of(table, kind).tolist() for kind in WORK}
    return [
        [
            Operation(kind, *by_kind[kind][tick][stage])
            for tick in range(table.ticks)
            for kind in WORK
            if by_kind[kind][tick][stage][0] >= 0
        ]
        for stage in range(table.stages)
    ]


def megatron_orders(stages: int, microbatches: int, chunks: int = 1) -> Orders:
    """Megatron-LM's 1F1B and interleaved 1F1B: some forwards to warm up, then one forward, one backward in turn.

    Warm-up of stage s: p - 1 - s forwards; interleaved 2 (p - 1 - s) + (v - 1) p, or all if m = p.
    """
    if chunks > 1 and microbatches % stages:
        raise ConfigError("Megatron's interleaving needs microbatches % stages == 0", asked=f"{microbatches}, {stages}")
    total, group = microbatches * chunks, stages * chunks
    units = [(unit // group * stages + unit % stages, unit % group // stages) for unit in range(total)]
    forward = [Operation("forward", *unit) for unit in units]
    backward = [Operation("backward", microbatch, chunks - 1 - chunk) for microbatch, chunk in units]
    orders = []
    for stage in range(stages):
        ahead = stages - 1 - stage if chunks == 1 else 2 * (stages - 1 - stage) + (chunks - 1) * stages
        ahead = total if chunks > 1 and microbatches == stages else min(ahead, total)
        turns = [op for pair in zip(forward[ahead:], backward, strict=False) for op in pair]
        orders.append([*forward[:ahead], *turns, *backward[total - ahead :]])
    return orders


def zb_h1_orders(stages: int, microbatches: int) -> Orders:
    """ZB-H1 (Qi et al., arXiv 2401.10241, figure 2): 1F1B with split backward, stage s puts off s weight gradients."""
    orders = []
    for stage, one_f_one_b in enumerate(megatron_orders(stages, microbatches)):
        order = list(_with_weights(one_f_one_b, put_off=stage))
        left = range(max(0, microbatches - stage), microbatches)
        orders.append(order + [Operation("weight", microbatch, 0) for microbatch in left])
    return orders


def _with_weights(order: list[Operation], put_off: int) -> Iterator[Operation]:
    for operation in order:
        yield operation
        if operation.kind == "backward" and operation.microbatch >= put_off:
            yield Operation("weight", operation.microbatch - put_off, 0)


def _chunk_times(split: bool, chunks: int, times: Times) -> dict[str, float]:
    backward = times.backward if split else times.backward + times.weight
    return {"forward": times.forward / chunks, "backward": backward / chunks, "weight": times.weight / chunks}


def _ready(
    stage: int,
    operation: Operation,
    spans: dict[tuple[int, Operation], Span],
    stages: int,
    chunks: int,
    hop: float,
) -> float | None:
    """When what the operation needs is on its stage; None if that has not run yet."""
    kind, microbatch, chunk = operation
    source, needs = stage, Operation("backward", microbatch, chunk)
    if kind == "forward" and (stage, chunk) == (0, 0):
        return 0.0
    if kind == "forward":
        source = (stage - 1) % stages
        needs = Operation("forward", microbatch, chunk if stage else chunk - 1)
    elif kind == "backward" and (stage, chunk) == (stages - 1, chunks - 1):
        needs = Operation("forward", microbatch, chunk)
    elif kind == "backward":
        source = (stage + 1) % stages
        needs = Operation("backward", microbatch, chunk if source else chunk + 1)
    made = spans.get((source, needs))
    return None if made is None else made.stop + (hop if source != stage else 0.0)
