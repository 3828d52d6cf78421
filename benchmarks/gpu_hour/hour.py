"""Runs parts one after another until the time is over, and writes what is known after each.

FOLDER/summary.json has a row for each part, FOLDER/NAME.log what it printed, FOLDER/README.md a
page for people. A part that fails, or takes longer than it may, costs itself only.

Parts come in the order of their value. The first ones that fit are promised the minutes that they
need at least, and no earlier part may take those.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TAIL = 45  # lines of each part on the page
TO_END = 10  # seconds for a part to write what it has found
HEADLINE = 160  # characters


@dataclass(frozen=True)
class Part:
    """One question to the machine. `least` and `most` are the minutes that it needs and may take.

    In the command FOLDER stands for the folder of the results, and SECONDS for those after which a
    part should have ended by itself, so that it is not cut off. `rehearsal` are the words of the
    same on a CPU, with tiny sizes.
    """

    name: str
    question: str
    command: tuple[str, ...]
    least: float
    most: float
    rehearsal: tuple[str, ...] = ()


def run_parts(
    parts: Sequence[Part], folder: Path, minutes: float, machine: dict[str, Any]
) -> list[dict[str, Any]]:
    """Runs those parts that fit, in their order; returns the rows of the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    rows = [_row(part, "not begun") for part in parts]
    write(folder, rows, machine)
    for number, (row, part) in enumerate(zip(rows, parts, strict=True)):
        left = (end - time.monotonic()) / 60
        own = minutes_of(parts[number:], left)
        if own is None:
            row["status"] = f"left out: it needs {part.least:g} minutes, {left:.1f} are left"
            write(folder, rows, machine)
            continue
        row["status"] = "begun"
        write(folder, rows, machine)
        print(f"{part.name}: {part.question}", flush=True)
        row |= _run(part, folder, 60 * own)
        print(f"  {row['status']}, {row['seconds']:.0f} s: {row['headline']}", flush=True)
        write(folder, rows, machine)
    return rows


def minutes_of(parts: Sequence[Part], left: float) -> float | None:
    """Returns the minutes that the first of these parts may take; None if it does not fit.

    It leaves what later ones need at least, as many of them as fit in their order.
    """
    first, *later = parts
    spare = left - first.least
    if spare < 0:
        return None
    for part in later:
        if part.least <= spare:
            spare -= part.least
    return min(first.most, first.least + spare)


def _row(part: Part, status: str) -> dict[str, Any]:
    return {
        "name": part.name,
        "question": part.question,
        "command": " ".join(part.command),
        "status": status,
        "seconds": 0.0,
        "headline": "",
    }


def _run(part: Part, folder: Path, seconds: float) -> dict[str, Any]:
    """Runs a part and returns its outcome. Whatever ends this process ends the part as well."""
    log = folder / f"{part.name}.log"
    told = f"{max(0.0, seconds - TO_END):.0f}"
    command = [
        word.replace("FOLDER", str(folder)).replace("SECONDS", told) for word in part.command
    ]
    # Measured kernels are kept among the results, and later parts use them.
    environment = os.environ | {"PALLAS_KERNELS_CACHE": str(folder / "measured_kernels")}
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        try:
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            return {"status": f"failed: {error.strerror}", "seconds": 0.0}
        try:
            code = child.wait(seconds)
            status = "done" if code == 0 else f"failed with code {code}"
        except subprocess.TimeoutExpired:
            status = f"cut off after {seconds / 60:.1f} minutes"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    lines = tail(log)
    headline = lines[-1].strip()[:HEADLINE] if lines else "it printed nothing"
    return {"status": status, "seconds": time.monotonic() - begin, "headline": headline}


def tail(log: Path) -> list[str]:
    """The last lines of a log that are not empty; none where there is no log."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-TAIL:]


def write(folder: Path, rows: list[dict[str, Any]], machine: dict[str, Any]) -> None:
    """Writes summary.json and the page, each whole or not at all."""
    summary = json.dumps({"machine": machine, "parts": rows}, indent=1) + "\n"
    for name, text in (("summary.json", summary), ("README.md", page(folder, rows, machine))):
        whole = folder / f".{name}"
        whole.write_text(text, encoding="utf-8")
        whole.replace(folder / name)


def page(folder: Path, rows: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    """The page: the machine, a table of all parts, and the end of what each has printed."""
    lines = [f"# A GPU hour on {machine.get('gpus', 'an unknown machine')}", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += ["", "| part | question | status | seconds | last line |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (
            row["name"],
            row["question"],
            row["status"],
            f"{row['seconds']:.0f}",
            row["headline"].replace("|", "/"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    for row in rows:
        printed = tail(folder / f"{row['name']}.log")
        if printed:
            lines += ["", f"## {row['name']}", "", f"    {row['command']}", ""]
            lines += [f"    {line}" for line in printed]
    return "\n".join(lines) + "\n"
