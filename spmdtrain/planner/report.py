"""Renders answers, as plain values for programs (`--json`) and as text for people."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from spmdtrain.compiled.step_memory import StepMemory, memory_in
from spmdtrain.parallel.mesh import mesh_in_words
from spmdtrain.planner.compiled_plans import CompiledPlan
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.hardware import Hardware
from spmdtrain.planner.cost.memory import SAFE_SHARE, Memory
from spmdtrain.planner.estimate import Estimate
from spmdtrain.planner.inference import InferenceEstimate
from spmdtrain.planner.plan import WITHIN_ERROR, Plan, why_axes
from spmdtrain.planner.plan_rules import Assignment

# `spmdtrain estimate`


def estimate_values(estimate: Estimate) -> dict[str, Any]:
    """Returns the JSON object of `estimate`; `plan` gives a list of them."""
    time = estimate.time
    workload = estimate.workload
    layout = dict(workload.mesh.sizes) | {
        "microbatch": workload.microbatch,
        "accumulation": workload.accumulation,
        "schedule": workload.schedule if workload.mesh.pipeline > 1 else None,
        "chunks": workload.chunks,
        "remat": workload.remat_setting,
        "zero": workload.zero,
        "sequence_parallel": workload.sequence_parallel,
        "collective_matmul": workload.collective_matmul,
    }
    return {
        "step_seconds": time.seconds,
        "tokens_per_second_per_device": time.tokens_per_second_per_device,
        "model_tflops_per_device": time.model_flops_per_device / 1e12,
        "mfu": time.mfu,
        "bubble_fraction": time.bubble_fraction,
        "fits": estimate.fits,
        "memory_bytes_per_device": estimate.memory.by_category(),
        "breakdown_seconds": {term: time.scale * seconds for term, seconds in time.terms.items()},
        "bound_by": {term: time.bound_by(term) for term in time.terms},
        "overlap": asdict(time.software.overlap),
        "layout": layout,
        "devices": workload.mesh.devices,
        "hardware": estimate.hardware.name,
        "checkpoint": asdict(estimate.checkpoints),
        "assumed": _assumed(estimate.hardware),
    }


def _assumed(hardware: Hardware) -> dict[str, Any]:
    """Returns the figures of the cluster, which a chip does not have."""
    return {
        "network_bandwidth": hardware.network_bandwidth,
        "network_source": _network_source(hardware),
        "devices_per_host": hardware.per_host,
        "power_limit": hardware.power_limit or hardware.power,
    }


def _network_source(hardware: Hardware) -> str:
    return hardware.sources.get("network_bandwidth", "not stated")


def estimate_text(estimate: Estimate) -> str:
    hardware = estimate.hardware
    return "\n".join(
        [
            *_layout_lines(estimate),
            "",
            *_speed_lines(estimate),
            "",
            *_breakdown_lines(estimate),
            "",
            *_memory_lines(estimate),
            "",
            _checkpoint_line(estimate),
            f"assumed: {hardware.network_bandwidth / 1e9:.0f} GB/s of network per device "
            f"({_network_source(hardware)})",
        ]
    )


def _layout_lines(estimate: Estimate) -> list[str]:
    workload = estimate.workload
    mesh = workload.mesh
    layout = mesh_in_words(mesh.sizes)
    if mesh.pipeline > 1:
        plural = "s" if workload.chunks > 1 else ""
        layout += f", {workload.schedule} {workload.chunks} chunk{plural}"
    return [
        f"{shape.parameters(workload.model) / 1e9:.3g} G parameters on "
        f"{mesh.devices} x {estimate.hardware.name}: {layout}",
        f"{workload.accumulation} x {workload.microbatch} sequences of "
        f"{workload.train.sequence_length} tokens per batch shard, remat {workload.remat_setting}",
    ]


def _speed_lines(estimate: Estimate) -> list[str]:
    time = estimate.time
    total = estimate.memory.total
    room = estimate.hardware.memory
    verdict = "fits" if estimate.fits else "does not fit"
    return [
        f"step       {time.seconds:.4g} s   "
        f"{time.tokens_per_second_per_device:,.0f} tokens/s per device",
        f"speed      {time.model_flops_per_device / 1e12:.3g} TFLOP/s per device, "
        f"mfu {time.mfu:.1%}, bubble {time.bubble_fraction:.1%}",
        f"memory     {total / 1e9:.3g} of {room / 1e9:.3g} GB, {total / room:.0%}: {verdict} "
        f"(safe: {SAFE_SHARE:.0%})",
    ]


def _breakdown_lines(estimate: Estimate) -> list[str]:
    """Lists the terms that take time, largest first."""
    time = estimate.time
    whole = sum(time.terms.values())
    terms = sorted(
        ((seconds, term) for term, seconds in time.terms.items() if seconds), reverse=True
    )
    return [
        f"  {_words(term):<24}{time.scale * seconds:>11.4g} s {seconds / whole:>6.1%}  "
        f"{time.bound_by(term)}"
        for seconds, term in terms
    ]


def _memory_lines(estimate: Estimate) -> list[str]:
    categories = estimate.memory.by_category()
    return [f"  {name:<24}{size / 1e9:>11.4g} GB" for name, size in categories.items() if size]


def _checkpoint_line(estimate: Estimate) -> str:
    checkpoints = estimate.checkpoints
    hours = checkpoints.seconds_between_failures / 3600
    return (
        f"checkpoint.every={checkpoints.every}: a save stops {checkpoints.save_seconds:.2g} s, "
        f"a device fails every {hours:.3g} h; "
        f"{checkpoints.lost_share:.2%} of the time is lost to both"
    )


def anchor_text(run: str, scale: float) -> str:
    return f"anchored on {run}: x {scale:.3g}"


# `spmdtrain estimate --sweep`


def sweep_values(key: str, rows: Sequence[tuple[float, Estimate]]) -> list[dict[str, Any]]:
    return [{key: value} | estimate_values(estimate) for value, estimate in rows]


def sweep_text(key: str, rows: Sequence[tuple[float, Estimate]]) -> str:
    lines = [f"{key:>20} {'step':>11} {'tokens/s/device':>16} {'mfu':>7}  fits"]
    for value, estimate in rows:
        time = estimate.time
        fits = "yes" if estimate.fits else "no"
        lines.append(
            f"{value:>20.4g} {time.seconds:>9.4g} s "
            f"{time.tokens_per_second_per_device:>16,.0f} {time.mfu:>7.1%}  {fits}"
        )
    return "\n".join(lines)


# `spmdtrain estimate --generate`


def inference_values(estimate: InferenceEstimate) -> dict[str, Any]:
    return asdict(estimate) | {"tokens_per_second": estimate.tokens_per_second}


def inference_text(estimate: InferenceEstimate, hardware: Hardware) -> str:
    milliseconds = 1e3 * estimate.token_seconds
    return "\n".join(
        [
            f"prefill    {estimate.prefill_seconds:.4g} s for "
            f"{estimate.batch} x {estimate.prompt} tokens ({estimate.prefill_bound})",
            f"decode     {milliseconds:.3g} ms per token, "
            f"{estimate.tokens_per_second:,.0f} tokens/s over {estimate.batch} sequences "
            f"({estimate.decode_bound})",
            f"cache      {estimate.cache_bytes / 1e9:.2f} GB, "
            f"weights {estimate.weight_bytes / 1e9:.2f} GB per device, "
            f"of {hardware.memory / 1e9:.0f} GB",
        ]
    )


# `spmdtrain estimate --compile`


def compiled_text(compiled: Mapping[str, Any], memory: Memory, needed: Mapping[str, float]) -> str:
    """Compares XLA's own figures with those of the formulas (memory.py, traffic.py)."""
    lines = [
        "",
        f"compiled in {compiled['compile_seconds']:.0f} s; memory in GB   formula       XLA",
    ]
    for name, ours, theirs in _compared_memory(memory_in(compiled), memory):
        lines.append(f"  {name:<36}{ours / 1e9:>9.3f} {theirs / 1e9:>9.3f}")
    for collective in compiled["collectives"] or []:
        in_a_loop = "  in a loop" if collective["inside_loop"] else ""
        lines.append(
            f"  {collective['count']:>3} x {collective['kind']:<20} over {collective['axis']:<16}"
            f"{collective['bytes'] / 1e6:>10.2f} MB{in_a_loop}"
        )
    for pair in compiled["overlap"] or []:
        lines.append(
            f"  {pair['beside_work']:>3} of {pair['count']} {pair['kind']} over {pair['axis']} "
            "overlap matmuls or loops"
        )
    if "unread" in compiled:
        lines.append(f"  what crosses the network in a step is unknown: {compiled['unread']}")
    for axis, sent, hidden in sent_by_axis(compiled["traffic"] or []):
        theory = f"{needed[axis] / 1e9:.2f}" if axis in needed else "nothing"
        lines.append(
            f"  {sent / 1e9:>9.2f} GB sent over {axis} in a step, {hidden / sent:.0%} overlapping "
            f"work; theory needs {theory}"
        )
    for name, count in compiled["calls"].items():
        lines.append(f"  {count:>3} x {name} called")
    return "\n".join(lines)


def sent_by_axis(traffic: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """Lists (mesh axes, bytes that a device sends over them in a step, those that overlap work)."""
    totals: dict[str, tuple[float, float]] = {}
    for collective in traffic:
        sent, hidden = totals.get(collective["axis"], (0.0, 0.0))
        beside = hidden + collective["sent_beside_work"]
        totals[collective["axis"]] = (sent + collective["sent"], beside)
    return [(axis, *total) for axis, total in totals.items() if total[0]]


def _compared_memory(xla: StepMemory, memory: Memory) -> list[tuple[str, float, float]]:
    """Lists (name, the formula's bytes, XLA's bytes)."""
    at_rest = memory.parameters + memory.optimizer
    return [
        ("arguments", at_rest, xla.argument_bytes),
        ("temporary", memory.of_step - at_rest, xla.temp_bytes),
        ("total", memory.of_step, xla.held),
    ]


# `spmdtrain plan`

PLAN_COLUMNS = (
    "step",
    "tok/s/dev",
    "mfu",
    "memory",
    "pipe",
    "data",
    "fsdp",
    "exp",
    "ctx",
    "tp",
    "mb",
    "schedule",
    "remat",
    "zero",
)


def plan_values(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    return [estimate_values(plan.estimate) | {"why": plan.why} for plan in plans]


def plan_text(shown: Sequence[Plan], plans: Sequence[Plan]) -> str:
    """Renders `shown`, some of the `plans`, as a table, best first, with the line to paste."""
    rows = [PLAN_COLUMNS, *map(_plan_cells, shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    notes = ["why not", *(plan.why for plan in shown)]
    table = [
        "  ".join([*map(str.rjust, row, widths), note])
        for row, note in zip(rows, notes, strict=True)
    ]
    fitting = sum(plan.fits for plan in plans)
    close = sum(plan.why.startswith("as good") for plan in shown)
    summary = (
        f"{fitting} layouts fit, {len(plans) - fitting} meshes do not; "
        f"{close} of those shown are within {WITHIN_ERROR:.0%}"
    )
    pasted = " ".join(f"--set {setting}" for setting in shown[0].settings)
    of_axes = why_axes(plans)
    if of_axes:
        summary = "\n".join([summary, "", *of_axes])
    return "\n".join([*table, "", summary, "", pasted])


def compiled_plans_values(compiled: Sequence[CompiledPlan]) -> list[dict[str, Any]]:
    return [
        estimate_values(result.plan.estimate)
        | {"xla_bytes_per_device": result.held, "compiled_step_seconds": result.seconds}
        | {"fits": result.fits, "problem": result.problem}
        for result in compiled
    ]


def compiled_plans_text(compiled: Sequence[CompiledPlan]) -> str:
    """Renders a table, best first, and the line to paste.

    In front of the columns of `plan` come memory by XLA, and the step with the overlap of the
    compiled program.
    """
    rows: list[tuple[str, ...]] = [("XLA", "compiled", *PLAN_COLUMNS)]
    for result in compiled:
        own = ("-", "-")
        if result.held is not None and result.seconds is not None:
            own = (f"{result.held / 1e9:.1f} GB", f"{result.seconds:.4g} s")
        rows.append((*own, *_plan_cells(result.plan)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    notes = ["", *map(_compiled_note, compiled)]
    table = [
        "  ".join([*map(str.rjust, row, widths), note]).rstrip()
        for row, note in zip(rows, notes, strict=True)
    ]
    best = compiled[0]
    if not best.fits:
        return "\n".join([*table, "", "none of them fits; compile more with --compile K"])
    pasted = " ".join(f"--set {setting}" for setting in best.plan.settings)
    return "\n".join([*table, "", pasted])


def _compiled_note(result: CompiledPlan) -> str:
    if result.held is None:
        return f"does not compile: {result.problem}"
    if not result.fits:
        return "does not fit"
    return ""


def _plan_cells(plan: Plan) -> tuple[str, ...]:
    time = plan.estimate.time
    workload = plan.workload
    mesh = workload.mesh
    pipelined = mesh.pipeline > 1
    return (
        f"{time.seconds:.4g} s",
        f"{time.tokens_per_second_per_device:,.0f}",
        f"{time.mfu:.1%}",
        f"{plan.memory.total / 1e9:.1f} GB",
        str(mesh.pipeline),
        str(mesh.data),
        str(mesh.fsdp),
        str(mesh.expert),
        str(mesh.context),
        str(mesh.tensor),
        str(workload.microbatch),
        f"{workload.schedule} {workload.chunks}" if pipelined else "-",
        workload.remat_setting,
        str(workload.zero),
    )


# `spmdtrain plan --rules`


def rules_values(assignments: Sequence[Assignment]) -> list[dict[str, Any]]:
    return [
        {
            "ways": assignment.ways,
            "stream": assignment.streams[0],
            "rules": assignment.rules,
            "seconds": assignment.seconds,
            "more_bytes": assignment.more_bytes,
        }
        for assignment in assignments
    ]


def rules_text(by_rules: Sequence[Assignment], freely: Sequence[Assignment]) -> str:
    """Renders a table, best first, and the settings to paste.

    `freely`: what a stream that changes inside the layer would reach.
    """
    lines = [
        f"{'attention':<11}{'mlp':<8}{'vocabulary':<12}{'stream':<8}{'step':>12}{'more memory':>16}"
    ]
    for assignment in by_rules:
        ways = assignment.ways
        lines.append(
            f"{ways['attention']:<11}{ways['mlp']:<8}{ways['vocabulary']:<12}"
            f"{assignment.streams[0]:<8}{assignment.seconds:>10.4g} s"
            f"{assignment.more_bytes / 1e9:>13.4g} GB"
        )
    best = freely[0]
    if best.seconds < 0.99 * by_rules[0].seconds:
        ways = ", ".join(f"{kind} {way}" for kind, way in best.ways.items())
        streams = " and ".join(best.streams)
        lines += ["", f"beyond [rules]: {ways}, streams {streams}: {best.seconds:.4g} s"]
    tables = {table: axes for table, axes in by_rules[0].rules.items() if axes}
    for table, axes in tables.items():
        lines += ["", f"[rules.{table}]"]
        lines += [f"{axis} = {json.dumps(over)}" for axis, over in axes.items()]
    if not tables:
        lines += ["", "the default rules are best: nothing to set"]
    return "\n".join(lines)


def _words(term: str) -> str:
    return term.replace("_", " ")
