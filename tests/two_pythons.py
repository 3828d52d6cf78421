"""Shares the tests out between the two Pythons on which CI runs, so that each test runs on one.

`--share first` and `--share second` each leave out what the other one runs; without the option all
tests run. On both run what is marked `core`, what may be skipped on one of them, and the first case
of each test that depends on the version of jax (all of NEAR_JAX; of MEET_JAX what is not `long`).
The other `long` tests run on the first Python, whose older jax compiles in half the time. What is
left is dealt out evenly.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

SHARES = ("first", "second")
BOTH = frozenset(SHARES)
COMPILES_FASTER = frozenset({"first"})
# Rooms of tests/ that call what differs most from one jax to the next.
NEAR_JAX = {"compiled", "kernels", "parallel"}
# Rooms whose tests compile, or read what jax and Orbax give.
MEET_JAX = NEAR_JAX | {"certify", "checkpoints", "models", "pipeline", "running", "train"}


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
    def depends_on_jax(self) -> bool:
        rooms = NEAR_JAX if self.is_long else MEET_JAX
        return not rooms.isdisjoint(self.function.partition("::")[0].split("/"))


def shares_of(cases: Iterable[Case]) -> list[frozenset[str]]:
    """Returns the shares that run each case.

    A hash of its name decides, not its place: the two Pythons may collect different cases.
    """
    seen = set()
    found = []
    for case in cases:
        is_first = case.function not in seen
        seen.add(case.function)
        if case.is_on_both or (case.depends_on_jax and is_first):
            found.append(BOTH)
        elif case.is_long:
            found.append(COMPILES_FASTER)
        else:
            turn = zlib.crc32(case.name.encode()) % len(SHARES)
            found.append(frozenset({SHARES[turn]}))
    return found


def core(*cases: Any) -> list[Any]:
    """Returns cases of one parametrized value, marked to run on both Pythons."""
    return [pytest.param(case, marks=pytest.mark.core) for case in cases]
