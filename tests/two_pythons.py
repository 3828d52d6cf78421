"""Shares the tests out between the two Pythons on which CI runs, so that each test runs on one.

`--share first` and `--share second` each leave out what the other one runs; without the option all
tests run. On both run: what is marked `core`, what may be skipped on one of them, and the first
case of each test of a room that meets jax. Its other cases, and the tests of rooms without jax, are
dealt out.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

SHARES = ("first", "second")
BOTH = frozenset(SHARES)
# Rooms of tests/ whose tests compile, or read what jax and Orbax give.
MEET_JAX = {
    "checkpoints",
    "compiled",
    "kernels",
    "models",
    "parallel",
    "pipeline",
    "replay",
    "running",
    "train",
}


@dataclass(frozen=True)
class Case:
    """One test as pytest collects it, such as tests/train/test_layouts.py::test_it[data=2]."""

    name: str  # pytest's node id
    is_on_both: bool = False  # by a marker

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]

    @property
    def meets_jax(self) -> bool:
        return not MEET_JAX.isdisjoint(self.function.partition("::")[0].split("/"))


def shares_of(cases: Iterable[Case]) -> list[frozenset[str]]:
    """Returns the shares that run each case.

    A hash of its name decides, not its place: the two Pythons may collect different cases.
    """
    seen = set()
    found = []
    for case in cases:
        is_first = case.function not in seen
        seen.add(case.function)
        if case.is_on_both or (case.meets_jax and is_first):
            found.append(BOTH)
        else:
            turn = zlib.crc32(case.name.encode()) % len(SHARES)
            found.append(frozenset({SHARES[turn]}))
    return found
