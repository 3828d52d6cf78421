"""`spmdtrain report`: writes a run on one page, or compares several."""

import argparse
import json
import time
from pathlib import Path

from spmdtrain.cli.outputs import refuse_unwritable
from spmdtrain.config import DONE, ConfigError

FOLLOW_SECONDS = 10


def add_report(commands) -> None:
    """Adds the command `report` and its arguments."""
    report = commands.add_parser(
        "report", help="write a run on one page, RUN/report.html; several runs share their charts"
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    report.add_argument(
        "--out", metavar="FILE", help="the page (default: report.html in the first run)"
    )
    report.add_argument(
        "--follow",
        action="store_true",
        help=f"rewrite it every {FOLLOW_SECONDS} s while a run lives; the page reloads itself",
    )
    report.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    report.set_defaults(command=run_report)


def run_report(parsed: argparse.Namespace) -> int:
    """Writes the page of the runs, or prints their figures."""
    from spmdtrain.lab.page.heading import figures
    from spmdtrain.lab.page.page import MOST_RUNS, page, write
    from spmdtrain.lab.page.read import RunReader

    if len(parsed.runs) > MOST_RUNS:
        what = f"a page shows at most {MOST_RUNS} runs"
        raise ConfigError(what, asked=f"{len(parsed.runs)} runs", fix="fewer of them")
    if parsed.json and (parsed.follow or parsed.out):
        raise ConfigError("--json writes no page", fix="--json without --out and --follow")
    readers = [RunReader(Path(directory)) for directory in parsed.runs]
    runs = [reader.read() for reader in readers]
    if parsed.json:
        print(json.dumps([figures(run) for run in runs], indent=1))
        return DONE
    path = Path(parsed.runs[0]) / "report.html" if parsed.out is None else Path(parsed.out)
    refuse_unwritable(path)
    while parsed.follow and any(run.is_alive for run in runs):
        write(path, page(runs, reload_seconds=FOLLOW_SECONDS))
        time.sleep(FOLLOW_SECONDS)
        runs = [reader.read() for reader in readers]
    text = page(runs)
    write(path, text)
    steps = " and ".join(f"{len(run.steps):,}" for run in runs)
    print(f"{path}: {steps} steps, {len(text.encode()) / 1000:.0f} kB")
    return DONE
