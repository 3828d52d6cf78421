"""Defines closed forms of the named pipeline schedules: the planner's only look-up by name.

The table of a schedule (pipeline/schedule.py) has the exact answer, but a search tries thousands of
layouts and cannot build a table for each. Tests keep the closed forms equal to the tables. They do
not cover frozen chunks, for which a table is always built.

The words are those of pipeline/schedule.py, and the letters in formulas those of the papers: p
stages, m microbatches, v chunks per stage. There are two ways to run a schedule:

- In *lockstep*, as this framework does, all stages tick together by the table.
- By *order*, as Megatron-LM does, each stage runs its own list of operations, each as soon as its
  input has arrived.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from spmdtrain.pipeline.find_table import choose_table
from spmdtrain.pipeline.schedule import Table, without_backward_of
from spmdtrain.pipeline.timing import Times, exposed_hop
from spmdtrain.planner.cost.workload import Workload

# The largest schedule, in units of each kind of work, that is laid out to estimate it.
LARGEST_TABLE = 40_000


class Pipeline(NamedTuple):
    stages: int
    microbatches: int
    chunks: int
    frozen: int = 0  # chunks that a microbatch passes first, and that have no backward

    @property
    def units(self) -> int:
        """The number of units of each kind of work, on all stages."""
        return self.stages * self.microbatches * self.chunks


class RingSlots(NamedTuple):
    """The slots of the executor's three ring buffers, including the trash slot of each."""

    stash: int
    cotangents: int
    deferred: int


def _not_in_lockstep(pipeline: Pipeline) -> Any:
    raise ValueError(f"no closed form of this schedule in lockstep, asked for {pipeline}")


@dataclass(frozen=True)
class ClosedForm:
    """The closed forms of one schedule.

    `first_backward` and `first_weight` are ticks of the lockstep table. A schedule that only other
    frameworks run has neither, and no ring slots.
    """

    order_bubble: Callable[[Pipeline, Times], float]
    held_microbatches: Callable[[Pipeline, int], float]
    splits_backward: bool = False  # weight gradients are separate operations
    first_backward: Callable[[Pipeline], int] = _not_in_lockstep
    first_weight: Callable[[Pipeline], int] = _not_in_lockstep
    ring_slots: Callable[[Pipeline], RingSlots] = _not_in_lockstep
    searched_chunks: tuple[int, ...] = ()  # chunks per stage that a search of layouts tries


def pipeline_of(workload: Workload) -> Pipeline:
    """Returns the sizes of the workload's pipeline."""
    return Pipeline(
        workload.mesh.pipeline, workload.accumulation, workload.chunks, workload.frozen_chunks
    )


def lay_out(kind: str, pipeline: Pipeline, *, closed_form: bool = False) -> Table | None:
    """Returns the table that a run would execute, or None if its closed form should be used.

    That is the case for tables that are too large, whose closed form overestimates a little if
    chunks are frozen, and with `closed_form` if there is an exact one.
    """
    if kind not in SCHEDULES:
        table = choose_table(kind, pipeline.stages, pipeline.chunks, pipeline.microbatches)
        return without_backward_of(table, pipeline.frozen)
    if pipeline.units > LARGEST_TABLE or (closed_form and not pipeline.frozen):
        return None
    return _laid_out(kind, pipeline)


@lru_cache(maxsize=1000)
def _laid_out(kind: str, pipeline: Pipeline) -> Table:
    table = choose_table(kind, pipeline.stages, pipeline.chunks, pipeline.microbatches)
    return without_backward_of(table, pipeline.frozen)


# In lockstep


def lockstep_seconds(kind: str, pipeline: Pipeline, times: Times, overlap: float = 1.0) -> float:
    """Returns the time of a whole schedule: `timing.lockstep_time` of the table of that name.

    A tick lasts as long as the kinds of work in it take together. The share `overlap` of an
    activation's send overlaps with the same tick's backward and weight gradient; that of a
    cotangent's send with the weight gradient and the next tick's forward. The excess of a send is
    added.
    """
    p, m, v, _ = pipeline
    schedule = SCHEDULES[kind]
    units = m * v  # of each kind of work, per stage
    first_backward = schedule.first_backward(pipeline)
    tick = np.arange(first_backward + units + p - 1)

    runs_forward = tick < units + p - 1
    runs_backward = tick >= first_backward
    forward = times.forward / v * runs_forward
    if schedule.splits_backward:
        backward = times.backward / v * runs_backward
        weight = times.weight / v * (tick >= schedule.first_weight(pipeline))
    else:
        backward = (times.backward + times.weight) / v * runs_backward
        weight = np.zeros(len(tick))

    sends_activation = tick < units + p - 2
    sends_cotangent = runs_backward & (tick < tick[-1])
    next_forward = np.append(forward[1:], 0.0)
    activations = exposed_hop(times.hop, backward + weight, overlap)
    cotangents = exposed_hop(times.hop, weight + next_forward, overlap)
    exposed = sends_activation * activations + sends_cotangent * cotangents
    return float((forward + backward + weight + exposed).sum())


def _gpipe_first_backward(pipeline: Pipeline) -> int:
    return pipeline.microbatches + pipeline.stages - 1


def _paired_first_backward(pipeline: Pipeline) -> int:
    """Returns the tick for 1F1B and its relatives: right after the last stage's forward."""
    return pipeline.chunks * pipeline.stages - 1


def _zero_bubble_first_weight(pipeline: Pipeline) -> int:
    """Returns the tick of stage 0's backward, in which all stages run the same weight gradient."""
    return pipeline.chunks * pipeline.stages + pipeline.stages - 2


def _gpipe_rings(pipeline: Pipeline) -> RingSlots:
    slots = pipeline.microbatches + 1
    return RingSlots(stash=slots, cotangents=slots, deferred=0)


def _paired_rings(pipeline: Pipeline) -> RingSlots:
    p, m, v, _ = pipeline
    stash = min(m * v, (v - 1) * p + 2 * (p - 1) + 1)
    return RingSlots(stash=stash + 1, cotangents=0, deferred=0)


def _zero_bubble_rings(pipeline: Pipeline) -> RingSlots:
    p, m, v, _ = pipeline
    return _paired_rings(pipeline)._replace(deferred=min(m * v, p) + 1)


# By order. The bubbles are those of the middle stages: Qi et al., arXiv 2401.10241, tables 2 and 5.


def _order_bubble(pipeline: Pipeline, times: Times) -> float:
    p, _, v, _ = pipeline
    return (p - 1) * ((times.forward + times.backward + times.weight) / v + 2 * times.hop)


def _zb_h1_order_bubble(pipeline: Pipeline, times: Times) -> float:
    p = pipeline.stages
    return (p - 1) * (times.forward + times.backward - times.weight + 4 * times.hop)


def _zb_h2_order_bubble(pipeline: Pipeline, times: Times) -> float:
    """Returns the bubble of ZB-H2 with its optimised order: only the sends are waited for."""
    return (pipeline.stages - 1) * times.hop


def _gpipe_held(pipeline: Pipeline, stage: int) -> float:  # noqa: ARG001
    return pipeline.microbatches


def _one_f_one_b_held(pipeline: Pipeline, stage: int) -> float:
    return min(pipeline.microbatches, pipeline.stages - stage)


def _interleaved_held(pipeline: Pipeline, stage: int) -> float:
    p, m, v, _ = pipeline
    return min(m, ((v - 1) * p + 2 * (p - 1 - stage) + 1) / v)


def _zb_h1_held(pipeline: Pipeline, stage: int) -> float:  # noqa: ARG001
    return min(pipeline.microbatches, pipeline.stages)


def _zb_h2_held(pipeline: Pipeline, stage: int) -> float:  # noqa: ARG001
    return min(pipeline.microbatches, 2 * pipeline.stages - 1)


# `held_microbatches`: the most whose activations a stage holds if stages run by order.
SCHEDULES: Mapping[str, ClosedForm] = {
    "gpipe": ClosedForm(
        first_backward=_gpipe_first_backward,
        ring_slots=_gpipe_rings,
        order_bubble=_order_bubble,
        held_microbatches=_gpipe_held,
    ),
    "1f1b": ClosedForm(
        first_backward=_paired_first_backward,
        ring_slots=_paired_rings,
        order_bubble=_order_bubble,
        held_microbatches=_one_f_one_b_held,
        searched_chunks=(1,),
    ),
    "interleaved": ClosedForm(
        first_backward=_paired_first_backward,
        ring_slots=_paired_rings,
        order_bubble=_order_bubble,
        held_microbatches=_interleaved_held,
        searched_chunks=(2, 3, 4),
    ),
    "zero_bubble": ClosedForm(  # by order: ZB-H1
        splits_backward=True,
        first_backward=_paired_first_backward,
        first_weight=_zero_bubble_first_weight,
        ring_slots=_zero_bubble_rings,
        order_bubble=_zb_h1_order_bubble,
        held_microbatches=_zb_h1_held,
        searched_chunks=(1,),
    ),
    "zero_bubble_2p": ClosedForm(  # ZB-H2, of other frameworks only
        splits_backward=True,
        order_bubble=_zb_h2_order_bubble,
        held_microbatches=_zb_h2_held,
    ),
}
