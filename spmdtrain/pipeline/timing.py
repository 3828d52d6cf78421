"""Prices a schedule: computes the total time from that of each kind of work and of a hop.

Two ways of running are priced. *Lockstep* is ours: a tick lasts as long as all kinds of work that
are present on any stage take together, because a stage without work computes anyway, and its
results are masked. *Orders* are Megatron's: each stage runs its own list of operations, each as
soon as its inputs have arrived.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from spmdtrain.config.errors import ConfigError
from spmdtrain.pipeline.schedule import (
    WORK,
    Table,
    arriving_backward,
    arriving_forward,
    units_of,
)


@dataclass(frozen=True)
class Times:
    """The time of each kind of work on one microbatch and one stage, and of a hop between stages.

    Work counts through all chunks of the stage, in seconds or in any one unit. A schedule that does
    not split backward takes `backward + weight` for it. Embedding and head are not included.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    hop: float = 0.0

    @property
    def microbatch(self) -> float:
        """The time of all work of one microbatch on one stage."""
        return self.forward + self.backward + self.weight


class Operation(NamedTuple):
    """One unit's work in an order. `kind` is "forward", "backward" or "weight"."""

    kind: str
    microbatch: int
    chunk: int


class Span(NamedTuple):
    """An operation that a stage runs from time `start` to `stop`."""

    stage: int
    kind: str
    microbatch: int
    chunk: int
    start: float
    stop: float


Orders = list[list[Operation]]  # for each stage


# Lockstep


def lockstep_ticks(table: Table, times: Times, overlap: float = 1.0) -> np.ndarray:
    """Returns [ticks]: the duration of each, including what its hops add.

    A hop adds the time by which it exceeds the work that it can overlap with. An activation's hop
    overlaps with the backward and the weight gradient of its tick; a cotangent's with the weight
    gradient of its tick and the forward of the next. `overlap`: the share of a hop that may
    overlap. A single stage has no hops.
    """
    cost = _chunk_times(table.split, table.chunks, times)
    work = {}
    for kind in WORK:
        present = (units_of(table, kind)[..., 0] >= 0).any(axis=1)
        work[kind] = cost[kind] * present
    ticks = work["forward"] + work["backward"] + work["weight"]
    if table.stages == 1:
        return ticks

    # The executor sends an activation at the end of its forward, a cotangent at the start of the
    # next tick.
    next_forward = np.append(work["forward"][1:], 0.0)
    for arriving, beside in (
        (arriving_forward(table), work["backward"] + work["weight"]),
        (arriving_backward(table), work["weight"] + next_forward),
    ):
        # What arrives at a tick was sent at the end of the previous one.
        hops = np.append((arriving[1:, :, 0] >= 0).any(axis=1), False)
        ticks += hops * exposed_hop(times.hop, beside, overlap)
    return ticks


def exposed_hop(hop: float, beside: np.ndarray, overlap: float) -> np.ndarray:
    """Returns the seconds that a hop of `hop` seconds adds to each tick.

    The share `overlap` of the hop may overlap with work of `beside` seconds.
    """
    return hop - np.minimum(overlap * hop, beside)


def lockstep_time(table: Table, times: Times, overlap: float = 1.0) -> float:
    """Returns the time of the whole schedule, all microbatches."""
    return float(lockstep_ticks(table, times, overlap).sum())


class Idle(NamedTuple):
    """The time in which a stage does not work, as shares of the whole.

    Waiting for work is apart from waiting for hops: more chunks shrink the one and multiply the
    other.
    """

    bubble: float
    hops: float

    @classmethod
    def of(cls, work: float, without_hops: float, whole: float) -> "Idle":
        """Returns the shares, given the seconds of the work and of the schedule."""
        return cls((without_hops - work) / whole, (whole - without_hops) / whole)


def lockstep_idle(table: Table, times: Times | None = None, overlap: float = 1.0) -> Idle:
    """Returns the shares of the time in which stages in lockstep wait for work, and for hops."""
    times = times or Times()
    work = table.microbatches * times.microbatch
    without_hops = lockstep_time(table, replace(times, hop=0.0), overlap)
    return Idle.of(work, without_hops, lockstep_time(table, times, overlap))


def bubble_over_ideal(table: Table, times: Times | None = None) -> float:
    """Returns the bubble over the work, as stated by Narayanan et al., arXiv 2104.04473.

    In section 2.2 they find, for interleaved 1F1B, (p - 1) / (v m). Here it is read off the table,
    like everything else, so the formula is tested and not assumed.
    """
    times = times or Times()
    ideal = table.microbatches * times.microbatch
    return lockstep_time(table, replace(times, hop=0.0)) / ideal - 1


def lockstep_spans(table: Table, times: Times, overlap: float = 1.0) -> list[Span]:
    """Returns when each unit runs.

    Within a tick all stages run their forwards together, then backwards, then weight gradients.
    """
    cost = _chunk_times(table.split, table.chunks, times)
    ends = lockstep_ticks(table, times, overlap).cumsum()
    starts = np.concatenate([[0.0], ends[:-1]])  # of the current kind of work in each tick
    spans = []
    for kind in WORK:
        units = units_of(table, kind)
        runs = units[..., 0] >= 0
        for tick, stage in np.argwhere(runs).tolist():
            microbatch, chunk = units[tick, stage].tolist()
            start = float(starts[tick])
            spans.append(Span(stage, kind, microbatch, chunk, start, start + cost[kind]))
        starts = starts + cost[kind] * runs.any(axis=1)
    return spans


# Orders


def order_spans(orders: Orders, times: Times) -> list[Span]:
    """Returns when each operation runs if every stage works through its own list.

    A stage waits for the inputs of its next operation. The output of another stage arrives
    `times.hop` after it was made, and hops do not wait for each other.

    Raises ConfigError if the lists wait for each other in a circle.
    """
    stages = len(orders)
    operations = [operation for order in orders for operation in order]
    chunks = 1 + max(operation.chunk for operation in operations)
    split = any(operation.kind == "weight" for operation in operations)
    cost = _chunk_times(split, chunks, times)

    spans: dict[tuple[int, Operation], Span] = {}
    free_at = [0.0] * stages
    remaining = [list(reversed(order)) for order in orders]  # the next one last, to be popped
    while any(remaining):
        moved = False
        for stage, order in enumerate(remaining):
            while order:
                ready_at = _ready_at(stage, order[-1], spans, stages, chunks, times.hop)
                if ready_at is None:
                    break
                operation = order.pop()
                start = max(free_at[stage], ready_at)
                free_at[stage] = start + cost[operation.kind]
                spans[stage, operation] = Span(stage, *operation, start, free_at[stage])
                moved = True
        if not moved:
            stage, operation = next(
                (stage, order[-1]) for stage, order in enumerate(remaining) if order
            )
            blocked = f"stage {stage} before {operation}"
            raise ConfigError("the stages wait for each other", found=blocked)
    return list(spans.values())


def order_time(orders: Orders, times: Times) -> float:
    """Returns the time at which the last operation ends."""
    return max(span.stop for span in order_spans(orders, times))


def order_idle(orders: Orders, times: Times) -> Idle:
    """Returns the shares of the time in which stages wait for work, and for hops.

    Their sum is the bubble rate of Qi et al., arXiv 2401.10241, table 5.
    """
    microbatches = 1 + max(operation.microbatch for order in orders for operation in order)
    without_hops = order_time(orders, replace(times, hop=0.0))
    return Idle.of(microbatches * times.microbatch, without_hops, order_time(orders, times))


def table_orders(table: Table) -> Orders:
    """Returns a table's work as orders, to price it without lockstep.

    Each stage goes tick by tick, and within a tick through forward, backward and weight gradient.
    """
    units = {kind: units_of(table, kind).tolist() for kind in WORK}
    orders: Orders = [[] for _ in range(table.stages)]
    for stage, order in enumerate(orders):
        for tick in range(table.ticks):
            for kind in WORK:
                microbatch, chunk = units[kind][tick][stage]
                if microbatch >= 0:
                    order.append(Operation(kind, microbatch, chunk))
    return orders


def megatron_orders(stages: int, microbatches: int, chunks: int = 1) -> Orders:
    """Returns the orders of Megatron-LM's 1F1B, or with several chunks of its interleaved 1F1B.

    Each stage runs some forwards to warm up, then one forward and one backward in turn, then the
    remaining backwards. Stage s warms up with p - 1 - s forwards; interleaved with 2 (p - 1 - s) +
    (v - 1) p of them, or with all if m = p.
    """
    if chunks > 1 and microbatches % stages:
        raise ConfigError(
            "Megatron's interleaving needs microbatches % stages == 0",
            asked=f"{microbatches}, {stages}",
        )
    total = microbatches * chunks
    group = stages * chunks
    units = []  # (microbatch, chunk) in the order of forwards
    for unit in range(total):
        microbatch = unit // group * stages + unit % stages
        units.append((microbatch, unit % group // stages))
    forward = [Operation("forward", *unit) for unit in units]
    backward = [
        Operation("backward", microbatch, chunks - 1 - chunk) for microbatch, chunk in units
    ]

    orders = []
    for stage in range(stages):
        if chunks == 1:
            warm_up = stages - 1 - stage
        elif microbatches == stages:
            warm_up = total
        else:
            warm_up = 2 * (stages - 1 - stage) + (chunks - 1) * stages
        warm_up = min(warm_up, total)
        pairs = zip(forward[warm_up:], backward, strict=False)
        in_turn = [operation for pair in pairs for operation in pair]
        orders.append([*forward[:warm_up], *in_turn, *backward[total - warm_up :]])
    return orders


def zb_h1_orders(stages: int, microbatches: int) -> Orders:
    """Returns the orders of ZB-H1 (Qi et al., arXiv 2401.10241, figure 2).

    It is 1F1B with backward split, where stage s puts off s weight gradients to the end.
    """
    orders = []
    for stage, one_f_one_b in enumerate(megatron_orders(stages, microbatches)):
        order = list(_with_weight_gradients(one_f_one_b, put_off=stage))
        put_off = range(max(0, microbatches - stage), microbatches)
        orders.append(order + [Operation("weight", microbatch, 0) for microbatch in put_off])
    return orders


def _with_weight_gradients(order: list[Operation], put_off: int) -> Iterator[Operation]:
    """Yields each backward, then the weight gradient of the microbatch `put_off` before it."""
    for operation in order:
        yield operation
        if operation.kind == "backward" and operation.microbatch >= put_off:
            yield Operation("weight", operation.microbatch - put_off, 0)


def _chunk_times(split: bool, chunks: int, times: Times) -> dict[str, float]:
    """Returns the time of each kind of work in one chunk."""
    backward = times.backward if split else times.backward + times.weight
    return {
        "forward": times.forward / chunks,
        "backward": backward / chunks,
        "weight": times.weight / chunks,
    }


def _ready_at(
    stage: int,
    operation: Operation,
    spans: dict[tuple[int, Operation], Span],
    stages: int,
    chunks: int,
    hop: float,
) -> float | None:
    """Returns when an operation's input is on its stage; None if it has not been made yet."""
    kind, microbatch, chunk = operation
    if kind == "forward" and (stage, chunk) == (0, 0):
        return 0.0
    if kind == "forward":
        source = (stage - 1) % stages
        needs = Operation("forward", microbatch, chunk if stage else chunk - 1)
    elif kind == "backward" and (stage, chunk) == (stages - 1, chunks - 1):
        source = stage
        needs = Operation("forward", microbatch, chunk)
    elif kind == "backward":
        source = (stage + 1) % stages
        needs = Operation("backward", microbatch, chunk if source else chunk + 1)
    else:
        source = stage
        needs = Operation("backward", microbatch, chunk)
    made = spans.get((source, needs))
    if made is None:
        return None
    return made.stop if source == stage else made.stop + hop
