"""The figures in README and docs/ and the commands that measure them: `make claims`.

A comment in the paragraph of a figure, or just before or after it, says how it was measured:

    <!-- claim: 2.6 ± 5 % after "sc21_table2 " by `python benchmarks/planner/fit.py` on cpu -->

That is: the first number behind these words in what the command prints is 2.6 to 5 %. Without ± it
is 2.6 as written, rounded to as many digits. `on` names the machine: cpu; compiler (XLA's CUDA
compiler); gpu; large (hours, or files that are not here). Where nothing can be measured again, the
comment gives the reason:

    <!-- no claim: a limit that is set, not measured -->

`make claims` runs the commands of this kind of machine, once each, and lists those of others. It
fails if a figure is not met, and if a page says what its paragraph does not. A claim of another
machine names the day on which it was seen, `on gpu, seen 2026-11-25`; it is stale if a file that
its command names has been changed on a later day, and that fails too. tests/test_claims.py checks
in a second that each figure that looks measured has a claim or a reason.
"""

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Pages that a command writes whole, or that state no measurement.
MADE = {
    "contributing.md": "a copy of CONTRIBUTING.md",
    "convergence.md": "written by benchmarks/convergence.py",
    "faults.md": "written by make faults",
    "fleet.md": "written by make fleet",
    "kernel_bounds.md": "written by make aot",
    "models.md": "measured by make test-hf",
    "real_files.md": "written by make real-files",
    "settings.md": "written by make pages, of the schema",
}
# The programs of this environment, whatever the PATH finds first.
PROGRAMS = {"python": [sys.executable], "spmdtrain": [sys.executable, "-m", "spmdtrain"]}
MACHINES = ("cpu", "compiler", "gpu", "large")
LOOKS_MEASURED = re.compile(
    r"(?<![\w./=-])\d[\d,.]*(?: ?%| (?:s|ms|µs|seconds|minutes|hours|h|GB|MB|MiB|kB|tokens/s|times"
    r"|of \d[\d,]*)\b)"
)
COMMENT = re.compile(r"<!-- *((?:no )?claim: .*?) *-->", re.S)
CLAIM = re.compile(
    r'claim: (?P<figure>[\d.,]+)(?: ± (?P<within>[\d.]+)(?P<percent> ?%)?)? after "(?P<after>.+?)" '
    r"by `(?P<command>.+?)` on (?P<machine>\w+)(?:, seen (?P<seen>\d{4}-\d\d-\d\d))?"
)
REASON = re.compile(r"no claim: \S.{8,}")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Claim:
    """A figure, as it is written, and the command that prints it behind the words `after`."""

    page: str
    figure: str
    low: float
    high: float
    after: str
    command: str
    machine: str
    seen: str

    def __str__(self) -> str:
        return f"{self.page}: {self.figure} by {self.command}"


def paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of a page without its blocks of code."""
    bare = re.sub(r"^```.*?^```$", "```", text, flags=re.S | re.M)
    return [each for each in re.split(r"\n *\n", bare) if each.strip()]


def claims_in(page: str, text: str) -> Iterator[Claim]:
    """Yields the claims of a page. Raises ValueError for a comment that is none."""
    for comment in COMMENT.findall(text):
        said = " ".join(comment.split())
        if REASON.fullmatch(said):
            continue
        match = CLAIM.fullmatch(said)
        if match is None or match["machine"] not in MACHINES:
            raise ValueError(f"{page}: not a claim: {said}")
        if match["machine"] != "cpu" and not match["seen"]:
            raise ValueError(f"{page}: a claim of another machine says when it was seen: {said}")
        low, high = _range(match)
        yield Claim(
            page,
            match["figure"],
            low,
            high,
            match["after"],
            match["command"],
            match["machine"],
            match["seen"] or "",
        )


def _range(match: re.Match[str]) -> tuple[float, float]:
    """Returns the least and the largest number that meets a claim."""
    figure = float(match["figure"].replace(",", ""))
    if match["within"] is None:
        digits = len(match["figure"].partition(".")[2])
        within = 0.5000001 * 10.0**-digits
    else:
        within = float(match["within"]) * (figure / 100 if match["percent"] else 1)
    return figure - within, figure + within


def faults_of(page: str, text: str) -> list[str]:
    """Returns what is wrong with the claims of a page: none needs its command for that."""
    parts = paragraphs(text)
    found = []
    for at, part in enumerate(parts):
        bare = re.sub("<!--.*?-->", "", part, flags=re.S)
        beside = "\n".join(parts[max(at - 1, 0) : at + 2])
        if LOOKS_MEASURED.search(bare) and not COMMENT.search(beside):
            found.append(f"{page}: no claim and no reason beside: {bare.strip()[:80]!r}")
        try:
            for claim in claims_in(page, part):
                if not re.search(rf"(?<![\d.]){re.escape(claim.figure)}(?!\d)", _shown(beside)):
                    found.append(f"{page}: {claim.figure} does not stand beside its claim")
        except ValueError as error:
            found.append(str(error))
    return found


def _shown(text: str) -> str:
    return re.sub("<!--.*?-->", "", text, flags=re.S)


def pages() -> dict[str, str]:
    """Returns the text of README and of each page of docs/ that is not made by a command."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.name not in MADE}


def is_here(machine: str) -> bool:
    """Returns True if this machine can measure claims of `machine`."""
    if machine == "compiler":
        return importlib.util.find_spec("jax_cuda13_plugin") is not None
    if machine == "gpu":
        return Path("/proc/driver/nvidia/version").exists()
    return machine == "cpu"


def is_stale(claim: Claim) -> bool:
    """Returns True if a file that the command names was committed on a day after the claim's."""
    named = [word for word in shlex.split(claim.command) if (ROOT / word).is_file()]
    if not named:
        return False
    command = ["git", "log", "-1", "--format=%cs", "--", *named]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() > (
        claim.seen
    )


def number_after(words: str, printed: str) -> float | None:
    """Returns the first number behind these words in a text; None if there is none."""
    _, found, rest = " ".join(printed.split()).partition(words)
    match = NUMBER.search(rest) if found else None
    return float(match[0].replace(",", "")) if match else None


def measured(claims: list[Claim]) -> Iterator[tuple[Claim, float | None]]:
    """Yields each claim with what its command prints now; a command runs once for all of its."""
    printed: dict[str, str] = {}
    for claim in claims:
        if claim.command not in printed:
            words = shlex.split(claim.command)
            program = PROGRAMS.get(words[0], [words[0]])
            done = subprocess.run([*program, *words[1:]], cwd=ROOT, capture_output=True, text=True)
            printed[claim.command] = done.stdout if done.returncode == 0 else ""
        yield claim, number_after(claim.after, printed[claim.command])


def main() -> int:
    """Measures the claims of this machine. Returns 1 if one is not met, or stale."""
    parser = argparse.ArgumentParser(description="measures the claims of README and docs/")
    parser.add_argument("--list", action="store_true", help="list the claims and measure none")
    asked = parser.parse_args()
    texts = pages()
    wrong = [fault for page, text in texts.items() for fault in faults_of(page, text)]
    claims = [claim for page, text in texts.items() for claim in claims_in(page, text)]
    here = [claim for claim in claims if is_here(claim.machine)]
    if asked.list:
        here = []
    for claim, number in measured(here):
        met = number is not None and claim.low <= number <= claim.high
        print(f"{'met  ' if met else 'UNMET'} {claim}: {number}", flush=True)
        wrong += [] if met else [f"{claim}: {number}"]
    for claim in claims:
        if claim not in here:
            stale = claim.machine != "cpu" and is_stale(claim)
            print(f"{'STALE' if stale else 'else '} {claim}, on {claim.machine}")
            wrong += [f"{claim} is stale"] if stale else []
    print(*wrong, sep="\n")
    print(f"{len(claims)} claims, {len(here)} measured here, {len(wrong)} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
