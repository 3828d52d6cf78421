"""What computes without training: `schedule`, `estimate`, `plan`, `calibrate`."""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from spmdtrain.cli.devices import start_jax, without_devices
from spmdtrain.config import DONE, ConfigError, StorageError, load

LARGEST_SCHEDULE = 1_000_000  # ticks x stages: seconds of work here, and more than anybody looks at


def schedule(parsed: argparse.Namespace) -> int:
    from spmdtrain.parallel.pipeline import draw, file, schedule, timing

    sizes = {name: size for name in ("stages", "microbatches", "chunks") if (size := getattr(parsed, name)) is not None}
    if parsed.kind in schedule.KINDS:
        _refuse_sizes(parsed.kind, **sizes)
        table = schedule.build(parsed.kind, **sizes)
    elif Path(parsed.kind).suffix in (".json", ".csv"):
        table = file.read(parsed.kind)
        for name, size in sizes.items():
            if getattr(table, name) != size:
                found = f"{name} {getattr(table, name)}"
                raise ConfigError(f"{parsed.kind} has its own sizes", asked=f"--{name} {size}", found=found)
    else:
        choices = f"{', '.join(schedule.KINDS)}, or a .json or .csv file"
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
        print(f"\n{draw.bubbles(table, times, peers=parsed.kind in schedule.KINDS)}")
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
    from spmdtrain.planner import anchor, report
    from spmdtrain.planner.hardware import hardware

    device = hardware(parsed.hardware)
    config = report.with_vocab(load(parsed.config, parsed.set))
    if parsed.sweep is not None:
        rows = report.sweep(config, parsed.devices, device, parsed.sweep)
        print(json.dumps(rows) if parsed.json else report.show_sweep(rows))
        return DONE
    sizes = report.mesh_sizes(config, parsed.devices, device)
    if parsed.generate:
        return _generate(parsed, config, sizes, device)
    scale = 1.0 if parsed.anchor is None else anchor.anchored(parsed.anchor, device)
    price, held = report.priced(config, sizes, device, scale)
    found = report.describe(price, held) | ({"anchor": scale} if parsed.anchor else {})
    shown = [report.show(price, held)] + ([f"anchored on {parsed.anchor}: x {scale:.3g}"] if parsed.anchor else [])
    if parsed.compile:
        from spmdtrain.planner import deviceless

        found["compiled"] = deviceless.compile_step(config, sizes, device)
        shown.append(report.show_compiled(found["compiled"], held))
    print(json.dumps(found) if parsed.json else "\n".join(shown))
    return DONE


def _generate(parsed: argparse.Namespace, config, sizes, device) -> int:
    from dataclasses import asdict

    from spmdtrain.planner import report
    from spmdtrain.planner.generation import generate
    from spmdtrain.planner.job import job_of

    prompt, new = parsed.generate
    job = job_of(config, sizes)
    found = generate(job, parsed.batch or 1, prompt, new, device, report.our_stack(config, device))
    values = asdict(found) | {"tokens_per_second": found.tokens_per_second}
    print(json.dumps(values) if parsed.json else report.show_generation(found, device))
    return DONE


def plan(parsed: argparse.Namespace) -> int:
    _refuse_together(parsed, "rules", "top")
    without_devices()
    from spmdtrain.planner import report, search
    from spmdtrain.planner.hardware import hardware

    device = hardware(parsed.hardware)
    config = report.with_vocab(load(parsed.config, parsed.set))
    if parsed.rules:
        return _rules(parsed, config, device)
    plans = report.plan(config, parsed.devices, device, report.our_stack(config, device))
    best = search.distinct(plans, parsed.top or 10)
    if parsed.json:
        print(json.dumps([report.describe(plan.price, plan.memory) | {"why": plan.why} for plan in best]))
    else:
        print(report.show_plans(best, plans))
    return DONE


def _rules(parsed: argparse.Namespace, config, device) -> int:
    from spmdtrain.planner import assign, report

    job, _ = report.checked(config, report.mesh_sizes(config, parsed.devices, device))
    ours = report.our_stack(config, device)
    found = assign.assign(job, device, ours)
    if parsed.json:
        print(json.dumps([each.describe() for each in found]))
    else:
        print(assign.show(found, assign.assign(job, device, ours, by_rules=False)))
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
    """What is missing, and what would take minutes or more memory than there is."""
    if stages is None or microbatches is None:
        raise ConfigError(f"--kind {kind} needs --stages and --microbatches", fix="--stages 4 --microbatches 8")
    cells = stages * (microbatches * chunks + stages * (chunks + 1))
    if cells > LARGEST_SCHEDULE:
        asked = f"--stages {stages} --microbatches {microbatches} --chunks {chunks}"
        found = f"about {cells:,} ticks x stages, at most {LARGEST_SCHEDULE:,}"
        raise ConfigError("the schedule is too large to lay out", asked=asked, found=found)
