"""Step time: pipelines by the tables that run, terms by what limits them."""

from dataclasses import replace
from functools import partial

import pytest
from workloads import gpt, workload_with

from spmdtrain.config.schema import FinetuneConfig, Llama
from spmdtrain.models.size import train_flops_per_token
from spmdtrain.pipeline import schedule, timing
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.collective_time import all_gather_seconds, ring_latency, send_seconds
from spmdtrain.planner.cost.flops import model_flops_per_token
from spmdtrain.planner.cost.hardware import DEVICES, swept
from spmdtrain.planner.cost.layer_time import layer_time
from spmdtrain.planner.cost.overlap import LOST_BESIDE_COLLECTIVES, Overlap
from spmdtrain.planner.cost.software import software
from spmdtrain.planner.cost.step_time import step_time
from spmdtrain.planner.cost.trained_weights import Trained
from spmdtrain.planner.cost.workload import (
    Group,
    MeshShape,
    Workload,
)

H100 = DEVICES["h100"]
OURS = software("spmdtrain", "h100")
# With shares that a test can write down, and not those of the fleet.
PLAIN = replace(OURS, overlap=Overlap())
MODEL = gpt(layers=8, embed=1024, heads=16, vocab=32768)
WORKLOAD = workload_with(MODEL, sequence_length=1024, global_batch=64)


def workload(**mesh: int) -> Workload:
    return replace(WORKLOAD, mesh=MeshShape(**mesh))


def test_a_pipeline_takes_the_time_of_the_table_that_runs():
    interleaved = replace(workload(pipeline=4), schedule="interleaved", chunks=2)
    half = replace(OURS, overlap=Overlap(hops=0.5))
    terms = step_time(interleaved, H100, half).terms
    layers_per_stage = 2
    layer = layer_time(interleaved, H100, OURS)
    forward, backward, weight = (
        layers_per_stage * sum(work[kind] for work in layer.values()) for kind in range(3)
    )
    activation_bytes = 1024 * 1024 * 2
    hop = send_seconds(activation_bytes, 1, H100)
    times = timing.Times(forward, backward, weight, hop)
    table = schedule.build("interleaved", 4, 64, 2)
    idle = timing.lockstep_idle(table, times, overlap=0.5)
    whole = timing.lockstep_time(table, times, overlap=0.5)
    assert terms["pipeline_bubble"] == pytest.approx(idle.bubble * whole)
    assert terms["pipeline_hops"] == pytest.approx(idle.hops * whole)


@pytest.mark.parametrize("windows", [(), (100, 0, 600)])
def test_flops_agree_with_the_metrics_of_a_run(windows):
    config = Llama(layers=4, embed=256, heads=8, kv_heads=2, vocab=1000, windows=windows)
    flops = model_flops_per_token(config, 512)
    assert flops == pytest.approx(train_flops_per_token(config, 512), rel=1e-12)
    assert (flops < train_flops_per_token(config.model_copy(update={"windows": ()}), 512)) == bool(
        windows
    )


@pytest.mark.parametrize("system", [OURS, software("spmdtrain-xla", "h100")])
def test_a_window_takes_time_off_attention_and_a_norm_more_passes(system):
    def terms(**changes):
        changed = WORKLOAD.with_settings(model=changes)
        return {term: sum(work) for term, work in layer_time(changed, H100, system).items()}

    plain = terms()
    assert plain | {"attention": terms(windows=(256,))["attention"]} == terms(windows=(256,))
    # 0.44 of the pairs; what a kernel takes to start stays.
    assert 0.43 < terms(windows=(256,))["attention"] / plain["attention"] < 0.65
    for more in ({"norm_places": "both"}, {"query_norm": "head"}):
        passes = terms(**more)["elementwise"]
        assert plain | {"elementwise": passes} == terms(**more)
        assert passes > plain["elementwise"]


def test_frozen_weights_save_their_gradients_and_adapters_cost_their_matmuls():
    def terms(*targets: str, **changes) -> dict[str, float]:
        lora = FinetuneConfig(kind="lora", targets=targets) if targets else FinetuneConfig()
        trained = Trained(share=0.0, of_matrices=0.0, finetune=lora)
        changed = replace(WORKLOAD, trained=trained, **changes)
        return dict(step_time(changed, H100, PLAIN).terms)

    whole = step_time(WORKLOAD, H100, PLAIN).terms
    frozen, adapted = terms(), terms("q", "down")
    assert frozen["matmul"] == pytest.approx(2 / 3 * whole["matmul"], rel=0.05)
    assert 0.7 * whole["head"] < frozen["head"] < 0.9 * whole["head"]  # it has passes, too
    assert frozen["matmul"] < adapted["matmul"] < terms("q", "k", "down")["matmul"]
    again = terms("q", "down", remat="full")["recompute"] - terms(remat="full")["recompute"]
    assert again == pytest.approx((adapted["matmul"] - frozen["matmul"]) / 3, rel=0.3)


def test_terms_follow_what_limits_them():
    before = step_time(workload(data=8), H100, OURS)
    assert sum(before.terms.values()) == pytest.approx(before.seconds)

    fast_memory = swept(H100, "memory_bandwidth", 2 * H100.memory_bandwidth)
    faster = step_time(before.workload, fast_memory, OURS)
    assert faster.terms["elementwise"] == pytest.approx(before.terms["elementwise"] / 2)
    assert faster.terms["matmul"] == before.terms["matmul"]

    less_power = replace(H100, power_limit=H100.power / 4)
    limited = step_time(before.workload, less_power, OURS)
    assert limited.terms["matmul"] > 1.7 * before.terms["matmul"]


def test_the_number_of_members_on_a_host_decides_the_bandwidth_of_a_ring():
    hardware = replace(H100, link_latency=0.0, network_latency=0.0)
    eight_per_host = step_time(workload(data=64), hardware, OURS).terms["data_reduction"]
    one_per_host = step_time(workload(data=8, tensor=8), hardware, OURS).terms["data_reduction"]
    slowdown = one_per_host * 8 / eight_per_host  # per parameter: tensor splits them
    one_card_for_eight = 8
    assert slowdown == pytest.approx(one_card_for_eight * (7 / 8) / (63 / 64), rel=0.1)


def test_a_ring_takes_one_hop_per_host_over_the_network():
    link = H100.link_latency
    network = H100.network_latency
    assert ring_latency(Group(8, 1), H100) == pytest.approx(7 * link)
    assert ring_latency(Group(16, 1), H100) == pytest.approx(13 * link + 2 * network)
    assert ring_latency(Group(4, 8), H100) == pytest.approx(3 * network)


def test_gathers_slow_the_work_beside_them_and_the_first_and_last_stand_alone():
    all_gather = partial(all_gather_seconds, group=Group(8, 1), hardware=H100)
    split = replace(workload(fsdp=8), microbatch=8)
    found = step_time(split, H100, PLAIN).terms["fsdp_collectives"]
    # Weights are gathered twice, 2 bytes each, and their gradients scattered once, 4 bytes each.
    layers = 4 * all_gather(2 * 8 * shape.layer_parameters(MODEL), pieces=8)
    first_layer = all_gather(2 * shape.layer_parameters(MODEL))
    outside = 3 * all_gather(2 * shape.outside_parameters(MODEL))
    assert found == pytest.approx(first_layer + outside + LOST_BESIDE_COLLECTIVES * layers)

    # Where a compiled step has said which share of all this runs beside work, that counts.
    told = replace(OURS, overlap=Overlap(fsdp=0.75))
    moving = first_layer + outside + layers
    expected = 0.25 * moving + LOST_BESIDE_COLLECTIVES * 0.75 * moving
    assert step_time(split, H100, told).terms["fsdp_collectives"] == pytest.approx(expected)


def test_work_hides_no_more_of_gathers_than_it_lasts():
    slow = replace(H100, link_bandwidth=1e9)  # a step is nothing but collectives
    split = replace(workload(fsdp=8), microbatch=8)
    fast = step_time(split, H100, PLAIN).terms["fsdp_collectives"]
    less_work = step_time(split, slow, PLAIN).terms
    more_work = step_time(replace(split, remat="full"), slow, PLAIN).terms
    assert less_work["fsdp_collectives"] > 100 * fast
    hidden = less_work["fsdp_collectives"] - more_work["fsdp_collectives"]
    overlap = 0.8  # of the work, a fifth runs beside nothing
    lost = LOST_BESIDE_COLLECTIVES
    expected = overlap * more_work["recompute"] * (1 - lost) / (1 - overlap * lost)
    assert hidden == pytest.approx(expected)


def test_a_collective_matmul_hides_behind_matmuls_of_fewer_tokens():
    whole = replace(workload(tensor=8), sequence_parallel=True)
    pieces = replace(whole, collective_matmul=True)
    fast = swept(H100, "link_bandwidth", 10 * H100.link_bandwidth)
    moved = layer_time(whole, fast, PLAIN)["tensor_collectives"]
    left = layer_time(pieces, fast, PLAIN)["tensor_collectives"]
    assert left.forward == pytest.approx(LOST_BESIDE_COLLECTIVES * moved.forward)
    assert left.backward == pytest.approx(1.5 * LOST_BESIDE_COLLECTIVES * moved.backward)
    none = replace(OURS, overlap=Overlap(collective_matmul=0.0))
    assert layer_time(pieces, fast, none)["tensor_collectives"].forward == moved.forward

    slow = swept(H100, "link_bandwidth", H100.link_bandwidth / 100)
    moved = layer_time(whole, slow, PLAIN)["tensor_collectives"]
    left, matmul = (
        layer_time(pieces, slow, PLAIN)[term] for term in ("tensor_collectives", "matmul")
    )
    hidden = 7 / 8 * matmul.forward
    saved = (1 - LOST_BESIDE_COLLECTIVES) * hidden
    assert left.forward == pytest.approx(moved.forward - saved)

    assert matmul.forward > layer_time(whole, slow, OURS)["matmul"].forward
    assert matmul.weight == layer_time(whole, slow, OURS)["matmul"].weight
