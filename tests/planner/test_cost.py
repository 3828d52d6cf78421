"""Prices: pipelines by the tables that run, terms by their physics."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from spmdtrain.config import ConfigError
from spmdtrain.config.schema import Llama
from spmdtrain.models.size import train_flops_per_token
from spmdtrain.parallel.pipeline import schedule, timing
from spmdtrain.planner import cost
from spmdtrain.planner.flops import model_flops_per_token
from spmdtrain.planner.hardware import DEVICES, hardware, swept
from spmdtrain.planner.job import Job, Layout, Shape, shape_of
from spmdtrain.planner.kernels import gather, hop, latency
from spmdtrain.planner.stack import BESIDE, stack

H100 = DEVICES["h100"]
OURS = stack("spmdtrain", "h100")
SHAPE = Shape(8, 1024, 16, 16, 64, 4096, 32768)


def job(**more) -> Job:
    return replace(Job(SHAPE, 1024, 64, 1), **more)


def test_the_closed_form_of_a_schedule_is_the_time_of_its_table():
    times = [timing.Times(0.7, 1.1, 0.4, hop) for hop in (0.0, 0.3, 5.0)]
    checked = 0
    for kind, p, m, v in product(schedule.KINDS, (2, 3, 4), (1, 2, 4, 6, 12), (1, 2, 3)):
        try:
            table = schedule.build(kind, p, m, v)
        except ConfigError:  # chunks of a kind without, or microbatches that do not come in groups
            continue
        for each in times:
            assert cost.lockstep_time(kind, p, m, v, each) == pytest.approx(timing.lockstep_time(table, each))
            checked += 1
    assert checked > 100


def test_a_pipeline_is_priced_by_the_table_that_runs():
    found = cost.price(job(layout=Layout(4), schedule="interleaved", chunks=2), H100, OURS)
    table = schedule.build("interleaved", 4, 64, 2)
    work = cost.layer_work(found.job, H100, OURS)
    times = [2 * sum(part[i] for part in work.values()) for i in range(3)]
    one_hop = hop(1024 * 1024 * 2, 1, H100)
    bubble = timing.lockstep_time(table, timing.Times(*times, hop=one_hop)) - 64 * sum(times)
    assert found.seconds["pipeline_bubble"] == pytest.approx(bubble)


def test_orders_of_other_frameworks_are_priced_as_simulated():
    times = timing.Times(1.0, 1.1, 0.7)
    for kind, p, m, v in (("1f1b", 4, 8, 1), ("1f1b", 8, 24, 1), ("interleaved", 4, 8, 2), ("zero_bubble", 8, 24, 1)):
        orders = timing.zb_h1_orders(p, m) if kind == "zero_bubble" else timing.megatron_orders(p, m, v)
        simulated = timing.order_time(orders, times) - m * times.microbatch
        assert cost.order_bubble(kind, p, v, times) == pytest.approx(simulated)


def test_flops_agree_with_the_metrics_of_a_run():
    config = Llama(layers=4, embed=256, heads=8, kv_heads=2, vocab=1000)
    assert model_flops_per_token(shape_of(config, 512), 512) == train_flops_per_token(config, 512)


def test_terms_follow_what_limits_them():
    before = cost.price(job(layout=Layout(data=8)), H100, OURS)
    faster = cost.price(before.job, swept(H100, "memory_bandwidth", 2 * H100.memory_bandwidth), OURS)
    assert faster.seconds["elementwise"] == pytest.approx(before.seconds["elementwise"] / 2)
    assert faster.seconds["matmul"] == before.seconds["matmul"]
    limited = cost.price(before.job, replace(H100, power_limit=H100.power / 4), OURS)
    assert limited.seconds["matmul"] > 1.7 * before.seconds["matmul"]
    assert sum(before.seconds.values()) == pytest.approx(before.step)


def test_the_number_of_members_on_a_host_decides_the_bandwidth_of_a_ring():
    device = replace(H100, link_latency=0.0, network_latency=0.0)
    wide = cost.price(job(layout=Layout(data=64)), device, OURS)
    narrow = cost.price(job(layout=Layout(data=8, tensor=8)), device, OURS)  # one member per host
    slowdown = narrow.seconds["data_reduction"] * 8 / wide.seconds["data_reduction"]
    assert slowdown == pytest.approx(8 * 7 / 8 / (63 / 64), rel=0.1)  # one card instead of eight


def test_a_ring_takes_one_hop_per_host_over_the_network():
    assert latency(8, 1, H100) == pytest.approx(7 * H100.link_latency)
    assert latency(16, 1, H100) == pytest.approx(13 * H100.link_latency + 2 * H100.network_latency)
    assert latency(4, 8, H100) == pytest.approx(3 * H100.network_latency)


def test_gathered_weights_slow_the_work_beside_them_and_the_first_and_last_stand_alone():
    ring = lambda elements, pieces=1: gather(2 * elements, 8, 1, H100, pieces=pieces)  # noqa: E731
    found = cost.price(job(layout=Layout(fsdp=8), microbatch=8), H100, OURS)
    layers = 3 * ring(8 * SHAPE.layer_parameters, 8)  # gathered twice, scattered once
    ends = ring(SHAPE.layer_parameters) + 2 * ring(SHAPE.outside)
    assert found.seconds["fsdp_collectives"] == pytest.approx(ends + BESIDE * layers)
    slow = replace(H100, link_bandwidth=1e9)  # nothing but collectives: of the work a fifth stands alone
    alone, hiding = (cost.price(replace(found.job, remat=remat), slow, OURS).seconds for remat in ("none", "full"))
    assert alone["fsdp_collectives"] > 100 * found.seconds["fsdp_collectives"]
    less = alone["fsdp_collectives"] - hiding["fsdp_collectives"]
    assert less == pytest.approx(0.8 * hiding["recompute"] * (1 - BESIDE) / (1 - 0.8 * BESIDE))


def test_hardware_files(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "h100"\nnetwork_bandwidth = 25e9\n[sources]\nnetwork_bandwidth = "measured"\n')
    mine = hardware(str(path))
    assert (mine.name, mine.network_bandwidth, mine.memory) == ("mine", 25e9, H100.memory)
    assert mine.sources["network_bandwidth"] == "measured"
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "other.toml").write_text('extends = "../mine.toml"\n')  # beside it, not where we are
    assert hardware(str(tmp_path / "inner" / "other.toml")).network_bandwidth == 25e9
    for text, complaint in (
        ("memory = 1e9\n", "lacks bfloat16"),
        ('extends = "h100"\nmemory = -1\n', "positive"),
        ('extends = "h100"\nmemroy = 1\n', "no such figure"),
        ("memory =\n", "not TOML"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            hardware(str(path))
    with pytest.raises(ConfigError, match="unknown hardware"):
        hardware("h1000")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("name = 3", "name must be a string; found 3"),
        ("sources = 'x'", "sources must be a table of strings; found 'x'"),
        ("sources = { memory = 3 }", "sources must be a table of strings"),
        ("extends = 3", "extends must be a string; found 3"),
        ("extends = ''", "unknown hardware"),
        ("extends = 'mine.toml'", "extends itself; found mine.toml -> mine.toml"),
        ("extends = 'other.toml'", "extends itself; found mine.toml -> other.toml -> mine.toml"),
        ("per_host = 2.5", "per_host must be a whole number of at least 1; found 2.5"),
        ("cores = 0.5", "cores must be a whole number"),
        ("bfloat16 = nan", "bfloat16 must be a positive number"),
        ("bfloat16 = inf", "bfloat16 must be a positive number"),
        ("memory = 1e-320", "memory must be a positive number"),
        (f"cores = 1{400 * '0'}", "cores must be a whole number"),
        ("memory = true", "memory must be a positive number"),
    ],
)
def test_a_wrong_line_of_a_hardware_file_is_named(tmp_path, monkeypatch, line, complaint):
    monkeypatch.chdir(tmp_path)
    Path("other.toml").write_text("extends = 'mine.toml'\n")
    Path("mine.toml").write_text(line if line.startswith("extends") else f"extends = 'h100'\n{line}\n")
    with pytest.raises(ConfigError, match=complaint):
        hardware("mine.toml")


@pytest.mark.parametrize(
    ("key", "value"), [("per_host", 0.5), ("cores", 0.5), ("memory_bandwidth", float("nan")), ("cores", float("inf"))]
)
def test_a_figure_that_no_device_has_is_not_swept(key, value):
    with pytest.raises(ConfigError, match=f"hardware.{key} must be a"):
        swept(H100, key, value)


def test_a_swept_figure_has_the_type_of_its_field():
    assert swept(H100, "power", 350.5).power == 350.5
    assert isinstance(swept(H100, "per_host", 4.0).per_host, int)


def test_every_figure_of_every_device_has_a_source():
    for device in DEVICES.values():
        assert {"bfloat16", "memory", "memory_bandwidth", "link_bandwidth", "network_bandwidth"} <= set(device.sources)
