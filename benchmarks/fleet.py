"""Every flagship layout compiled at its real size for GPUs that are not there: `make fleet`.

    python benchmarks/fleet.py [--only TEXT | --missing] [--page FILE]

Each layout is a process of its own (`spmdtrain estimate CONFIG --compile --json`), because XLA ends
the process where it cannot compile: that is a row of the table then. What a process found is kept
in runs/fleet/NAME.json. A layout of which nothing lies there keeps the row of the page, which says
when and with which jax it was compiled: so `--only` compiles some again, and `--missing` those that
have neither. What the planner predicts of a step that lies there is found anew each time.

What takes all layouts is written only if all of them lie there: the share of all bytes that is
hidden, and spmdtrain/planner/cost/fleet_overlap.json, the shares of a step's traffic that the
planner takes for hidden.

Needs what `make cuda-compiler` installs, jax 0.11 or later. One to five minutes a layout on two
cores.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from spmdtrain.compiled.step_memory import memory_in
from spmdtrain.config import load
from spmdtrain.planner.cost.overlap import FLEET, Overlap, hidden_shares
from spmdtrain.planner.cost.software import fitted_on
from spmdtrain.planner.estimate import estimate, with_vocab
from spmdtrain.planner.report import estimate_values
from spmdtrain.planner.traffic import needed_traffic

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "runs" / "fleet"
SHARES = ROOT / "spmdtrain" / "planner" / "cost" / FLEET
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
GIGA = 1e9


@dataclass(frozen=True)
class Layout:
    """One config on one cluster. `mesh`: axes of more than one device; empty: as the config
    says.
    """

    config: str
    hardware: str
    devices: int
    mesh: str = ""
    settings: str = ""
    published: tuple[float, str] | None = None  # seconds of a step, and where that was printed

    @property
    def name(self) -> str:
        changed = re.sub(r"[\w.]+\.", "", self.settings)
        return f"{self.config} {self.devices} {self.mesh or 'as configured'} {changed}".strip()

    @property
    def command(self) -> list[str]:
        """Arguments of `spmdtrain`, as a person would type them."""
        command = ["estimate", f"configs/{self.config}.toml", "--hardware", self.hardware]
        command += ["--devices", str(self.devices), "--compile"]
        for setting in self.changes:
            command += ["--set", setting]
        return command

    @property
    def changes(self) -> list[str]:
        """The settings that are not the config's."""
        mesh = dict(part.split("=") for part in self.mesh.split())
        sizes = [f"mesh.{axis}={mesh.get(axis, 1)}" for axis in AXES] if mesh else []
        return [*sizes, *self.settings.split()]


Found = list[tuple[Layout, dict[str, Any]]]  # what was compiled here

PLAIN = "pipeline.schedule=1f1b pipeline.chunks=1 train.zero=0"
LAYOUTS = (
    Layout("gpt2_124m", "h100", 8),
    Layout("llama3_8b", "h100", 8, "tensor=8"),
    Layout("llama3_8b", "h100", 16, "fsdp=4 context=4"),
    Layout(
        "llama3_8b",
        "h100",
        16,
        "pipeline=4 fsdp=4",
        "pipeline.schedule=interleaved pipeline.chunks=4",
    ),
    Layout(
        "llama3_8b",
        "h100",
        16,
        "pipeline=4 tensor=4",
        "pipeline.schedule=zero_bubble train.remat=none train.sequence_length=4096",
    ),
    Layout("llama3_8b", "h100", 64),
    Layout(
        "llama3_8b",
        "h100",
        64,
        "fsdp=8 context=8",
        "train.sequence_length=65536 model.max_length=65536 train.global_batch=16",
    ),
    Layout(
        "llama3_8b",
        "h100",
        64,
        "fsdp=8 context=8",
        "train.sequence_length=131072 model.max_length=131072 train.global_batch=8",
    ),
    Layout(
        "llama3_8b",
        "h100",
        512,
        "fsdp=8 context=64",
        "train.sequence_length=1048576 model.max_length=1048576 train.global_batch=8",
    ),
    Layout("llama3_8b", "h100", 128, "data=16 fsdp=8"),
    Layout("llama3_70b", "h100", 64, "fsdp=8 tensor=8", PLAIN),
    Layout("llama3_70b", "h100", 256, "fsdp=256", PLAIN),
    Layout("llama3_70b", "h100", 512),
    Layout("llama3_70b", "h100", 512, "pipeline=8 data=8 tensor=8", "pipeline.chunks=10"),
    Layout("llama3_405b", "h100", 512, "fsdp=64 tensor=8", PLAIN),
    Layout(
        "llama3_405b",
        "h100",
        2048,
        published=(12.06, "Llama 3, table 4: the same work on each of 8192 H100"),
    ),
    Layout(
        "llama3_405b",
        "h100",
        16384,
        "pipeline=16 data=8 context=16 tensor=8",
        "train.sequence_length=131072 model.max_length=131072 train.global_batch=128 "
        "pipeline.chunks=8",
        published=(10.92, "Llama 3, table 4"),
    ),
    Layout(
        "gpt3_175b",
        "a100-80",
        64,
        "pipeline=8 tensor=8",
        "train.global_batch=64 train.zero=0",
        published=(18.13, "Korthikanti et al., table 5, full recomputation"),
    ),
    Layout("gpt3_175b", "a100-80", 1024),
    # BLOOM: its vocabulary divides by no multiple of 3, and is padded.
    Layout(
        "gpt3_175b",
        "a100-80",
        384,
        "pipeline=12 data=8 tensor=4",
        "model.layers=70 model.embed=14336 model.heads=112 model.vocab=250880 "
        "train.global_batch=2048 pipeline.schedule=1f1b pipeline.chunks=1",
    ),
    Layout("gpt_530b", "a100-80", 2520, published=(54.08, "SC21, table 1")),
    Layout("gpt_1t", "a100-80", 3072, published=(102.63, "SC21, table 1")),
    Layout("mixtral_8x7b", "b200", 8, "expert=8"),
    Layout("mixtral_8x7b", "h200", 16, "fsdp=2 expert=8"),
    Layout("mixtral_8x7b", "h100", 64),
    Layout("qwen3_30b_a3b", "h100", 16),
    Layout("qwen3_5_27b", "h200", 8),
    Layout("qwen3_5_27b", "h100", 64, "fsdp=16 tensor=4"),
    Layout(
        "qwen3_5_27b",
        "h200",
        64,
        "fsdp=8 context=8",
        "train.sequence_length=262144 train.global_batch=16",
    ),
    Layout("gemma4_31b", "h100", 32),
    Layout("nemotron3_nano_30b_a3b", "h100", 16),
    Layout("deepseek_v3", "h100", 1024),
    Layout("deepseek_v3", "h100", 2048, "data=2 fsdp=16 expert=64", "train.global_batch=16384"),
)


# Compiling


def compile_layout(layout: Layout) -> dict[str, Any]:
    """What `estimate --compile --json` printed, or {"refused": the line that says why}."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "spmdtrain.cli", *layout.command, "--json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    made = {"seconds": time.perf_counter() - start, "made": _today()}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1]) | made
    return {"refused": _reason(done.stderr)} | made


def _today() -> str:
    return f"{datetime.now(UTC).date()}, jax {version('jax')}"


def _reason(errors: str) -> str:
    """The line that says most: of an error of XLA's compiler, or of ours, else the last one."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [
        line for line in lines if re.search(r"error: |^spmdtrain: |Check failed|Error: ", line)
    ]
    return (telling or lines or ["ended without a word"])[0][:200]


def predicted(layout: Layout, result: dict[str, Any]) -> dict[str, Any]:
    """The result with what the planner of today says of the compiled step."""
    if "refused" in result:
        return result
    config = load(ROOT / "configs" / f"{layout.config}.toml", layout.changes)
    cost = estimate(with_vocab(config), layout.devices, layout.hardware)
    cost = cost.as_compiled(result["compiled"]["traffic"] or [])
    return result | estimate_values(cost) | {"needed_traffic": needed_traffic(cost.workload)}


def kept_file(layout: Layout) -> Path:
    return KEPT / f"{re.sub(r'[^a-z0-9]+', '_', layout.name.lower())}.json"


# What the planner takes from it


def overlap_of_fleet(found: Found) -> dict[str, dict[str, float]]:
    """Family of GPUs -> kind of traffic -> share sent beside work, the mean over layouts."""
    shares = defaultdict(lambda: defaultdict(list))
    for layout, result in found:
        traffic = result.get("compiled", {}).get("traffic")
        if not traffic:
            continue
        of_layout = hidden_shares(
            traffic,
            pipelined=result["layout"]["pipeline"] > 1,
            collective_matmul=result["layout"]["collective_matmul"],
        )
        for kind, share in of_layout.items():
            shares[fitted_on(layout.hardware)][kind].append(share)
    return {
        family: {kind: round(mean(listed), 3) for kind, listed in sorted(kinds.items())}
        for family, kinds in sorted(shares.items())
    }


# The page


ABOUT = """\
Each row is the whole training step, compiled by XLA for absent GPUs. Nothing ran: the seconds
of a step are predicted. Written by
"""
COLUMNS = """\
*s*: of compiling, for some on a busy machine. *Memory*: of the fullest device. *Hidden*:
share of the bytes that a device sends with a matmul or a loop of layers between start and
end. *Step*: predicted, and as published where the same work was. *Compiled*: when, and with
which jax. A layout that was not compiled again keeps its row.
"""
PER_HOST = 8  # devices, of all clusters above
BYTES = """\
GB of each collective's output on one device in one step, `in loops + outside`. *Sent* is
what a ring sends for them all, *needed* what theory asks of the layout
(`spmdtrain/planner/traffic.py`).
With fsdp and context and no pipeline, gradients are scattered
over context first: more crosses context than needed, and less fsdp. Compare their sums.
Tokens are counted in one round to their experts, as if loads were balanced; how many rounds
there are is only known when a step runs.
"""
OVERLAP = """\
Share of each kind of traffic that is hidden, the mean over those of the layouts compiled together
that have it. `plan` and `estimate` count with these; `estimate --compile` and `plan --compile` with
what the compiled step itself hides. *Vocabulary* are sums over `pipeline`, *hops* what a stage
sends to the next one.
"""
KINDS = [field.name for field in fields(Overlap)]
TOGETHER = "Of all bytes of the "  # the start of the sentence about all layouts


class Rows(NamedTuple):
    """The texts of the page about one layout."""

    overview: str
    traffic: list[str]  # the first of them has its title


def page(found: Found, before: str = "") -> str:
    """docs/fleet.md. `before`: the page as it is, of which rows stay."""
    rows = {_title(layout): rows_of(layout, result) for layout, result in found}
    rows = rows_on(before) | rows
    layouts = [layout for layout, _ in found] if not before else LAYOUTS
    titled = [rows[_title(layout)] for layout in layouts if _title(layout) in rows]
    return "\n".join(
        [
            "# The fleet: flagship layouts at real size",
            "",
            *ABOUT.splitlines(),
            "",
            "    make fleet",
            "",
            f"{len(titled)} of its {len(LAYOUTS)} layouts have been compiled so far.",
            "",
            *_heading(OVERVIEW),
            *(row.overview for row in titled),
            "",
            *COLUMNS.splitlines(),
            "",
            *_hidden_in_all(found, before),
            "",
            "## Bytes",
            "",
            *BYTES.splitlines(),
            "",
            *_heading(TRAFFIC),
            *(line for row in titled for line in row.traffic),
            "",
            "## What the planner takes for hidden",
            "",
            *OVERLAP.splitlines(),
            "",
            *overlap_table(_shares(found, before)),
            "",
            "## Published",
            "",
            *_sources(layouts),
            "",
        ]
    )


def rows_on(text: str) -> dict[str, Rows]:
    """The rows of a page, by the title of their layout."""
    rows: dict[str, Rows] = {}
    title = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == len(OVERVIEW) and cells[1].startswith(("yes", "**no**")):
            rows[cells[0]] = Rows(line, [])
        elif len(cells) == len(TRAFFIC) and (cells[0] or title) in rows:
            title = cells[0] or title
            rows[title].traffic.append(line)
    return rows


def rows_of(layout: Layout, result: dict[str, Any]) -> Rows:
    return Rows(_overview(layout, result), _traffic(layout, result))


def _is_whole(found: Found, before: str) -> bool:
    """True if what is said of all layouts can be found out anew."""
    return not before or len(found) == len(LAYOUTS)


def _shares(found: Found, before: str) -> dict[str, dict[str, float]]:
    if _is_whole(found, before):
        return overlap_of_fleet(found)
    return json.loads(SHARES.read_text(encoding="utf-8"))


OVERVIEW = (
    "layout",
    "compiles",
    "s",
    "XLA GB",
    "formula GB",
    "XLA / formula",
    "hidden",
    "step s",
    "published s",
    "compiled",
)


def _overview(layout: Layout, result: dict[str, Any]) -> str:
    title = _title(layout)
    if "refused" in result:
        reason = f"**no**: {result['refused']}"
        cells = (title, reason, f"{result['seconds']:.0f}", *[""] * 6, result["made"])
        return f"| {' | '.join(cells)} |"
    xla = _xla_bytes(result) / GIGA
    ours = result["memory_bytes_per_device"]["total"] / GIGA
    traffic = result["compiled"]["traffic"] or []
    sent = sum(each["sent"] for each in traffic)
    hidden = sum(each["sent_beside_work"] for each in traffic)
    published = layout.published[0] if layout.published else ""
    cells = (
        title,
        "yes",
        f"{result['compiled']['compile_seconds']:.0f}",
        f"{xla:.1f}",
        f"{ours:.1f}",
        f"{xla / ours:.2f}",
        f"{hidden / sent:.0%}" if sent else "",
        f"{result['step_seconds']:.3g}",
        f"{published}",
        result["made"],
    )
    return f"| {' | '.join(cells)} |"


def _hidden_in_all(found: Found, before: str) -> list[str]:
    """One sentence: the share of all bytes that is sent beside work, between hosts and inside."""
    if not _is_whole(found, before):
        lines = before.splitlines()
        (start,) = (at for at, line in enumerate(lines) if line.startswith(TOGETHER))
        return lines[start : lines.index("", start)]
    sent = {True: 0.0, False: 0.0}
    hidden = {True: 0.0, False: 0.0}
    for _, result in found:
        for each in result.get("compiled", {}).get("traffic") or []:
            between = _crosses_hosts(each["axis"], result["layout"])
            sent[between] += each["sent"]
            hidden[between] += each["sent_beside_work"]
    shares = {between: hidden[between] / max(1.0, sent[between]) for between in sent}
    return [
        f"{TOGETHER}{len(found)} layouts that were last compiled together,",
        f"{shares[True]:.0%} of those over axes that cross hosts",
        f"and {shares[False]:.0%} of those over axes inside a host are hidden.",
    ]


def _crosses_hosts(axes: str, sizes: dict[str, Any]) -> bool:
    """True if a group of devices along `axes` ("pipeline+tensor") is on more than one host."""
    return any(
        math.prod(sizes[inner] for inner in AXES[AXES.index(axis) :]) > PER_HOST
        for axis in axes.split("+")
        if axis != "none"
    )


COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
TRAFFIC = ("layout", "over", *COLLECTIVES, "sent", "needed", "hidden")


def _traffic(layout: Layout, result: dict[str, Any]) -> list[str]:
    if "refused" in result:
        return []
    by_axis = defaultdict(list)
    for each in result["compiled"]["traffic"] or []:
        by_axis[each["axis"]].append(each)
    title = _title(layout)
    lines = []
    for axis, listed in by_axis.items():
        sent = sum(each["sent"] for each in listed)
        if sent < 1e-3 * GIGA:  # sums of scalars and norms
            continue
        needed = result["needed_traffic"].get(axis, 0.0)
        hidden = sum(each["sent_beside_work"] for each in listed) / sent
        cells = [title, axis, *(_split(listed, kind) for kind in COLLECTIVES)]
        cells += [f"{sent / GIGA:.4g}", f"{needed / GIGA:.4g}", f"{hidden:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
        title = ""
    return lines


def _split(listed: list[dict[str, Any]], kind: str) -> str:
    """`in loops + outside`, in GB."""
    inside = sum(each["bytes"] for each in listed if each["kind"] == kind and each["inside_loop"])
    outside = sum(
        each["bytes"] for each in listed if each["kind"] == kind and not each["inside_loop"]
    )
    if inside + outside < 1e-3 * GIGA:
        return ""
    return f"{inside / GIGA:.4g} + {outside / GIGA:.4g}"


def overlap_table(shares: dict[str, dict[str, float]]) -> list[str]:
    lines = _heading(("GPUs", *(kind.replace("_", " ") for kind in KINDS)))
    for family, kinds in shares.items():
        cells = [f"{kinds[kind]:.1%}" if kind in kinds else "" for kind in KINDS]
        lines.append(f"| {' | '.join([family, *cells])} |")
    return lines


def _sources(layouts: Iterable[Layout]) -> list[str]:
    return [
        f"- {_title(layout)}: {layout.published[0]} s. {layout.published[1]}"
        for layout in layouts
        if layout.published
    ]


def _heading(columns: tuple[str, ...]) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]


def _title(layout: Layout) -> str:
    mesh = layout.mesh.replace("=", " ").replace(" ", "&nbsp;") or "as configured"
    length = re.search(r"sequence_length=(\d+)", layout.settings)
    tokens = f", {int(length[1]):,} tokens" if length else ""
    return f"{layout.config} on {layout.devices} {layout.hardware}, {mesh}{tokens}"


def _xla_bytes(result: dict[str, Any]) -> int:
    return memory_in(result["compiled"]).held


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--only", default="", metavar="TEXT", help="compiles the layouts whose name holds this"
    )
    which.add_argument(
        "--missing", action="store_true", help="compiles the layouts that have no row yet"
    )
    parser.add_argument("--page", default=str(ROOT / "docs" / "fleet.md"), metavar="FILE")
    chosen = parser.parse_args()
    written = Path(chosen.page)
    before = written.read_text(encoding="utf-8") if written.exists() else ""
    KEPT.mkdir(parents=True, exist_ok=True)
    for layout in LAYOUTS:
        has_row = kept_file(layout).exists() or _title(layout) in rows_on(before)
        if chosen.only in layout.name and not (chosen.missing and has_row):
            result = compile_layout(layout)
            kept_file(layout).write_text(json.dumps(result, indent=1))
            print(
                f"{layout.name}: {result.get('refused', 'compiled')}, {result['seconds']:.0f} s",
                flush=True,
            )
    found = [
        (layout, predicted(layout, json.loads(kept_file(layout).read_text())))
        for layout in LAYOUTS
        if kept_file(layout).exists()
    ]
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(page(found, before), encoding="utf-8")
    print(f"{chosen.page}: {len(found)} of {len(LAYOUTS)} layouts compiled here")
    if len(found) == len(LAYOUTS):
        SHARES.write_text(json.dumps(overlap_of_fleet(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
