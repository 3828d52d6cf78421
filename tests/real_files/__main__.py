"""Writes files with real tools, reads them, and prints a table: see docs/real_files.md."""

import argparse
import datetime
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import spmdtrain as st
from real_files.cases import CASES, Case
from real_files.environments import ENVIRONMENTS, run_in

HERE = Path(__file__).parent
HEAD = ("| tool | file | result | seen |", "|---|---|---|---|")
BEGIN, END = "<!-- the table -->\n", "<!-- end of the table -->\n"


class Outcome(NamedTuple):
    """What came of a case, in words, and whether it is right."""

    said: str
    is_right: bool


def tried(case: Case, folder: Path, environments: Path) -> Outcome:
    """Lets the tool write into a folder, and reads it."""
    script = HERE / "write" / f"{case.script}.py"
    try:
        run_in(case.environment, environments, script, folder, *case.arguments)
        said = case.reader(folder)
    except st.UserError as error:
        line = str(error).replace(f"{folder}/", "").replace(str(folder), "DIR")
        return Outcome(f"refused: {line}", bool(case.refused) and case.refused in line)
    except Exception as error:  # whatever goes wrong is a row of the table
        return Outcome(f"WRONG: {type(error).__name__}: {str(error)[-600:]}", False)
    return Outcome(f"read: {said}", not case.refused)


def version_of(case: Case) -> str:
    pins = dict(pin.split("==") for pin in ENVIRONMENTS[case.environment])
    return pins[case.tool]


def write(page: Path, case: Case, outcome: Outcome) -> None:
    """Puts a row into the table of a page, in the order of the cases; the others stay."""
    above, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    table, _, below = rest.partition(END)
    rows = {tuple(line.split(" | ")[:2]): line for line in table.splitlines()}
    row = [*_first_cells(case), _in_a_cell(outcome.said), f"{datetime.date.today()} |"]
    rows[_first_cells(case)] = " | ".join(row)
    lines = [rows[cells] for cells in map(_first_cells, CASES) if cells in rows]
    text = "\n".join(["", *HEAD, *lines, "", ""])
    page.write_text(f"{above}{BEGIN}{text}{END}{below}", encoding="utf-8")


def _first_cells(case: Case) -> tuple[str, str]:
    return f"| {case.tool} {version_of(case)}", case.what


def _in_a_cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


def main() -> int:
    parser = argparse.ArgumentParser(prog="real_files", description=__doc__)
    parser.add_argument("--only", default="", help="a pattern of tools and files")
    parser.add_argument("--environments", type=Path, default=Path("build/real_files"))
    parser.add_argument("--write", type=Path, metavar="FILE", help="a page with a table to replace")
    parsed = parser.parse_args()
    environments = parsed.environments.resolve()
    environments.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for case in CASES:
        if not re.search(parsed.only, f"{case.tool} {version_of(case)} {case.what}"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcome = tried(case, Path(folder) / "files", environments)
        outcomes.append((case, outcome))
        mark = "" if outcome.is_right else "  <- not what must come of it"
        print(f"{case.tool} {version_of(case)}, {case.what}: {outcome.said}{mark}", flush=True)
        if parsed.write:
            write(parsed.write, case, outcome)
    wrong = sum(not outcome.is_right for _, outcome in outcomes)
    print(f"{len(outcomes)} files, {wrong} wrong", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
