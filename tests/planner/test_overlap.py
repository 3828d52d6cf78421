"""Shares of traffic that are hidden: read off compiled steps, and what they save."""

from dataclasses import asdict, fields, replace

import pytest
from workloads import gpt, workload_with

from spmdtrain.config.schema import Llama, RunConfig
from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.cost.overlap import (
    LOST_BESIDE_COLLECTIVES,
    Overlap,
    exposed,
    fleet_overlap,
    hidden_shares,
    saving,
)
from spmdtrain.planner.cost.software import software
from spmdtrain.planner.cost.step_time import step_time
from spmdtrain.planner.cost.workload import MeshShape
from spmdtrain.planner.estimate import estimate

H100 = DEVICES["h100"]
OURS = software("spmdtrain", "h100")
MODEL = gpt(layers=8, embed=1024, heads=16, vocab=32768)
# A schedule whose hops meet ticks with and without other work.
EVERY_AXIS = workload_with(
    MODEL,
    sequence_length=1024,
    global_batch=64,
    microbatch=1,
    mesh=MeshShape(pipeline=2, data=2, context=2, tensor=2),
)
KEPT = 1 - LOST_BESIDE_COLLECTIVES


def sends(kind: str, axis: str, sent: float, hidden: float) -> dict:
    return {"kind": kind, "axis": axis, "sent": sent, "sent_beside_work": hidden}


TRAFFIC = [
    sends("all-gather", "tensor", 3.0, 3.0),
    sends("reduce-scatter", "tensor", 1.0, 0.0),
    sends("collective-permute", "pipeline", 2.0, 1.0),
    sends("all-reduce", "pipeline", 4.0, 1.0),
    sends("all-gather", "fsdp", 5.0, 4.0),
    sends("all-reduce", "data", 6.0, 0.0),
    sends("all-to-all", "expert", 8.0, 2.0),
    sends("all-reduce", "expert", 7.0, 7.0),
    sends("all-reduce", "data+fsdp", 9.0, 9.0),
    sends("all-reduce", "none", 0.0, 0.0),
]


def test_shares_are_of_bytes_by_what_travels():
    found = hidden_shares(TRAFFIC, pipelined=False, collective_matmul=False)
    shared = {"hops": 0.5, "vocabulary": 0.25, "data": 0.0, "expert": 0.25}
    assert found == shared | {"tensor": 0.75, "fsdp": 0.8}
    pieces = hidden_shares(TRAFFIC, pipelined=True, collective_matmul=True)
    assert pieces == shared | {"collective_matmul": 0.75}
    assert hidden_shares([], pipelined=False, collective_matmul=False) == {}


def test_what_is_hidden_still_slows_the_work_beside_it():
    assert exposed(2.0, 0.0) == 2.0
    assert exposed(2.0, 1.0) == pytest.approx(2.0 * LOST_BESIDE_COLLECTIVES)
    assert exposed(2.0, saving(0.7)) == pytest.approx(0.6)


@pytest.mark.parametrize(
    "share, term",
    [
        ("tensor", "tensor_collectives"),
        ("context", "context_collectives"),
        ("data", "data_reduction"),
        ("vocabulary", "vocabulary_collectives"),
    ],
)
def test_a_share_shortens_its_own_term(share, term):
    def terms(overlap: Overlap):
        return step_time(EVERY_AXIS, H100, replace(OURS, overlap=overlap)).terms

    alone = terms(Overlap())
    half = terms(Overlap(**{share: 0.5}))
    assert alone[term] > 0
    assert half[term] == pytest.approx((1 - 0.5 * KEPT) * alone[term])
    # What a layer takes is in the bubble too, and a straggler waits for all.
    follow = {term, "pipeline_bubble", "pipeline_hops", "stragglers"}
    assert {name for name in alone if half[name] != alone[name]} <= follow


def test_hops_that_overlap_take_less_and_leave_the_bubble_as_it_is():
    def terms(hops: float) -> tuple[float, float]:
        ours = replace(OURS, overlap=Overlap(hops=hops))
        found = step_time(EVERY_AXIS, H100, ours).terms
        return found["pipeline_hops"], found["pipeline_bubble"]

    (all_of_them, bubble), (half, other), (none, another) = map(terms, (1.0, 0.5, 0.0))
    assert all_of_them < half < none
    assert bubble == other == another


def test_the_fleet_has_a_share_of_everything():
    for family in ("a100", "h100"):
        shares = asdict(fleet_overlap(family))
        assert all(0.0 <= share <= 1.0 for share in shares.values())
        assert software("spmdtrain", family).overlap == fleet_overlap(family)
    on_h100 = fleet_overlap("h100")
    assert on_h100 != fleet_overlap("a100")
    assert on_h100.collective_matmul > on_h100.tensor
    # No layout of the fleet on A100s splits time: what the H100s say is taken.
    assert fleet_overlap("a100").context == on_h100.context


def test_a_compiled_step_says_what_itself_hides():
    config = RunConfig(
        model=Llama(layers=8, embed=1024, heads=16, vocab=32768),
        mesh={"fsdp": 8},
        train={"global_batch": 64, "microbatch": 8, "sequence_length": 1024},
    )
    found = estimate(config, 8, "h100").scaled(2.0)
    assert found.as_compiled([]) == found
    nothing = found.as_compiled([sends("all-gather", "fsdp", 1.0, 0.0)])
    assert nothing.time.software.overlap == replace(OURS.overlap, fsdp=0.0)
    assert nothing.time.terms["fsdp_collectives"] > found.time.terms["fsdp_collectives"]
    assert nothing.time.scale == 2.0
    assert nothing.memory == found.memory


def test_every_share_is_one_that_a_step_can_tell():
    kinds = {field.name for field in fields(Overlap)}
    whole = hidden_shares(
        [*TRAFFIC, sends("all-gather", "context", 1.0, 1.0)],
        pipelined=False,
        collective_matmul=False,
    )
    assert whole.keys() | {"collective_matmul"} == kinds
