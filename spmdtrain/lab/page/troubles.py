"""Lists what went wrong in a run: troubles in its events, and attempts that did not end in order.

A killed process cannot report anything. Its attempt is recognised by what follows: another launch,
or no process that holds the run.
"""

from collections.abc import Iterable, Iterator

from spmdtrain.lab.page.account import ORDERLY, Event, attempt_end, attempts_of
from spmdtrain.lab.page.read import RunRead

REPORTED = ("skipped", "rolled_back", "quarantined", "corrupted", "diverged", "straggler")
FATAL = ("corrupted", "diverged")  # reports after which the run ends
LOST = "lost"  # the event that a killed process could not write
WHY_LOST = "it ended without a message, as a killed process does"


def story(run: RunRead) -> list[Event]:
    """Returns the events of a run, with one called `lost` after each attempt without an end."""
    attempts = attempts_of(run.events)
    before_the_first = run.events[: len(run.events) - sum(map(len, attempts))]
    events: list[Event] = list(before_the_first)
    for number, attempt in enumerate(attempts):
        is_newest = number == len(attempts) - 1
        events += attempt
        if attempt[-1]["event"] != "ended" and not (is_newest and run.is_alive):
            events.append(_lost(attempt, None if is_newest else attempts[number + 1]))
    return events


def troubles(run: RunRead) -> list[Event]:
    """Returns the events that are trouble, each trouble once: its report, or else its end."""
    return list(_troubles(story(run)))


def is_trouble(event: Event) -> bool:
    """Returns True if an event reports trouble, or is an end that is not in order."""
    name = event["event"]
    return name in (*REPORTED, LOST) or (name == "ended" and event["exit_code"] not in ORDERLY)


def _troubles(events: Iterable[Event]) -> Iterator[Event]:
    is_reported = False  # the cause of this attempt's end
    for event in events:
        if is_trouble(event) and not (event["event"] == "ended" and is_reported):
            yield event
        if event["event"] in ("launched", *FATAL):
            is_reported = event["event"] in FATAL


def _lost(attempt: list[Event], following: list[Event] | None) -> Event:
    time, _ = attempt_end(attempt, following)
    step = max(event["step"] for event in attempt)
    before = (following or [{}])[0].get("before") or {}
    if type(before.get("step")) is int:
        step = max(step, before["step"])
    return {"event": LOST, "time": time, "step": step, "why": WHY_LOST}
