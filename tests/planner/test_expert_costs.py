"""Models with experts: sizes as the built model has them, traffic by hand, the best mesh."""

from dataclasses import replace
from math import ceil, comb
from pathlib import Path

import pytest
from helpers import tiny
from test_memory import EXPERTS, LLAMA, _kept_and_deferred
from test_traffic import ALL, LAYER, MODEL, workload
from workloads import workload_with

from spmdtrain.config import ConfigError, load
from spmdtrain.config.schema import ExpertsConfig, Llama
from spmdtrain.models.abstract import build_model
from spmdtrain.models.size import train_flops_per_token
from spmdtrain.planner.cost import memory, shape
from spmdtrain.planner.cost.flops import model_flops_per_token
from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.cost.overlap import Overlap
from spmdtrain.planner.cost.software import Software, software
from spmdtrain.planner.cost.step_time import step_time
from spmdtrain.planner.cost.workload import MeshShape, Workload, workload_of
from spmdtrain.planner.estimate import estimate
from spmdtrain.planner.plan import plan, search, why_axes
from spmdtrain.planner.plan_rules import plan_rules
from spmdtrain.planner.traffic import needed_traffic

H100 = DEVICES["h100"]
SHARED = ("model.experts.ffn=40", "model.experts.shared=1")
VARIED = [
    (*LLAMA, *EXPERTS),
    (*LLAMA, *EXPERTS, *SHARED),
    (*LLAMA, *EXPERTS, "model.experts.first_dense=2", "model.experts.every=2"),
    (*LLAMA, *EXPERTS, "model.bias=true", "model.mlp=gelu", "model.experts.logit_bias=true"),
]
# What DeepSeek-V3 has.
DEEPSEEK = (
    *(each for each in LLAMA if "kv_heads" not in each),
    *(*EXPERTS, *SHARED, "model.experts.first_dense=1", "model.multi_token.depth=2"),
    *("model.latent.rank=16", "model.latent.plain_dim=8", "model.latent.rope_dim=4"),
    "model.latent.value_dim=6",
)
VARIED += [DEEPSEEK, (*DEEPSEEK, "model.latent.query_rank=24")]
# The sizes of Qwen3-30B-A3B.
FINE = Llama(
    layers=48,
    embed=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    ffn=6144,
    vocab=151936,
    query_norm="head",
    experts=ExpertsConfig(count=128, chosen=8, ffn=768),
)


@pytest.mark.parametrize("settings", VARIED)
def test_parameters_and_flops_are_those_of_the_built_model(settings):
    config = tiny(*settings)
    model = workload_of(config, dict(config.mesh.sizes)).model
    built = build_model(config).parameters.values()
    assert shape.parameters(model) == sum(parameter.size for parameter in built)
    length = config.train.sequence_length
    flops = train_flops_per_token(config.model, length)
    assert model_flops_per_token(model, length) == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("settings", VARIED[:2])
def test_what_a_layer_with_experts_keeps(settings, remat):
    config = tiny(
        *settings, f"train.remat={remat}", "precision.compute=bfloat16", "train.global_batch=2"
    )
    found = workload_of(config, dict(config.mesh.sizes))
    kept, deferred = _kept_and_deferred(config)
    assert memory.kept_bytes(found) == kept
    if remat == "none":
        assert memory.deferred_bytes(found) == pytest.approx(deferred, rel=0.15)


@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.expert=2", "mesh.fsdp=2"),
        ("mesh.expert=4", "mesh.data=2", "train.zero=1"),
        ("mesh.expert=2", "mesh.tensor=2", "rules.parameters.experts=expert,tensor"),
        ("mesh.expert=2", "mesh.fsdp=2", "rules.parameters.embed=fsdp,expert"),
        ("mesh.pipeline=2", "mesh.expert=2", "train.microbatch=2"),
    ],
)
def test_the_state_at_rest_is_split_as_a_run_splits_it(mesh):
    config = tiny(*LLAMA, *EXPERTS, "model.embed=256", "model.ffn=512", *mesh)
    sizes = dict(config.mesh.sizes)
    closed_form = memory.closed_form_state(workload_of(config, sizes))
    assert closed_form == pytest.approx(memory.exact_state(config, sizes), rel=0.03)


def with_experts(mesh: MeshShape, **changes) -> Workload:
    experts = ExpertsConfig(count=8, chosen=2, ffn=16)
    return workload(mesh, model=MODEL.model_copy(update={"experts": experts}), **changes)


def test_tokens_travel_five_times_and_dense_gradients_once():
    layer = with_experts(MeshShape(expert=4))
    tokens = 2 * 16
    messages = ceil(1.25 * tokens * (1 - comb(6, 2) / comb(8, 2)))
    rows = ceil(1.25 * tokens * 2 / 4)
    large = 5 * 3 * messages * 8 * 2  # to three others, of width 8, in 16 bits
    told = 3 * rows * (12 + 12 + 4)
    router = 8 * 8 + 8
    dense = ALL - 4 * 2 * 8 * 16 + 4 * router  # no mlp, which has two matrices
    assert LAYER == 8 * 56
    gradients = 2 * 3 / 4 * 4 * dense
    microbatches = 16 // 2 // 4
    assert needed_traffic(layer) == {
        "expert": pytest.approx(microbatches * 4 * (large + told) + gradients)
    }


def test_dense_weights_split_over_expert_are_gathered_over_both_axes():
    mesh = MeshShape(fsdp=2, expert=2)
    copied = needed_traffic(with_experts(mesh))
    split = needed_traffic(with_experts(mesh, dense_over_expert=True))
    assert set(copied) == {"fsdp", "expert"}
    assert set(split) == {"fsdp", "expert", "fsdp+expert"}
    assert split["fsdp"] < copied["fsdp"]
    assert split["expert"] < copied["expert"]
    whole = memory.step_memory(with_experts(mesh))
    assert memory.step_memory(with_experts(mesh, dense_over_expert=True)).total < whole.total


def test_devices_of_tensor_that_own_experts_send_nothing_twice():
    mesh = MeshShape(expert=2, tensor=2)
    sent = {
        over: needed_traffic(with_experts(mesh, experts_over_tensor=over, sequence_parallel=True))
        for over in (False, True)
    }
    assert sent[True]["tensor"] < sent[False]["tensor"]


def test_an_uneven_load_costs_time():
    found = workload_with(FINE, 4096, 64, mesh=MeshShape(expert=8), remat="full")
    ours = software("spmdtrain", "h100")
    even, uneven, worst = (
        step_time(found, H100, replace(ours, expert_imbalance=imbalance))
        for imbalance in (1.0, 1.25, 4.0)
    )
    assert even.terms["matmul"] < uneven.terms["matmul"] < worst.terms["matmul"]
    assert even.terms["expert_exchange"] == uneven.terms["expert_exchange"]  # fits the buckets
    assert worst.terms["expert_exchange"] == pytest.approx(4 * even.terms["expert_exchange"])


def test_a_token_crosses_the_network_once_for_its_experts_its_devices_or_its_hosts():
    exact = FINE.experts.model_copy(update={"bucket_factor": 1.0})
    even = FINE.model_copy(update={"experts": exact})
    found = workload_with(even, 4096, 64, mesh=MeshShape(expert=64))
    ours = replace(software("spmdtrain", "h100"), expert_imbalance=1.0, overlap=Overlap())
    rows, devices, hosts = (
        step_time(found, H100, replace(ours, copies_per=copies)).terms["expert_exchange"]
        for copies in ("rows", "devices", "hosts")
    )
    assert hosts < devices < rows
    # 8 hosts of 16 experts each: a token goes to another one unless its 8 experts are elsewhere.
    across = 7 * 4096 * (1 - comb(112, 8) / comb(128, 8)) * 2048 * 2
    one_way = across / (0.8 * H100.network_bandwidth)
    one_way += 7 * H100.network_latency
    told = found.dispatch().routing_bytes * 56 / 63 / (0.8 * H100.network_bandwidth)
    told += 2 * 56 * H100.network_latency
    assert hosts / 48 == pytest.approx(5 * one_way + told)


def test_kernels_that_a_host_launches_take_time_unless_the_device_is_slower():
    ours = software("spmdtrain", "h100")
    each = replace(ours, layer_kernels=500, expert_kernels=6, grouped_share=1.0)

    def launches(tokens: int, how: Software) -> float:
        found = workload_with(FINE, tokens, 8, mesh=MeshShape(expert=8))
        return step_time(found, H100, how).terms["launches"]

    assert launches(64, ours) == 0.0
    # Too small to take time on the device, 16 experts wait for 596 launches in each of 48 layers.
    all_launches = 48 * 596 * each.launch_wait
    assert 0.5 * all_launches < launches(64, each) < all_launches
    assert launches(16384, each) == 0.0
    assert launches(16384, replace(each, launches_ahead=False)) == pytest.approx(all_launches)
    narrow = replace(each, narrow_kernels=16, launches_ahead=False)
    assert launches(64, narrow) == pytest.approx(all_launches)  # of 16 bits


def test_our_experts_multiply_wide_numbers_whatever_the_other_matmuls_do():
    ours = software("spmdtrain", "h100")
    wide, narrow = (
        workload_with(FINE, 4096, 8, matmul, mesh=MeshShape(expert=8))
        for matmul in ("compute", "float8")
    )

    def saved(how: Software) -> float:
        return (
            step_time(wide, H100, how).terms["matmul"]
            - step_time(narrow, H100, how).terms["matmul"]
        )

    assert 0 < saved(ours) < saved(replace(ours, narrow_experts=True)) / 2


@pytest.mark.seconds
def test_a_plan_says_why_it_has_its_size_of_expert():
    found = workload_with(FINE, 4096, 128, microbatch=2)
    plans = search(found, 16, H100, software("spmdtrain", "h100"))
    best = {}
    for each in plans:
        best.setdefault(each.workload.mesh.expert, each)
    assert best[16].why.startswith("expert exchange")
    assert plans[0].workload.mesh.expert < 16
    lines = why_axes(plans)
    assert lines[0].startswith(f"mesh.expert={plans[0].workload.mesh.expert} is best: ")
    assert len(lines) == len(best)
    split = next(each for each in plans if each.workload.mesh.expert > 1)
    assert "rules.parameters.embed=fsdp,expert" in split.settings
    assert (
        why_axes(
            search(
                found.with_settings(model={"experts": None}),
                16,
                H100,
                software("spmdtrain", "h100"),
            )
        )
        == []
    )


def test_a_plan_of_long_sequences_says_why_it_has_its_size_of_context():
    dense = FINE.model_copy(update={"experts": None, "kv_heads": 8})
    found = workload_with(dense, 65536, 8, context_attention="auto")
    plans = search(found, 16, H100, software("spmdtrain", "h100"))
    lines = why_axes(plans)
    context = plans[0].workload.mesh.context
    assert context > 1
    assert lines[0].startswith(f"mesh.context={context} is best: ")
    assert lines[0].endswith(f"attention by {plans[0].workload.context_method}")
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        str(size) for size in (1, 2, 4, 8, 16) if size != context
    ]


def test_few_tokens_a_device_favour_tokens_that_travel():
    """Gathering all experts for a few tokens takes longer than sending the tokens."""
    found = workload_with(FINE, 4096, 16)
    plans = search(found, 16, H100, software("spmdtrain", "h100"))
    assert plans[0].workload.mesh.expert > 1


@pytest.mark.seconds
def test_the_line_to_paste_says_who_owns_experts():
    config = Path(__file__).parents[2] / "configs" / "qwen3_30b_a3b.toml"
    plans = plan(load(config), 16, "h100")
    mesh_sizes = [each.workload.mesh.sizes for each in plans]
    at = next(n for n, found in enumerate(mesh_sizes) if found["expert"] > 1 < found["tensor"])
    assert "rules.parameters.experts=expert,tensor" in plans[at].settings
    found = estimate(load(config, plans[at].settings), 16, "h100")
    # It is laid out as the plan, whose other settings are those of the file.
    assert replace(found.workload, config=plans[at].workload.config) == plans[at].workload
    assert found.memory.total == pytest.approx(plans[at].memory.total, rel=0.01)


def test_experts_that_no_other_device_holds_are_never_gathered():
    mesh = MeshShape(expert=8)
    few = FINE.model_copy(update={"layers": 4})
    found = workload_with(
        few, 4096, 64, microbatch=2, mesh=mesh, remat="full", dense_over_expert=True
    )
    own = memory.own_expert_elements(found) / found.layers_per_stage
    more = FINE.experts.model_copy(update={"count": 256})
    twice = found.with_settings(model={"experts": more})
    # Weights, copies, sums and moments of all layers, and one layer's gradients in its rounds.
    grown = memory.step_memory(twice).total - memory.step_memory(found).total
    layers = found.layers_per_stage
    rounds = memory._round_bytes(twice) - memory._round_bytes(found)
    assert grown == pytest.approx(layers * own * (4 + 8 + 4 + 2 + 2) + rounds, rel=0.01)


def test_further_tokens_are_planned_with_and_without_a_pipeline():
    config = tiny(*DEEPSEEK, "train.global_batch=16")
    meshes = [found.workload.mesh for found in plan(config, 4, "h100")]
    assert {mesh.pipeline for mesh in meshes} >= {1, 2}
    alone = estimate(tiny(*DEEPSEEK, "model.multi_token=none", "mesh.data=4"), 4, "h100")
    both = estimate(tiny(*DEEPSEEK, "mesh.data=4"), 4, "h100")
    assert both.time.terms["head"] == pytest.approx(3 * alone.time.terms["head"])
    assert both.memory.parameters > alone.memory.parameters


def test_rules_of_experts_are_not_searched_and_it_says_so():
    with pytest.raises(ConfigError, match=r"plan --rules does not support .*\[model.experts\]"):
        plan_rules(tiny(*LLAMA, *EXPERTS, "mesh.tensor=2"), 2, H100)
