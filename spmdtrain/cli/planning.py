"""Runs the commands that train nothing: `schedule`, `estimate`, `plan`, `calibrate`."""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdtrain.cli.devices import start_jax, without_devices
from spmdtrain.cli.outputs import refuse_unwritable, write_picture
from spmdtrain.config import DONE, ConfigError, load
from spmdtrain.config.near import did_you_mean
from spmdtrain.config.schema import RunConfig
from spmdtrain.processes import xla_flags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spmdtrain.pipeline.schedule import Table
    from spmdtrain.planner.cost.hardware import Hardware
    from spmdtrain.planner.plan import Plan

# Ticks x stages: takes seconds here, and is more than anybody looks at.
LARGEST_SCHEDULE = 1_000_000


# --- schedule


def schedule(parsed: argparse.Namespace) -> int:
    """Prints a pipeline schedule, and draws it with --svg."""
    from spmdtrain.pipeline import draw, file, timing
    from spmdtrain.pipeline.schedule import SCHEDULE_KINDS

    is_built = parsed.kind in SCHEDULE_KINDS
    sizes = _given(parsed, "stages", "microbatches", "chunks")
    if is_built:
        table = _built_schedule(parsed.kind, **sizes)
    elif Path(parsed.kind).suffix in (".json", ".csv"):
        table = _schedule_of_file(parsed.kind, sizes)
    else:
        choices = f"{', '.join(SCHEDULE_KINDS)}, or a .json or .csv file"
        meant = did_you_mean(parsed.kind, SCHEDULE_KINDS)
        asked = f"--kind {parsed.kind:.80}"
        raise ConfigError(f"unknown pipeline schedule{meant}", asked=asked, fix=choices)

    times = timing.Times(**_given(parsed, "forward", "backward", "weight", "hop"))
    if not times.microbatch:
        raise ConfigError(
            "at least one of --forward, --backward and --weight must be above 0", found="0 for all"
        )
    if parsed.svg is not None:
        write_picture(parsed.svg, draw.svg(table, times))

    if parsed.json:
        print(json.dumps(file.to_json(table, times)))
    else:
        width = shutil.get_terminal_size((0, 0)).columns or None  # no terminal: nothing to fit into
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(draw.draw(table, times, width=width, colour=colour))
        print(f"\n{draw.bubbles(table, times, peers=is_built)}")
    if parsed.svg is not None:
        output = sys.stderr if parsed.json else sys.stdout  # the JSON stays alone on stdout
        print(f"{parsed.svg}: the same, drawn to scale", file=output)
    return DONE


def _given(parsed: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns those of the named arguments that were typed."""
    values = {name: getattr(parsed, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _built_schedule(
    kind: str, stages: int | None = None, microbatches: int | None = None, chunks: int = 1
) -> "Table":
    """Builds a named schedule.

    Refuses missing sizes, and sizes that would take minutes or too much memory.
    """
    from spmdtrain.pipeline.schedule import build

    if stages is None or microbatches is None:
        raise ConfigError(
            f"--kind {kind} needs --stages and --microbatches",
            fix="--stages 4 --microbatches 8",
        )
    cells = stages * (microbatches * chunks + stages * (chunks + 1))
    if cells > LARGEST_SCHEDULE:
        raise ConfigError(
            "the schedule is too large to lay out",
            asked=f"--stages {stages} --microbatches {microbatches} --chunks {chunks}",
            found=f"about {cells:,} ticks x stages, at most {LARGEST_SCHEDULE:,}",
        )
    return build(kind, stages, microbatches, chunks)


def _schedule_of_file(path: str, sizes: dict[str, int]) -> "Table":
    """Reads a schedule. Sizes need not be typed; those that are must match the file."""
    from spmdtrain.pipeline import file

    table = file.read(path)
    for name, size in sizes.items():
        found = getattr(table, name)
        if found != size:
            raise ConfigError(
                f"{path} has its own sizes", asked=f"--{name} {size}", found=f"{name} {found}"
            )
    return table


# --- estimate


def estimate(parsed: argparse.Namespace) -> int:
    """Prints the cost of a step, or of generation, on hardware that need not be present."""
    _refuse_together(parsed, "sweep", "generate", "compile", "anchor")
    _refuse_together(parsed, "generate", "compile", "anchor")
    if parsed.batch and not parsed.generate:
        raise ConfigError(
            "--batch is the number of sequences for --generate, which is missing",
            asked=f"--batch {parsed.batch}",
            fix=f"--generate 512+128 --batch {parsed.batch}",
        )
    from spmdtrain.planner.cost.hardware import hardware as named_hardware

    hardware = named_hardware(parsed.hardware)
    config = load(parsed.config, parsed.set)
    if parsed.compile:
        xla_flags.set_xla_flags(deviceless=True)
    without_devices()
    if parsed.sweep is not None:
        return _sweep(parsed, config, hardware)
    if parsed.generate:
        return _estimate_inference(parsed, config, hardware)
    return _estimate_step(parsed, config, hardware)


def _estimate_step(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import anchor, deviceless, report, traffic
    from spmdtrain.planner.estimate import estimate as estimate_config
    from spmdtrain.planner.estimate import with_vocab
    from spmdtrain.planner.own_model import describe

    config = with_vocab(config)
    found = estimate_config(config, parsed.devices, hardware)
    scale = 1.0
    if parsed.anchor is not None:
        scale = anchor.anchor_scale(Path(parsed.anchor), hardware)
        found = found.scaled(scale)

    compiled = None
    if parsed.compile:
        compiled = deviceless.compile_step(config, found.workload.mesh.sizes, hardware)
        if parsed.anchor is None:  # the anchor's scale already includes what its run hides
            found = found.as_compiled(compiled["traffic"] or [])

    values = report.estimate_values(found)
    texts = [report.estimate_text(found)]
    if config.model.make:
        texts.append(describe(config))
    if parsed.anchor is not None:
        values["anchor"] = scale
        texts.append(report.anchor_text(parsed.anchor, scale))
    if compiled is not None:
        needed = traffic.needed_traffic(found.workload)
        values["compiled"] = compiled
        values["needed_traffic"] = needed
        texts.append(report.compiled_text(compiled, found.memory, needed))
    print(json.dumps(values) if parsed.json else "\n".join(texts))
    return DONE


def _sweep(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import report
    from spmdtrain.planner.estimate import sweep

    figure, rows = sweep(config, parsed.devices, hardware, parsed.sweep)
    if parsed.json:
        print(json.dumps(report.sweep_values(figure, rows)))
    else:
        print(report.sweep_text(figure, rows))
    return DONE


def _estimate_inference(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import report
    from spmdtrain.planner.inference import estimate_inference

    prompt, new = parsed.generate
    found = estimate_inference(
        config, parsed.devices, hardware, batch=parsed.batch or 1, prompt=prompt, new=new
    )
    if parsed.json:
        print(json.dumps(report.inference_values(found)))
    else:
        print(report.inference_text(found, hardware))
    return DONE


# --- plan


def plan(parsed: argparse.Namespace) -> int:
    """Prints the best layouts on some devices; with --rules, the best rules of one mesh."""
    _refuse_together(parsed, "rules", "top", "compile")
    _refuse_together(parsed, "top", "compile")
    from spmdtrain.planner.cost.hardware import hardware as named_hardware

    hardware = named_hardware(parsed.hardware)
    config = load(parsed.config, parsed.set)
    without_devices()
    if parsed.rules:
        return _plan_rules(parsed, config, hardware)
    return _plan_layout(parsed, config, hardware)


def _plan_layout(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import report
    from spmdtrain.planner.own_model import describe
    from spmdtrain.planner.plan import best_of_each_mesh
    from spmdtrain.planner.plan import plan as plan_config

    plans = plan_config(config, parsed.devices, hardware)
    if parsed.compile:
        return _plan_compiled(parsed, best_of_each_mesh(plans, parsed.compile))
    shown = best_of_each_mesh(plans, parsed.top or 10)
    if parsed.json:
        print(json.dumps(report.plan_values(shown)))
    else:
        if config.model.make:
            print(describe(config), end="\n\n")
        print(report.plan_text(shown, plans))
    return DONE


def _plan_compiled(parsed: argparse.Namespace, plans: "Sequence[Plan]") -> int:
    from spmdtrain.planner import deviceless, report
    from spmdtrain.planner.compiled_plans import compile_plans
    from spmdtrain.planner.cost.hardware import hardware as named_hardware

    # A missing compiler is one line now, not a reason next to every layout.
    deviceless.described_devices(named_hardware(parsed.hardware), parsed.devices)
    arguments = [parsed.config, "--hardware", parsed.hardware, "--devices", str(parsed.devices)]
    for setting in parsed.set:
        arguments += ["--set", setting]
    compiled = compile_plans(plans, arguments)
    if parsed.json:
        print(json.dumps(report.compiled_plans_values(compiled)))
    else:
        print(report.compiled_plans_text(compiled))
    return DONE


def _plan_rules(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import report
    from spmdtrain.planner.plan_rules import plan_rules

    by_rules, freely = plan_rules(config, parsed.devices, hardware)
    if parsed.json:
        print(json.dumps(report.rules_values(by_rules)))
    else:
        print(report.rules_text(by_rules, freely))
    return DONE


# --- calibrate


def calibrate(parsed: argparse.Namespace) -> int:
    """Measures this machine, and writes a file that --hardware reads."""
    if not parsed.out.endswith(".toml"):
        raise ConfigError(
            f"--out {parsed.out}: --hardware reads .toml files", fix=f"--out {parsed.out}.toml"
        )
    refuse_unwritable(Path(parsed.out))  # before minutes of measuring
    start_jax(parsed)
    from spmdtrain.planner import calibrate

    found = calibrate.calibrate()
    calibrate.write(found, Path(parsed.out))
    print(
        f"{parsed.out}: {found['bfloat16'] / 1e12:.4g} TFLOP/s bfloat16, "
        f"{found['float32'] / 1e12:.4g} float32, "
        f"{found['memory_bandwidth'] / 1e9:.4g} GB/s memory, "
        f"{found['link_bandwidth'] / 1e9:.4g} GB/s links"
    )
    return DONE


def _refuse_together(parsed: argparse.Namespace, first: str, *others: str) -> None:
    """Refuses an option together with others that it would silently ignore."""
    if getattr(parsed, first) in (None, False):
        return
    for other in others:
        if getattr(parsed, other) not in (None, False):
            raise ConfigError(
                f"--{first} and --{other} cannot go together", fix="one of them at a time"
            )
