"""The planner against published measurements.

benchmarks/planner/fit.py prints what is asserted here, row by row.
"""

import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.flops import model_flops_per_token
from spmdtrain.planner.cost.memory import SAFE_SHARE, Memory
from spmdtrain.planner.cost.software import FITTED
from spmdtrain.planner.cost.step_time import step_time
from spmdtrain.planner.cost.workload import MeshShape

HERE = Path(__file__).parents[2] / "benchmarks" / "planner"
CONSTANTS = [value for value, _ in FITTED.values()]


def _module(name: str):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


frameworks, megatron_memory, cases, fit, megatron_plan, paper_flops = (
    _module(name)
    for name in (
        *("frameworks", "megatron_memory", "cases", "fit", "megatron_plan", "paper_flops"),
    )
)
megatron_memory = megatron_memory.megatron_memory
A100 = cases.A100
MEGATRON = frameworks.framework("megatron-2021", "a100-80")
SOFTWARE = frameworks.software_table(*CONSTANTS)


def megatron_seconds(
    model: TransformerConfig, batch: int, microbatch: int, mesh: MeshShape, chunks: int = 1
) -> float:
    workload = cases.published_run(
        model=model,
        sequence_length=2048,
        global_batch=batch,
        microbatch=microbatch,
        mesh=mesh,
        remat="full",
        **cases.interleaved(chunks),
    )
    return step_time(workload, A100, MEGATRON).seconds


def test_every_published_table_is_either_for_training_or_for_judging():
    train = set(fit.SPLIT["train"])
    validate = set(fit.SPLIT["validate"])
    assert not train & validate
    assert train | validate == set(cases.MAKERS)


def test_sc21_parameters_and_aggregate_flops():
    for row in cases.rows(cases.tables()["sc21_table1"]):
        layers = row["layers"]
        embed = row["hidden"]
        billions = paper_flops.sc21_parameters(layers, embed, 51200, 2048) / 1e9
        assert f"{billions:.1f}" == f"{row['params_B']:.1f}"
        step_flops = paper_flops.sc21_flops(row["global_batch"], 2048, layers, embed, 51200)
        petaflops = step_flops / row["derived_iteration_s"] / 1e15
        assert petaflops == pytest.approx(row["aggregate_pflops"], rel=0.005)


def test_korthikanti_mfu_and_hfu():
    """Within 0.2 points, and within the rounding of the printed figures.

    Times are printed to 0.01 s and percentages to 0.1.
    """
    for row in cases.rows(cases.tables()["korthikanti_table5"]):
        model_flops, hardware_flops = paper_flops.korthikanti_flops(
            row["global_batch"], 2048, row["layers"], row["hidden"], 51200
        )
        for step_flops, printed in (
            (model_flops, row["mfu_pct"]),
            (hardware_flops, row["hfu_pct"]),
        ):
            least, found, most = (
                100 * step_flops / (row["iter_s_present_work"] + rounding) / row["gpus"] / 312e12
                for rounding in (0.005, 0.0, -0.005)
            )
            assert abs(found - printed) <= 0.2
            assert least - 0.05 <= printed <= most + 0.05


def test_flops_of_published_models_with_experts():
    """Within 3 %, and of gpt-oss without attention, which its printed figure leaves out."""
    for row in cases.rows(cases.tables()["megatron_bridge_moe_2511"]):
        model = cases.moe_model(row)
        if row["model"] == "GPT-OSS-120B":
            flops = 6 * (model.layers * shape.active_matrices(model) + model.embed * model.vocab)
        else:
            flops = model_flops_per_token(model, row["sequence"])
        printed = row["tflops_per_gpu"] / row["tokens_per_s_per_gpu"]
        assert flops / 1e12 == pytest.approx(printed, rel=0.03)


# Mean and worst absolute error in %, blind: a little above what fit.py prints.
@pytest.mark.parametrize(
    ("table", "mean", "worst"),
    [
        ("sc21_table1", 3.2, 6.5),
        ("korthikanti_table5", 3.2, 6),
        ("mcore_h100_weak_scaling", 6, 19),
        ("zb_table9", 1.5, 2),
        ("korthikanti_table4", 3.6, 5),
        ("sc21_table2", 3, 7),
        ("zb_table4", 2.5, 7),
        ("hagemann_layouts", 13.3, 28.5),
        ("hagemann_sweeps", 11.8, 31.5),
        ("llama3_table4", 7.8, 9.2),
        ("torchtitan_h100_2024", 3.6, 7),
        ("jax_toolbox_pax", 8.5, 19),
        ("megatron_bridge_moe_2511", 12, 31),
        ("megatron_bridge_moe_2602", 8, 25),
        ("megatron_bridge_moe_2608", 12, 27),
    ],
)
def test_step_times(table, mean, worst):
    found = [case for case in cases.cases(table) if case.table == table]
    errors = 100 * abs(fit.errors(found, SOFTWARE))
    assert errors.mean() < mean
    assert errors.max() < worst


# A little below what fit.py prints of each group: the rank correlation, and above, what the first
# choice costs in %.
@pytest.mark.parametrize(
    ("table", "group", "correlation", "first_choice"),
    [
        ("hagemann_layouts", "13B 2048 on 32", 0.85, 0.5),
        ("hagemann_layouts", "13B 8192 on 64", 0.92, 7),
        ("hagemann_layouts", "30B 8192 on 64", 0.75, 0.5),
        ("hagemann_layouts", "30B 2048 on 64", 0.62, 7),
        ("hagemann_layouts", "65B 2048 on 64", 0.82, 0.5),
        ("hagemann_sweeps", "13B 2048 on 64", 0.87, 0.5),
        ("hagemann_sweeps", "13B 8192 on 128", 0.8, 0.5),
        ("hagemann_sweeps", "30B 8192 on 128", 0.97, 0.5),
        ("hagemann_sweeps", "30B 2048 on 256", 0.66, 6.5),
        ("hagemann_sweeps", "65B 2048 on 128", 0.95, 0.5),
    ],
)
def test_ranks_of_the_layouts_of_one_run(table, group, correlation, first_choice):
    order = fit.ranks(cases.cases(table), SOFTWARE)[group]
    assert order.correlation > correlation
    assert 100 * order.first_choice < first_choice


def test_ranks_of_the_same_layouts_by_our_own_software():
    """Ours is what `plan` ranks by; only the order of another framework's times says anything."""
    ours = {"scaling-2023": SOFTWARE["spmdtrain"]}
    for group, order in fit.ranks(cases.cases("hagemann_layouts"), ours).items():
        assert order.correlation > 0.85, group
        assert order.first_choice < 0.01, group


@pytest.mark.parametrize(("layers", "stages", "last"), [(60, 16, 3), (60, 8, 7), (64, 8, 8)])
def test_layers_that_stages_do_not_divide_are_spread_over_them(layers, stages, last):
    """The last stage once had what full stages leave: of 60 layers on 16 stages none."""
    workload = cases.published_run(
        cases.HAGEMANN_MODELS["30B"].model_copy(update={"layers": layers}),
        sequence_length=8192,
        global_batch=512,
        microbatch=1,
        mesh=MeshShape(pipeline=stages, tensor=4),
    )
    assert workload.layers_of_last_stage == last
    rest = replace(workload, last_takes_rest=True).layers_of_last_stage
    assert rest == layers - (stages - 1) * workload.layers_per_stage


@pytest.mark.long
def test_tables_that_a_fit_has_not_seen():
    """Each training table, kept back from the fit, is predicted by the others."""
    for name, errors in fit.kept_back():
        assert 100 * abs(errors).mean() < 6, name
        assert 100 * abs(errors.mean()) < 4.2, name


def test_models_with_experts_after_calibrating_on_one_of_each_hardware_and_software():
    found = cases.cases("megatron_bridge_moe_2511")
    after = fit.calibrated(found, fit.errors(found, SOFTWARE))
    assert 100 * abs(after).mean() < 10


def test_printed_flops_tell_which_runs_had_a_second_token():
    deepseek = [
        (table, row["hardware"], shape.further_tokens(cases.moe_model(row)))
        for table in ("megatron_bridge_moe_2511", "megatron_bridge_moe_2602")
        for row in cases.rows(cases.tables()[table])
        if row["model"] == "DeepSeek-V3"
    ]
    without = [each[1] for each in deepseek if not each[2]]
    assert without == ["gb300", "gb200", "gb200"]  # of November 2025
    for row in cases.rows(cases.tables()["megatron_bridge_moe_2602"]):
        if row["model"] == "DeepSeek-V3":
            flops = model_flops_per_token(cases.moe_model(row), row["sequence"])
            assert flops / 1e12 == pytest.approx(row["derived_tflop_per_token"], rel=0.003)


def test_fsdp_over_more_hosts_after_calibrating_on_one():
    found = cases.cases("torchtitan_h100_2024")
    # Rows on 128 devices, calibrated by those on 8.
    after = fit.calibrated(found, fit.errors(found, SOFTWARE))
    assert 100 * abs(after).mean() < 2


def test_schedules_against_1f1b():
    found = cases.cases("zb_table4")
    predicted = np.array([case.predict(SOFTWARE) for case in found]).reshape(-1, 4)
    measured = np.array([case.measured for case in found]).reshape(-1, 4)
    errors = (predicted / predicted[:, :1]) / (measured / measured[:, :1]) - 1
    assert 100 * abs(errors[:, 1:]).mean() < 2.5


@pytest.mark.seconds
def test_the_fitted_constants_are_where_a_fit_ends():
    training = [cases.cases(name) for name in fit.SPLIT["train"]]
    fitted, _ = fit.fit(training)
    now = (fit.residuals(np.log(CONSTANTS), training) ** 2).sum()
    best = (fit.residuals(np.log(fitted), training) ** 2).sum()
    assert now < 1.02 * best


@pytest.fixture(scope="module")
def measured_memory() -> dict[str, list[tuple[Memory, float]]]:
    """Table -> (estimate, bytes measured) of each of its runs."""
    tables = cases.tables()
    workloads = list(cases.zb_workloads(tables["zb_table4"]))
    by_1f1b = {row["model"]: workload for workload, row in workloads if row["schedule"] == "1F1B"}
    table4 = [(megatron_memory(workload), 1e9 * row["memory_GB"]) for workload, row in workloads]
    check = []
    for row in cases.rows(tables["zb_memory_check"]):
        workload = by_1f1b[row["model"]]
        batch = row["microbatches"] * workload.microbatch
        estimate = megatron_memory(workload.with_settings(train={"global_batch": batch}))
        check.append((estimate, 1e9 * row["measured_GB"]))
    return {"zb_table4": table4, "zb_memory_check": check}


@pytest.mark.parametrize("table", ["zb_table4", "zb_memory_check"])
def test_memory_of_zero_bubble_runs(measured_memory, table):
    errors = [held.total / measured - 1 for held, measured in measured_memory[table]]
    assert 100 * np.abs(errors).mean() < 2
    assert 100 * np.abs(errors).max() < 6


def test_runs_on_devices_that_are_just_safe_fit(measured_memory):
    """The 80 % rule: what is estimated at 80 % of the memory or less does not run out of it."""
    runs = [run for table in measured_memory.values() for run in table]
    just_safe = [(held.total / SAFE_SHARE, measured) for held, measured in runs]
    assert all(measured < memory for memory, measured in just_safe)
    # 100 % would not do.
    assert any(measured > SAFE_SHARE * memory for memory, measured in just_safe)


def test_the_80_percent_rule_tells_zero3_runs_apart():
    """530B with microbatch 4 ran out of memory on 560 devices; on 640 it ran, as the others did."""
    table = cases.tables()["sc21_table2"]
    ran = [row for row in cases.rows(table) if row["scheme"] == "ZeRO-3"]
    not_safe = [
        (row["gpus"], row["microbatch"])
        for row in ran
        if not megatron_memory(cases.zero3_workload(row)).fits(A100)
    ]
    assert not_safe == [(640, 4)]
    ran_out = cases.zero3_workload(ran[3] | {"gpus": 560, "global_batch": 2240})
    assert not megatron_memory(ran_out).fits(A100)


def test_tensor_parallelism_is_best_up_to_a_host():
    """SC21, figure 13: tensor x pipeline on 64 GPUs."""
    model = cases.gpt(32, 20480, 128)
    seconds = {
        tensor: megatron_seconds(model, 32, 1, MeshShape(pipeline=64 // tensor, tensor=tensor))
        for tensor in (2, 4, 8, 16, 32)
    }
    assert min(seconds, key=seconds.get) == 8


def test_the_published_layout_of_1t_is_among_the_best():
    trillion = cases.published_run(
        cases.gpt(128, 25600, 160), sequence_length=2048, global_batch=3072, microbatch=1
    )
    start = time.process_time()
    plans = megatron_plan.search(trillion, 3072, A100, MEGATRON)
    assert time.process_time() - start < 5  # 0.02 s on an idle core; the issue asks for 0.5
    published = MeshShape(pipeline=64, data=6, tensor=8)
    ranks = [rank for rank, plan in enumerate(plans) if plan.workload.mesh == published]
    assert ranks[0] < 20
    assert plans[ranks[0]].seconds < 1.1 * plans[0].seconds


def test_interleaving_gains_less_as_the_batch_grows():
    """SC21, figure 12."""
    model = cases.gpt(96, 12288, 96)
    mesh = MeshShape(pipeline=12, tensor=8)
    small, large = (
        megatron_seconds(model, batch, 1, mesh) / megatron_seconds(model, batch, 1, mesh, chunks=4)
        for batch in (12, 60)
    )
    assert small > large > 1.1


def test_microbatch_2_is_best_at_a_large_batch():
    """SC21, figure 16."""
    model = cases.gpt(32, 15360, 128)
    mesh = MeshShape(pipeline=8, tensor=8)
    seconds = {size: megatron_seconds(model, 512, size, mesh) for size in (1, 2, 4, 8)}
    assert min(seconds, key=seconds.get) == 2
