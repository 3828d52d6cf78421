"""Shares the tests out between the two Pythons on which CI runs, so that each test runs on one; and
the cases of long tests over three turns.

`--share first` and `--share second` each leave out what the other one runs; without the option all
tests run. On both run what is marked `core`, what may be skipped on one of them, and the first case
of each test that depends on the version of jax (all of NEAR_JAX; of MEET_JAX what is not `long`).
Whatever else may compile runs on the first Python, whose older jax compiles in half the time, and
where the tests of a file share what they compile. The files of WITHOUT_JAX are dealt out evenly.

`--turn N` leaves out, of each `long` test, the cases of the two other turns. Its first case is of
every turn. CI takes the turn that follows from the number of commits, so that three commits run all
cases, and one commit always the same. Without the option all cases run.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

SHARES = ("first", "second")
BOTH = frozenset(SHARES)
TURNS = frozenset({0, 1, 2})
COMPILES_FASTER = frozenset({"first"})
# Rooms of tests/ that call what differs most from one jax to the next.
NEAR_JAX = {"compiled", "kernels", "parallel"}
# Rooms whose tests compile, or read what jax and Orbax give.
MEET_JAX = NEAR_JAX | {"checkpoints", "models", "pipeline", "train"}
# Rooms and files whose tests compile nothing.
WITHOUT_JAX = {
    "config",
    "data",
    "fuzz_data",
    "launch",
    "mutations",
    "test_closed_streams.py",
    "test_house.py",
    "test_locale.py",
    "test_meant.py",
    "test_odd_paths.py",
    "test_tries.py",
    "test_two_pythons.py",
}


@dataclass(frozen=True)
class Case:
    """One test as pytest collects it, such as tests/train/test_layouts.py::test_it[data=2]."""

    name: str  # pytest's node id
    is_on_both: bool = False  # by a marker
    is_long: bool = False

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def depends_on_jax(self) -> bool:
        return self.is_in(NEAR_JAX if self.is_long else MEET_JAX)

    def is_in(self, rooms: set[str]) -> bool:
        return not rooms.isdisjoint(self.file.split("/"))


def shares_of(cases: Iterable[Case]) -> list[frozenset[str]]:
    """Returns the shares that run each case.

    A hash of the file's name deals, not its place: the two Pythons may collect different cases.
    """
    seen = set()
    found = []
    for case in cases:
        is_first = case.function not in seen
        seen.add(case.function)
        if case.is_on_both or (case.depends_on_jax and is_first):
            found.append(BOTH)
        elif case.is_in(WITHOUT_JAX) and not case.is_long:
            turn = zlib.crc32(case.file.encode()) % len(SHARES)
            found.append(frozenset({SHARES[turn]}))
        else:
            found.append(COMPILES_FASTER)
    return found


def turns_of(cases: Iterable[Case]) -> list[frozenset[int]]:
    """Returns the turns in which each case runs. A hash of its name deals, as above."""
    seen = set()
    found = []
    for case in cases:
        rests = case.is_long and case.function in seen
        seen.add(case.function)
        turn = zlib.crc32(case.name.encode()) % len(TURNS)
        found.append(frozenset({turn}) if rests else TURNS)
    return found


def core(*cases: Any) -> list[Any]:
    """Returns cases of one parametrized value, marked to run on both Pythons."""
    return [pytest.param(case, marks=pytest.mark.core) for case in cases]
