"""CI's two shares of the tests: nothing is lost between them."""

from pathlib import Path

from two_pythons import (
    BOTH,
    COMPILES_FASTER,
    MEET_JAX,
    SHARES,
    TURNS,
    WITHOUT_JAX,
    Case,
    shares_of,
    turns_of,
)

GRID = [Case(f"tests/train/test_layouts.py::test_it[{mesh}]") for mesh in "abcdefgh"]
PLAIN = [Case(f"tests/data/test_{number}.py::test_it") for number in range(40)]


def test_each_test_runs_on_at_least_one_python():
    assert all(shares_of([*GRID, *PLAIN]))


def test_the_first_case_of_a_test_that_meets_jax_runs_on_both_and_the_others_where_it_is_fast():
    first, *others = shares_of(GRID)
    assert first == BOTH
    assert set(others) == {COMPILES_FASTER}


def test_what_a_file_shares_is_made_on_one_python():
    alike = [Case(f"tests/data/test_chat.py::test_{number}") for number in range(40)]
    assert len(set(shares_of(alike))) == 1
    compiling = [Case(f"tests/inference/test_answer.py::test_{number}") for number in range(40)]
    assert set(shares_of(compiling)) == {COMPILES_FASTER}


def test_every_room_and_file_that_is_named_is_there():
    for name in MEET_JAX | WITHOUT_JAX:
        assert (Path(__file__).parent / name).exists(), name


def test_what_is_long_runs_where_it_compiles_faster_but_for_what_is_next_to_jax():
    long = [Case(case.name, is_long=True) for case in GRID]
    assert set(shares_of(long)) == {COMPILES_FASTER}
    kernels = [Case(f"tests/kernels/test_norm.py::test_it[{n}]", is_long=True) for n in range(3)]
    assert shares_of(kernels) == [BOTH, COMPILES_FASTER, COMPILES_FASTER]
    assert shares_of([Case(GRID[0].name, is_on_both=True, is_long=True)]) == [BOTH]


def test_who_runs_a_case_does_not_depend_on_the_cases_before_it():
    """One Python may collect a case that the other one does not have."""
    assert shares_of(GRID)[2:] == shares_of([GRID[0], *GRID[2:]])[1:]


def test_tests_without_jax_run_on_one_python_and_both_have_some():
    shares = shares_of(PLAIN)
    assert all(len(share) == 1 for share in shares)
    assert all(10 <= shares.count(frozenset({name})) <= 30 for name in SHARES)


def test_what_is_marked_runs_on_both():
    assert shares_of([Case(PLAIN[0].name, is_on_both=True)]) == [BOTH]


def test_three_turns_run_all_cases_of_a_long_test_and_each_its_first():
    long = [Case(case.name, is_long=True) for case in GRID]
    first, *others = turns_of(long)
    assert first == TURNS
    assert all(len(turns) == 1 for turns in others)
    assert frozenset().union(*others) == TURNS
    assert turns_of(long)[2:] == turns_of([long[0], *long[2:]])[1:]


def test_what_is_not_long_runs_in_every_turn():
    assert set(turns_of(GRID)) == {TURNS}
