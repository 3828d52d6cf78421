"""The commands that train nothing: `schedule`, `estimate`, `plan`, `calibrate`."""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spmdtrain.cli.devices import start_jax, without_devices
from spmdtrain.config import DONE, ConfigError, StorageError, load
from spmdtrain.config.schema import RunConfig
from spmdtrain.parallel import xla_flags

if TYPE_CHECKING:
    from spmdtrain.planner.hardware import Hardware

LARGEST_SCHEDULE = 1_000_000  # ticks x stages: seconds of work here, and more than anybody looks at


def schedule(parsed: argparse.Namespace) -> int:
    from spmdtrain.parallel.pipeline import draw, file, schedule, timing

    sizes = {name: size for name in ("stages", "microbatches", "chunks") if (size := getattr(parsed, name)) is not None}
    if parsed.kind in schedule.SCHEDULE_KINDS:
        _refuse_sizes(parsed.kind, **sizes)
        table = schedule.build(parsed.kind, **sizes)
    elif Path(parsed.kind).suffix in (".json", ".csv"):
        table = file.read(parsed.kind)
        for name, size in sizes.items():
            if getattr(table, name) != size:
                found = f"{name} {getattr(table, name)}"
                raise ConfigError(f"{parsed.kind} has its own sizes", asked=f"--{name} {size}", found=found)
    else:
        choices = f"{', '.join(schedule.SCHEDULE_KINDS)}, or a .json or .csv file"
        raise ConfigError("unknown pipeline schedule", asked=f"--kind {parsed.kind}", fix=choices)

    names = ("forward", "backward", "weight", "hop")
    times = timing.Times(**{name: time for name in names if (time := getattr(parsed, name)) is not None})
    if not times.microbatch:
        raise ConfigError("one of --forward, --backward and --weight takes some time", found="0 for all")
    if parsed.svg is not None:
        try:
            Path(parsed.svg).write_text(draw.svg(table, times), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot write {parsed.svg}: {error.strerror}") from None

    if parsed.json:
        print(json.dumps(file.to_json(table, times)))
    else:
        width = shutil.get_terminal_size((0, 0)).columns or None  # no terminal: nothing to fit into
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(draw.draw(table, times, width=width, colour=colour))
        print(f"\n{draw.bubbles(table, times, peers=parsed.kind in schedule.SCHEDULE_KINDS)}")
    if parsed.svg is not None:
        print(f"{parsed.svg}: the same, drawn to scale", file=sys.stderr if parsed.json else sys.stdout)
    return DONE


def estimate(parsed: argparse.Namespace) -> int:
    _refuse_together(parsed, "sweep", "generate", "compile", "anchor")
    _refuse_together(parsed, "generate", "compile", "anchor")
    if parsed.batch and not parsed.generate:
        fix = f"--generate 512+128 --batch {parsed.batch}"
        raise ConfigError("--batch is how many sequences --generate makes", asked=f"--batch {parsed.batch}", fix=fix)
    without_devices()
    if parsed.compile:
        xla_flags.set_xla_flags(deviceless=True)
    from spmdtrain.planner.hardware import hardware as named_hardware

    hardware = named_hardware(parsed.hardware)
    config = load(parsed.config, parsed.set)
    if parsed.sweep is not None:
        return _sweep(parsed, config, hardware)
    if parsed.generate:
        return _estimate_inference(parsed, config, hardware)
    return _estimate_step(parsed, config, hardware)


def _estimate_step(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import anchor, deviceless, report
    from spmdtrain.planner.estimate import estimate as estimate_config
    from spmdtrain.planner.estimate import with_vocab

    config = with_vocab(config)
    found = estimate_config(config, parsed.devices, hardware)
    scale = 1.0
    if parsed.anchor is not None:
        scale = anchor.anchor_scale(Path(parsed.anchor), hardware)
        found = found.scaled(scale)

    values = report.estimate_values(found)
    texts = [report.estimate_text(found)]
    if parsed.anchor is not None:
        values["anchor"] = scale
        texts.append(report.anchor_text(parsed.anchor, scale))
    if parsed.compile:
        compiled = deviceless.compile_step(config, found.workload.mesh.sizes, hardware)
        values["compiled"] = compiled
        texts.append(report.compiled_text(compiled, found.memory))
    print(json.dumps(values) if parsed.json else "\n".join(texts))
    return DONE


def _sweep(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import report
    from spmdtrain.planner.estimate import sweep

    figure, rows = sweep(config, parsed.devices, hardware, parsed.sweep)
    print(json.dumps(report.sweep_values(figure, rows)) if parsed.json else report.sweep_text(figure, rows))
    return DONE


def _estimate_inference(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import report
    from spmdtrain.planner.inference import estimate_inference

    prompt, new = parsed.generate
    found = estimate_inference(config, parsed.devices, hardware, batch=parsed.batch or 1, prompt=prompt, new=new)
    print(json.dumps(report.inference_values(found)) if parsed.json else report.inference_text(found, hardware))
    return DONE


def plan(parsed: argparse.Namespace) -> int:
    _refuse_together(parsed, "rules", "top")
    without_devices()
    from spmdtrain.planner.hardware import hardware as named_hardware

    hardware = named_hardware(parsed.hardware)
    config = load(parsed.config, parsed.set)
    return _plan_rules(parsed, config, hardware) if parsed.rules else _plan_layout(parsed, config, hardware)


def _plan_layout(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import report
    from spmdtrain.planner.plan import best_of_each_mesh
    from spmdtrain.planner.plan import plan as plan_config

    plans = plan_config(config, parsed.devices, hardware)
    shown = best_of_each_mesh(plans, parsed.top or 10)
    print(json.dumps(report.plan_values(shown)) if parsed.json else report.plan_text(shown, plans))
    return DONE


def _plan_rules(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import report
    from spmdtrain.planner.plan_rules import plan_rules

    by_rules, freely = plan_rules(config, parsed.devices, hardware)
    print(json.dumps(report.rules_values(by_rules)) if parsed.json else report.rules_text(by_rules, freely))
    return DONE


def calibrate(parsed: argparse.Namespace) -> int:
    if not parsed.out.endswith(".toml"):
        raise ConfigError(f"--out {parsed.out}: --hardware reads .toml files", fix=f"--out {parsed.out}.toml")
    _refuse_unwritable(Path(parsed.out))  # before minutes of measuring
    start_jax(parsed)
    from spmdtrain.planner import calibrate

    found = calibrate.calibrate()
    calibrate.write(found, Path(parsed.out))
    print(
        f"{parsed.out}: {found['bfloat16'] / 1e12:.4g} TFLOP/s bfloat16, {found['float32'] / 1e12:.4g} float32, "
        f"{found['memory_bandwidth'] / 1e9:.4g} GB/s memory, {found['link_bandwidth'] / 1e9:.4g} GB/s links"
    )
    return DONE


def _refuse_together(parsed: argparse.Namespace, first: str, *others: str) -> None:
    """`first` would pass over the other options in silence."""
    given = [name for name in (first, *others) if getattr(parsed, name) not in (None, False)]
    if first in given[:1] and given[1:]:
        raise ConfigError(f"--{first} and --{given[1]} cannot go together", fix="one of them at a time")


def _refuse_unwritable(path: Path) -> None:
    """Leaves the file, or that there is none, as it was."""
    try:
        there = os.path.lexists(path)
        path.open("a").close()
        if not there:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


def _refuse_sizes(kind: str, stages: int | None = None, microbatches: int | None = None, chunks: int = 1) -> None:
    """Refuses missing sizes, and those that would take minutes or more memory than there is."""
    if stages is None or microbatches is None:
        raise ConfigError(f"--kind {kind} needs --stages and --microbatches", fix="--stages 4 --microbatches 8")
    cells = stages * (microbatches * chunks + stages * (chunks + 1))
    if cells > LARGEST_SCHEDULE:
        asked = f"--stages {stages} --microbatches {microbatches} --chunks {chunks}"
        found = f"about {cells:,} ticks x stages, at most {LARGEST_SCHEDULE:,}"
        raise ConfigError("the schedule is too large to lay out", asked=asked, found=found)
