"""`spmdtrain schedule`: prints a pipeline schedule, and draws it."""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdtrain.cli.outputs import write_picture
from spmdtrain.cli.shared_arguments import duration, positive_int
from spmdtrain.config import DONE, ConfigError
from spmdtrain.config.near import did_you_mean

if TYPE_CHECKING:
    from spmdtrain.pipeline.schedule import Table

# Ticks x stages. This many take seconds to print, and more are unreadable.
LARGEST_SCHEDULE = 1_000_000


def add_schedule(commands) -> None:
    """Adds the command `schedule` and its arguments."""
    schedule = commands.add_parser(
        "schedule",
        help="print a pipeline schedule: its timeline, bubble and stash; no devices",
    )
    schedule.add_argument(
        "--kind",
        default="1f1b",
        metavar="KIND",
        help="gpipe | 1f1b | interleaved | zero_bubble | "
        "a .json or .csv file with its own sizes (default: %(default)s)",
    )
    schedule.add_argument("--stages", type=positive_int, metavar="P", help="stages of the pipeline")
    schedule.add_argument("--microbatches", type=positive_int, metavar="M", help="per step")
    schedule.add_argument(
        "--chunks", type=positive_int, metavar="V", help="runs of layers per stage (default: 1)"
    )
    schedule.add_argument(
        "--forward",
        type=duration,
        metavar="TIME",
        help="time of a microbatch through all chunks of a stage, in any one unit (default: 1)",
    )
    schedule.add_argument(
        "--backward",
        type=duration,
        metavar="TIME",
        help="the same for the backward without the weight gradient",
    )
    schedule.add_argument(
        "--weight",
        type=duration,
        metavar="TIME",
        help="the same for the weight gradient; part of a backward that is not split",
    )
    schedule.add_argument(
        "--hop", type=duration, metavar="TIME", help="time from a stage to the next (default: 0)"
    )
    schedule.add_argument("--svg", metavar="FILE", help="write a picture, drawn to scale")
    schedule.add_argument(
        "--json", action="store_true", help="print JSON; --kind FILE.json reads it back"
    )
    schedule.set_defaults(command=run_schedule)


def run_schedule(parsed: argparse.Namespace) -> int:
    """Prints a pipeline schedule, and draws it with --svg."""
    from spmdtrain.pipeline import draw, file, timing
    from spmdtrain.pipeline.schedule import SCHEDULE_KINDS

    is_built = parsed.kind in SCHEDULE_KINDS
    sizes = _typed(parsed, "stages", "microbatches", "chunks")
    if is_built:
        table = _built_schedule(parsed.kind, **sizes)
    elif Path(parsed.kind).suffix in (".json", ".csv"):
        table = _schedule_of_file(parsed.kind, sizes)
    else:
        choices = f"{', '.join(SCHEDULE_KINDS)}, or a .json or .csv file"
        meant = did_you_mean(parsed.kind, SCHEDULE_KINDS)
        kind = f"--kind {parsed.kind:.80}"
        raise ConfigError(f"unknown pipeline schedule{meant}", asked=kind, fix=choices)

    times = timing.Times(**_typed(parsed, "forward", "backward", "weight", "hop"))
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


def _typed(parsed: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns the named arguments that were typed."""
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
    """Reads a schedule. Sizes that are typed must match the file."""
    from spmdtrain.pipeline import file

    table = file.read(path)
    for name, size in sizes.items():
        in_file = getattr(table, name)
        if in_file != size:
            raise ConfigError(
                f"{path} has its own sizes", asked=f"--{name} {size}", found=f"{name} {in_file}"
            )
    return table
