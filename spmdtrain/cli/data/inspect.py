"""`spmdtrain data inspect`: shows the data that a run reads, or read at a step."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spmdtrain.cli.devices import without_devices
from spmdtrain.cli.shared_arguments import add_own, add_set, positive_int
from spmdtrain.config import DONE, DataError, load
from spmdtrain.config.schema import RunConfig
from spmdtrain.config.settable import OF_PLACES, check_settable

if TYPE_CHECKING:
    from spmdtrain.lab.replay.written import WrittenRun


def add_inspect(commands) -> None:
    """Adds the command `data inspect` and its arguments."""
    inspect = commands.add_parser(
        "inspect", help="show what a run is fed: windows, what is masked, lengths, repetitions"
    )
    inspect.add_argument("path", metavar="CONFIG|RUN", help="a TOML file, or a run directory")
    inspect.add_argument(
        "--step", type=positive_int, default=1, metavar="N", help="step to look at (default: 1)"
    )
    inspect.add_argument(
        "--windows", type=positive_int, default=2, metavar="K", help="windows to show (default: 2)"
    )
    inspect.add_argument(
        "--colour",
        choices=("auto", "always", "never"),
        default="auto",
        help="show what counts in the loss in green instead of marking the rest as [-masked-] "
        "(default: auto, in a terminal)",
    )
    add_own(inspect)
    add_set(inspect, "override one setting, of a run data.path or data.tokenizer; may be repeated")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(command=run_inspect)


def run_inspect(parsed: argparse.Namespace) -> int:
    """Prints the counts of the data and the first windows of a step."""
    without_devices()
    from spmdtrain.data.cut_samples import in_pieces, sequences_of
    from spmdtrain.data.inspected.counts import count_data
    from spmdtrain.data.inspected.passages import windows_of
    from spmdtrain.data.source import open_data

    written = None
    if Path(parsed.path).is_dir():
        config, written = _settings_of_run(parsed)
    else:
        config = load(parsed.path, parsed.set)
    config, data = open_data(config)
    train = config.train
    ids = np.arange(train.samples_before(parsed.step - 1), train.samples_before(parsed.step))
    line = written.steps.get(parsed.step, {}) if written else {}
    if "samples" in line:
        first, last = line["samples"]
        ids = np.arange(first, last + 1)
    pieces = train.stage_of(parsed.step).pieces
    batch = in_pieces(data.train_samples(config), pieces)(sequences_of(ids, pieces))
    proven = written is not None and _is_as_recorded(parsed, written, batch)
    windows = windows_of(data, batch, config.data.packing)
    shown = windows[: parsed.windows]
    counts = count_data(data)
    if parsed.json:
        document = {
            "step": parsed.step,
            "samples": [int(ids[0]), int(ids[-1])],
            "equal_to_recorded": proven or None,
            "corpora": [asdict(of_corpus) for of_corpus in counts],
            "tokens": {
                kind: sum(window.tokens_of(kind) for window in windows)
                for kind in ("counts", "masked", "padding")
            },
            "windows": [asdict(window) for window in shown],
        }
        print(json.dumps(document))
        return DONE
    from spmdtrain.data.inspected import printed

    print(data.describe(config))
    for of_corpus in counts:
        print(printed.counts_text(of_corpus))
    print(f"step {parsed.step}     {printed.step_text(windows)}")
    if proven:
        print("recorded   the run hashed the same tokens at this step")
    for window in shown:
        print(printed.window_text(window, colours=_has_colours(parsed.colour)))
    return DONE


def _settings_of_run(parsed: argparse.Namespace) -> "tuple[RunConfig, WrittenRun]":
    """Returns the settings with which a run took the step, and the run's files."""
    from spmdtrain.checkpoints.restore import refuse_own_parts
    from spmdtrain.config.load import as_overrides, from_resolved
    from spmdtrain.lab.replay.opened import settings_at
    from spmdtrain.lab.replay.written import read_written

    overrides = as_overrides(parsed.set)
    parsed.settable = OF_PLACES  # and not all of those of a config
    check_settable(overrides, parsed.settable)
    written = read_written(Path(parsed.path))
    written.check_steps(parsed.step, parsed.step)
    saved, named = settings_at(written, parsed.step, parsed.own)
    refuse_own_parts(written.run, named, ("data",))
    return from_resolved(saved, overrides), written


def _is_as_recorded(
    parsed: argparse.Namespace, written: "WrittenRun", batch: Mapping[str, np.ndarray]
) -> bool:
    """Returns True if the run hashed these tokens, and False if it hashed none.

    Raises DataError if it hashed others.
    """
    from spmdtrain.running.record.token_hash import sums_of_rows, text_of

    recorded = written.tokens(parsed.step)
    if recorded is None:
        return False
    if text_of(sums_of_rows(batch)) != recorded:
        raise DataError(
            f"step {parsed.step} of {parsed.path} was fed other tokens than its data gives now",
            fix="--set data.path=FILE, the data as it was",
        )
    return True


def _has_colours(choice: str) -> bool:
    """Returns whether to print colours; "auto" does so in a terminal unless NO_COLOR is set."""
    if choice == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return choice == "always"
