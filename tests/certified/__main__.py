"""`make certified`: breaks copies of the library, and sees that no certificate is given.

    python -m tests.certified breakages [--out FILE] [WORDS ...]    those that hold one of the words
    python -m tests.certified draws --count N [--seed S] [--out FILE] [KEY=VALUE ...]
        no false alarm in N layouts of base.toml with these settings

Both write a JSON line each; what FILE already holds is left out.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.certified import worker
from tests.certified.planted import Planted, planted
from tests.mutations.place import broken

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("spmdtrain", "pallas_kernels", "tests")
PATIENCE = 1800.0  # seconds that one certificate may take on a busy machine
Line = dict[str, Any]


def tried(each: Planted) -> Line:
    """Certifies a broken copy; what was found, and in how many CPU seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="certified-") as directory:
        tree = Path(directory)
        for room in ROOMS:
            # With its bytecode, which copied times keep valid: else each copy compiles all of it.
            shutil.copytree(ROOT / room, tree / room)
        file = tree / "spmdtrain" / each.breakage.file
        file.write_text(broken(file.read_text(), each.breakage.before, each.breakage.after))
        found = certified(tree, each)
        assert found.get("source", directory).startswith(directory), found["source"]
    return {
        "what": each.breakage.what,
        "found": not found["certified"],
        "wrong": found["wrong"],
        "by": [layout for layout in found.get("layouts", ()) if layout["verdict"] == "differs"],
        "broken": [layout for layout in found.get("layouts", ()) if layout["verdict"] == "broken"],
        "failing": [
            witness["name"]
            for part in ("witnesses", "resume")
            for witness in found.get(part, ())
            if witness["holds"] is False
        ],
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": found.get("cpu_seconds"),
    }


def certified(tree: Path, each: Planted) -> Line:
    """What the worker says with the library of `tree`."""
    options = [f"--among={each.among}", *(["--only-resume"] if each.only_resume else [])]
    command = [sys.executable, "-m", "tests.certified.worker", *options, *each.settings]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:  # no verdict: a slow machine finds no breakage
        return {"certified": True, "wrong": [f"no verdict after {PATIENCE:.0f} s"]}
    lines = done.stdout.splitlines()
    if not lines or done.returncode:
        return {"certified": False, "wrong": [f"ended with {done.returncode}"]}
    return json.loads(lines[-1])


def told(line: Line) -> str:
    """A breakage in a line."""
    verdict = "found" if line["found"] else "ESCAPES"
    first = line["by"][0] if line["by"] else None
    by = f"{first['name']}: {first['first']}" if first else "; ".join(line["wrong"])
    return f"{verdict:<8} {line['what']}  [{line['seconds']:.0f} s] {by[:200]}"


def main(arguments: list[str]) -> int:
    """Runs a campaign. Returns 1 if a breakage escapes, or a healthy layout does not agree."""
    parser = argparse.ArgumentParser(prog="make certified", description=__doc__)
    parser.add_argument("campaign", choices=("breakages", "draws"))
    parser.add_argument("words", nargs="*", default=[], help="of breakages; settings of draws")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=100, help="layouts to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the first layout")
    asked = parser.parse_intermixed_args(arguments)
    return breakages(asked) if asked.campaign == "breakages" else draws(asked)


def breakages(asked: argparse.Namespace) -> int:
    """Tries each planted breakage. Copies share what they compile alike."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="certified-cache-"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    known = kept(asked.out)
    lines = []
    for each in planted():
        what = each.breakage.what
        if asked.words and not any(word in what for word in asked.words):
            continue
        line = next((line for line in known if line["what"] == what), None) or tried(each)
        lines.append(line)
        if line not in known:
            keep(asked.out, line)
        print(told(line), flush=True)
    count = sum(line["found"] for line in lines)
    print(f"{count} of {len(lines)} found")
    return int(count < len(lines))


def draws(asked: argparse.Namespace) -> int:
    """Compares drawn layouts of the healthy library with one device."""
    lines = kept(asked.out)
    known = {line["what"] for line in lines}
    for line in worker.drawn(asked.count, asked.seed, asked.words, known):
        lines.append(line)
        keep(asked.out, line)
        print(f"{line['verdict']:<8} {line['worst']} {line['layout']} {line['first']}", flush=True)
    counts = Counter(line["verdict"] for line in lines)
    worst = max((line["worst"] for line in lines if line["verdict"] == "agrees"), default=None)
    print(f"{dict(counts)}; the worst figure of those that agree: {worst} x rounding")
    return int(bool(counts["differs"] or counts["broken"]))


def kept(path: Path | None) -> list[Line]:
    """The lines of an earlier campaign."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def keep(path: Path | None, line: Line) -> None:
    """Adds a line to the file of a campaign."""
    if path is not None:
        with path.open("a") as out:
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
