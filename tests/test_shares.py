"""The shares of the tests: nothing is lost between them, and `make test` covers every room."""

import ast
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from shares import FIRST, NEAR_JAX, SECOND, SHARES, TURNS, Case, cases_of, core, rest
from test_house import FLOORS

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
MARKS = ("core", "long", "rest", "seconds", "skipif")
ANY_MARKS = [
    frozenset(mark for mark, has in zip(MARKS, chosen, strict=True) if has)
    for chosen in product((False, True), repeat=len(MARKS))
]


def grid(*marks: str, file: str = "train/test_layouts.py") -> list[Case]:
    return cases_of((f"tests/{file}::test_it[{mesh}]", frozenset(marks)) for mesh in "abcdefgh")


def shares_of(case: Case) -> set[str]:
    return {share for share in SHARES if case.runs(share)}


def turns_of(case: Case, share: str | None) -> set[int]:
    return {turn for turn in TURNS if case.runs(share, turn)}


# --- nothing is lost ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("marks", ANY_MARKS, ids=lambda marks: " ".join(sorted(marks)) or "none")
def test_whatever_its_marks_a_case_runs_in_a_share_and_in_a_turn_of_it(marks, is_first):
    case = Case("tests/kernels/test_norms.py::test_it[a]", marks, is_first)
    assert case.runs() and turns_of(case, None)
    assert shares_of(case)
    assert all(turns_of(case, share) for share in shares_of(case))
    if FIRST in shares_of(case):
        assert turns_of(case, FIRST) == turns_of(case, None) == TURNS
    if "core" in marks:
        assert shares_of(case) == set(SHARES)
        assert turns_of(case, SECOND) == TURNS


@pytest.mark.parametrize("marks", [("long",), ("seconds",)])
def test_of_a_test_that_takes_seconds_make_test_runs_the_first_case(marks):
    first, *further = grid(*marks)
    assert shares_of(first) == {FIRST}
    assert all(shares_of(case) == {SECOND} for case in further)
    assert all(case.runs(FIRST) for case in grid())


def test_what_is_marked_rest_runs_in_the_second_share_alone():
    assert all(shares_of(case) == {SECOND} for case in grid("rest"))


def test_three_turns_run_all_of_the_rest_and_one_a_part():
    _, *further = grid("long")
    for cases in (further, grid("rest")):
        for share in (None, SECOND):
            turns = [turns_of(case, share) for case in cases]
            assert all(len(each) == 1 for each in turns)
            assert set.union(*turns) == TURNS


def test_the_first_case_of_a_quick_test_runs_again_and_near_jax_that_of_any():
    first, *further = grid()
    assert shares_of(first) == set(SHARES) and turns_of(first, SECOND) == TURNS
    assert all(shares_of(case) == {FIRST} for case in further)
    for room in NEAR_JAX:
        first = grid("long", file=f"{room}/test_it.py")[0]
        assert shares_of(first) == set(SHARES) and turns_of(first, SECOND) == {first.turn}


def test_where_a_case_runs_does_not_depend_on_the_cases_before_it():
    """One Python may collect a case that the other one does not have."""
    tests = [(case.name, case.marks) for case in grid("long")]
    assert cases_of(tests)[2:] == cases_of([tests[0], *tests[2:]])[1:]


@pytest.mark.seconds
def test_a_name_of_a_test_that_is_none_ends_the_collection(tmp_path):
    """`core` is for cases: as a decorator it leaves a list where the test was."""
    (tmp_path / "test_it.py").write_text(
        "from shares import core\n@core\ndef test_lost():\n    assert False\n"
    )
    collect = ["pytest", "-p", "conftest", "-p", "no:cacheprovider", "-q", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", *collect], cwd=TESTS, capture_output=True, text=True
    )
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "test_lost is no test but [ParameterSet" in done.stdout


def test_marked_cases_have_their_mark():
    (case,) = core(("mesh.data=2",))
    assert case.values == (("mesh.data=2",),)
    assert [mark.name for mark in case.marks] == ["core"]
    assert rest("why").args == ("why",)


# --- the commands ---------------------------------------------------------------------------------


def command_of(target: str) -> str:
    """What `make TARGET` runs."""
    make = ["make", "--no-print-directory", "-n", target, "VENV=/nowhere"]
    return subprocess.check_output(make, cwd=ROOT, text=True).splitlines()[-1]


def test_make_test_all_is_make_test_without_a_share():
    assert command_of("test").replace("--share first ", "") == command_of("test-all")
    assert "--share" not in command_of("test-all")


def test_ci_runs_the_command_of_the_readme_and_the_rest():
    (typed,) = re.findall(r"^make test.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    script = (ROOT / ".ci" / "run").read_text()
    assert re.search(rf"^ *timed {typed}$", script, re.MULTILINE)
    assert re.search(r"^ *timed make test-all .*--share second --turn \$turn", script, re.MULTILINE)
    assert re.search(r'^ *timed make test-all PYTEST_ARGS="--turn \$turn"$', script, re.MULTILINE)


# --- every room -----------------------------------------------------------------------------------

# Rooms whose tests are elsewhere than in a folder of the room's name.
HOMES = {
    "pallas_kernels": "kernels",
    "spmdtrain": "test_front_door.py",
    "spmdtrain.__main__": "test_front_door.py",
    "spmdtrain.cli": "test_cli.py",
}


def has_core(file: Path) -> bool:
    """True if a test is marked as core, or some of its cases, and it needs no GPU."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    names = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute | ast.Name)}
    return not names.isdisjoint({"pytest.mark.core", "core"}) and "pytest.mark.gpu" not in names


def only_holds_rooms(room: str) -> bool:
    files = {path.name for path in (ROOT / room.replace(".", "/")).glob("*.py")}
    return files == {"__init__.py"}


ROOMS = [room for floor in FLOORS for room in floor if not only_holds_rooms(room)]


@pytest.mark.parametrize("room", ROOMS)
def test_the_core_has_a_test_of_every_room(room):
    home = TESTS / HOMES.get(room, room.rpartition(".")[2])
    assert home.exists(), "tests of a room lie in a folder of its name, or are in HOMES"
    files = sorted(home.rglob("test_*.py")) if home.is_dir() else [home]
    assert any(map(has_core, files)), "mark a property or an oracle: pytest.mark.core"


def test_each_mark_of_the_rest_says_why():
    for file in sorted(TESTS.rglob("test_*.py")):
        assert "mark.rest" not in file.read_text(encoding="utf-8") or file == Path(__file__), file
