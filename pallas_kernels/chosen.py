"""Holds decisions about implementations that were made before a trace, and records those that a
trace makes.

    with using({"attention bfloat16 2x4096x32:8x128 causal": "mosaic"}) as decisions:
        lowered = jax.jit(step).lower(state)
    decisions.taken  # what each call without a named implementation runs

A program that jax has already traced keeps the decisions it was traced with.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pallas_kernels.calls import Call

APART, IN_PLACE = "apart", "in place"  # forms of a call, apart from what implements it


@dataclass(eq=False)  # a key, by identity, of what was traced with them
class Decisions:
    """The decisions, and the kernels that were used. Calls go by the name of their class."""

    chosen: Mapping[str, str]
    taken: dict[str, str] = field(default_factory=dict)  # by calls that name no implementation
    calls: dict[str, Call] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)  # why a chosen one does not run

    def record(self, call: Call, name: str) -> None:
        """Records that this call runs `name`."""
        self.calls[call.name] = call
        self.taken[call.name] = name


# A global, not a context variable: a trace may run in another thread.
_in_force: list[Decisions] = []


@contextlib.contextmanager
def using(chosen: Mapping[str, str]) -> Iterator[Decisions]:
    """Makes calls inside that name no implementation run the chosen one, if it does not refuse."""
    decisions = Decisions(chosen)
    _in_force.append(decisions)
    try:
        yield decisions
    finally:
        _in_force.remove(decisions)


def chosen_form(call: Call, what: str) -> str | None:
    """Returns APART or IN_PLACE if a decision in force says how a call takes `what`."""
    decisions = in_force()
    return None if decisions is None else decisions.chosen.get(form_name(call, what))


def form_name(call: Call, what: str) -> str:
    """Returns the name for which APART or IN_PLACE may be chosen."""
    return f"{call.name} {what}"


def in_force() -> Decisions | None:
    """Returns the innermost decisions."""
    return _in_force[-1] if _in_force else None
