"""Searching layouts: their order, and what fits nowhere."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import pytest
from helpers import tiny
from workloads import gpt, workload_with

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.config import ConfigError, load
from spmdtrain.config.load import from_resolved, resolved
from spmdtrain.config.schema import GPT, Llama
from spmdtrain.models.abstract import build_model
from spmdtrain.models.choose import choose_model
from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.cost.memory import SAFE_SHARE, exact_state, step_memory
from spmdtrain.planner.cost.software import software
from spmdtrain.planner.cost.step_time import step_time
from spmdtrain.planner.cost.workload import MeshShape
from spmdtrain.planner.estimate import estimate
from spmdtrain.planner.own_model import OwnModel
from spmdtrain.planner.plan import Plan, search
from spmdtrain.planner.plan import plan as plan_config

ROOT = Path(__file__).parent.parent.parent
A100 = DEVICES["a100-80"]
H100 = DEVICES["h100"]
TRILLION = workload_with(
    GPT(layers=128, embed=25600, heads=160, vocab=51200, dropout=0.1),
    sequence_length=2048,
    global_batch=3072,
)
LLAMA_8B = workload_with(
    Llama(layers=32, embed=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256),
    sequence_length=4096,
    global_batch=256,
    optimizer="lamb",  # whose moments stay on the device
)


@cache
def plans_of_llama() -> list[Plan]:
    return search(LLAMA_8B, 64, H100, software("spmdtrain", "h100"))


@pytest.mark.seconds
def test_plans_are_in_order_and_say_why_they_lost():
    # Too long for a mesh that splits the batch alone.
    long = LLAMA_8B.with_settings(train={"sequence_length": 16384})
    plans = search(long, 64, H100, software("spmdtrain", "h100"))
    fitting = [plan for plan in plans if plan.memory.total <= SAFE_SHARE * H100.memory]
    assert 0 < len(fitting) < len(plans)
    assert plans[: len(fitting)] == fitting
    seconds = [plan.seconds for plan in fitting]
    assert seconds == sorted(seconds)
    assert all(plan.workload.mesh.devices == 64 for plan in plans)
    assert fitting[-1].why.endswith(("(network)", "(idle)", "(compute)", "(memory)"))
    assert plans[-1].why.startswith("needs ")


@pytest.mark.seconds
def test_the_residual_stream_is_split_wherever_tensor_divides_the_tokens():
    setting = "rules.activations.stream_time=context,tensor"
    for plan in plans_of_llama():
        assert (setting in plan.settings) == (plan.workload.mesh.tensor > 1)
    odd = LLAMA_8B.with_settings(train={"sequence_length": 4095})
    plans = search(odd, 64, H100, software("spmdtrain", "h100"))
    assert not any(setting in plan.settings for plan in plans)


@pytest.mark.seconds
def test_matmuls_go_in_pieces_where_that_is_faster_and_fits():
    found = {}
    for plan in plans_of_llama():
        workload = plan.workload
        assert plan.memory == step_memory(workload)
        if workload.sequence_parallel and plan.fits:
            other = replace(workload, collective_matmul=not workload.collective_matmul)
            time = step_time(other, H100, plan.estimate.time.software, closed_form=True)
            fits = step_memory(other).fits(H100)
            assert plan.seconds <= time.seconds or not fits
            found[workload.collective_matmul, fits] = plan.settings
    assert "mesh.collective_matmul=true" in found[True, True]
    assert "mesh.collective_matmul=false" in found[False, True]
    assert (False, False) in found  # where pieces would not fit


SMALL = (
    *("model.layers=4", "model.embed=64", "model.heads=4", "model.vocab=256"),
    *("train.global_batch=32", "train.sequence_length=64", "model.max_length=64"),
)


@pytest.mark.parametrize(
    "settings",
    [
        ("compression.codec=lowrank",),
        ("compression.codec=int8", "compression.within=2"),
        ("precision.matmul=float8", "precision.scaling=delayed"),
        ("precision.matmul=mxfp8", "train.scan_layers=false"),
        ("precision.accumulate=bfloat16", "train.global_batch=128"),
        ("train.scan_layers=false",),
        ("train.remat=offload",),
        ("optimizer.memory=host",),
        ("finetune.frozen_layers=2",),
    ],
    ids=" ".join,
)
@pytest.mark.seconds
def test_a_run_is_offered_only_what_it_takes(settings):
    values = resolved(tiny(*SMALL, *settings))
    plans = plan_config(from_resolved(values), 8, "b200")
    assert len({each.workload.mesh for each in plans}) > 5
    for each in plans[::30]:
        st.shard(from_resolved(values, each.settings), devices=jax.devices())


def test_where_a_run_takes_no_layout_its_own_line_says_why():
    with pytest.raises(ConfigError, match="no multiple of 32"):
        plan_config(tiny(*SMALL, "precision.matmul=mxfp8", "model.embed=48"), 8, "b200")


def test_what_fits_nowhere_is_one_line_with_what_would_help():
    with pytest.raises(ConfigError, match=r"fits nowhere.*1e\+03 G.*--devices \d+"):
        search(TRILLION, 8, A100, software("spmdtrain", "a100-80"))


def test_a_batch_that_nothing_divides_is_one_line_with_what_would_help():
    seven_heads = gpt(layers=8, embed=512, heads=7, head_dim=64, vocab=32768)
    one_sequence = workload_with(seven_heads, sequence_length=1024, global_batch=1)
    with pytest.raises(ConfigError, match="no layout divides the batch"):
        search(one_sequence, 11, H100, software("spmdtrain", "h100"))


@pytest.mark.seconds
def test_estimate_and_plan_agree_and_the_line_to_paste_works(config, capsys):
    assert (
        main(["plan", config, "--devices", "8", "--hardware", "h100", "--top", "3", "--json"]) == 0
    )
    plans = json.loads(capsys.readouterr().out)
    assert [plan["step_seconds"] for plan in plans] == sorted(
        plan["step_seconds"] for plan in plans
    )
    assert main(["plan", config, "--devices", "8", "--hardware", "h100"]) == 0
    pasted = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert (
        main(["estimate", config, "--hardware", "h100", "--devices", "8", "--json", *pasted]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] == pytest.approx(plans[0]["step_seconds"])
    assert found["layout"] == plans[0]["layout"]
    memory = found["memory_bytes_per_device"]
    categories = ["parameters", "gradients", "optimizer", "activations", "logits", "buffers"]
    assert memory["total"] == sum(memory[name] for name in categories)
    assert found["step_seconds"] == pytest.approx(sum(found["breakdown_seconds"].values()))
    keys = "tokens_per_second_per_device model_tflops_per_device mfu bubble_fraction fits"
    assert set(keys.split()) <= set(found)


@pytest.mark.parametrize("devices", [100, 96, 7])
@pytest.mark.seconds
def test_a_plan_uses_all_devices_and_the_estimate_takes_it(config, devices):
    """100 devices stand on 20 hosts of 5: tensor=8, which would leave 4 of them, is no plan."""
    settings = [
        f"train.global_batch={48 * devices}",
        "model.heads=40",
        "model.kv_heads=40",
        "model.embed=640",
    ]
    best, *others = plan_config(load(config, settings), devices, "h100")
    assert {each.workload.mesh.devices for each in (best, *others)} == {devices}
    pasted = load(config, [*settings, *best.settings])
    assert estimate(pasted, devices, "H100").time.seconds == pytest.approx(best.seconds, rel=0.02)


# Models of one's own


@pytest.mark.long
def test_a_plan_counts_the_weights_and_moments_of_an_own_model_exactly(monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = ["model.extra.state=96", "optimizer.ema=0.9", "train.global_batch=64"]
    config = load("examples/hybrid.toml", settings).with_vocab(251)
    plans = plan_config(config, 16, "h100")
    by_layout = {(p.workload.mesh, p.workload.chunks, p.workload.zero): p for p in plans}
    some = list(by_layout.values())[::6]
    assert {plan.workload.zero for plan in some} == {0, 1}
    assert {plan.workload.mesh.pipeline for plan in some} >= {1, 2}
    assert {plan.workload.mesh.tensor for plan in some} >= {1, 2}
    for plan in some:
        sizes = plan.workload.mesh.sizes
        laid_out = load("examples/hybrid.toml", [*settings, *plan.settings]).with_vocab(251)
        held = (plan.memory.parameters, plan.memory.optimizer)
        assert held == exact_state(laid_out, sizes), plan.settings
    unsplit = OwnModel(config).state(replace(plans[0].workload, mesh=MeshShape()))
    size = build_model(*choose_model(config)).size
    assert unsplit.resident == size
    assert unsplit.parameters == 4 * size


@pytest.mark.seconds
def test_a_plan_of_an_own_model_says_what_of_it_is_its_own(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["plan", "examples/hybrid.toml", "--devices", "2", "--hardware", "h100"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("examples/hybrid.py:Hybrid: parameters, gradients, optimizer state")
