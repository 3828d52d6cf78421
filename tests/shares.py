"""Which tests `make test` runs, which are the rest, and which run once more on CI's newer Python.

`--share first` is `make test`: every test, but of one that takes seconds the first case alone, and
nothing that is marked `rest`. What is `core` always runs: a property or an oracle of each room.

`--share second` is what CI runs on a newer Python beside it: the rest; and once more what may
depend on the version of Python or jax, which is the core, what one of the two may skip, and the
first case of each quick test and of each test in the rooms next to jax.

Without the option all tests run: `make test-all`.

`--turn N` leaves out, of the rest and of what takes seconds once more, what runs in the two other
turns. CI takes the turn that follows from the number of commits, so that three commits run all
tests, and one commit always the same.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

SHARES = FIRST, SECOND = ("first", "second")
TURNS = frozenset({0, 1, 2})
# Rooms of tests/ that call what differs most from one jax to the next.
NEAR_JAX = {"compiled", "kernels", "parallel"}


@dataclass(frozen=True)
class Case:
    """One test as pytest collects it, such as tests/train/test_layouts.py::test_it[data=2]."""

    name: str  # pytest's node id
    marks: frozenset[str] = frozenset()
    is_first: bool = True  # of the cases of its test

    @property
    def is_quick(self) -> bool:
        return self.marks.isdisjoint({"long", "seconds"})

    @property
    def is_near_jax(self) -> bool:
        return not NEAR_JAX.isdisjoint(self.name.partition("::")[0].split("/"))

    @property
    def is_rest(self) -> bool:
        """True for what `make test` leaves out."""
        stands_back = not (self.is_quick or self.is_first)
        return "core" not in self.marks and (stands_back or "rest" in self.marks)

    @property
    def runs_again(self) -> bool:
        """True if the version of Python or jax may decide what comes out."""
        depends = self.is_first and (self.is_quick or self.is_near_jax)
        return depends or not self.marks.isdisjoint({"core", "skipif"})

    @property
    def turn(self) -> int:
        """The turn in which it runs if it is dealt out. A hash of its name deals, not its place:
        the two Pythons may collect different cases.
        """
        return zlib.crc32(self.name.encode()) % len(TURNS)

    def runs(self, share: str | None = None, turn: int | None = None) -> bool:
        """Returns True if it runs in this share and turn; None stands for all of them."""
        is_dealt = self.is_rest
        if share == SECOND:
            if not (self.is_rest or self.runs_again):
                return False
            is_dealt = is_dealt or not (self.is_quick or self.marks & {"core", "skipif"})
        elif share == FIRST and self.is_rest:
            return False
        return not is_dealt or turn in {None, self.turn}


def cases_of(tests: Iterable[tuple[str, frozenset[str]]]) -> list[Case]:
    """Returns the cases of (name, marks), in the order in which pytest collects them."""
    functions = set()
    cases = []
    for name, marks in tests:
        function = name.partition("[")[0]
        cases.append(Case(name, marks, is_first=function not in functions))
        functions.add(function)
    return cases


def core(*cases: Any) -> list[Any]:
    """Returns cases of one parametrized value, marked as the core."""
    return [pytest.param(case, marks=pytest.mark.core) for case in cases]


def rest(reason: str) -> pytest.MarkDecorator:
    """Returns the mark of tests that `make test` leaves to `make test-all`; the reason says what in
    `make test` finds most of what they find, or what they cost.
    """
    return pytest.mark.rest(reason)
