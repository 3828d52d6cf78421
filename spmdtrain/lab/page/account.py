"""Accounts for the time of a run by class, from its events, as a launcher does.

`spmdtrain launch` keeps this account while it listens to a process (processes/goodput.py). Here it
is computed afterwards, from events.jsonl. One figure is lost, which no process can write: how long
a process hung before the next attempt. That time counts as `down`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from spmdtrain.processes import pulse
from spmdtrain.processes.goodput import DOWN, Goodput, Report

ENDINGS = ("finished", "preempted", "stopped", "stopped_early")
ORDERLY = (0, 3)  # exit codes after which no step is repeated: finished, and asked to end
Event = Mapping[str, Any]


class Stretch(NamedTuple):
    """A period of one class of time, from `begin` to `end`, in seconds since the epoch."""

    begin: float
    end: float
    what: str


def account(events: Iterable[Event], until: float | None = None) -> Report | None:
    """Returns the time of a run by class, from its launch to its last event, or up to `until`.

    None if the run has no event of a launch, as in older versions.
    """
    accounted = _read(events, until)
    return accounted and accounted[0]


def stretches(events: Iterable[Event], until: float | None = None) -> list[Stretch]:
    """Returns the periods of a run's time, oldest first, including those of undone steps."""
    accounted = _read(events, until)
    return accounted[1] if accounted else []


def _read(events: Iterable[Event], until: float | None) -> tuple[Report, list[Stretch]] | None:
    attempts = attempts_of(events)
    if not attempts:
        return None
    clock = [float(attempts[0][0]["time"])]
    goodput = Goodput(now=lambda: clock[0])
    spent: list[Stretch] = []
    now = [clock[0], DOWN]

    def enter(time: float, what: str | None) -> None:
        time = max(time, clock[0])
        clock[0] = time
        if what:
            if time > now[0]:
                spent.append(Stretch(now[0], time, now[1]))
            now[:] = time, what

    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        for time, what, step in _messages(attempt):
            enter(time, what if what in pulse.PHASES else None)
            goodput.heard(what, step)
        end, code = attempt_end(attempt, following)
        if following is None and code is None and until is not None:
            end = max(end, until)
        if following is None and code is None:
            enter(end, now[1])
            continue
        enter(end, DOWN)
        if code in ORDERLY:
            goodput.enter(DOWN)
        else:
            goodput.failed()
            if following is None:
                goodput.over()
    return goodput.report(), spent


def attempts_of(events: Iterable[Event]) -> list[list[Event]]:
    """Returns the events of each attempt, without those before the first launch."""
    attempts: list[list[Event]] = []
    for event in events:
        if event["event"] == "launched":
            attempts.append([])
        if attempts:
            attempts[-1].append(event)
    return attempts


def attempt_end(attempt: list[Event], following: list[Event] | None) -> tuple[float, int | None]:
    """Returns when an attempt ended, as far as its files tell, and its exit code if recorded."""
    last = attempt[-1]
    if last["event"] == "ended":
        return last["time"], last["exit_code"]
    # It was killed, or is still running. Its last sign of life is an event or the line of a step.
    before = (following or [{}])[0].get("before") or {}
    times = [event["time"] for event in attempt]
    if before.get("time"):
        times.append(before["time"])
    return max(times), None


def _messages(attempt: list[Event]) -> list[tuple[float, str, int]]:
    """Returns (time, class, step) of the messages that the process sent, in order of time."""
    sent = [message for event in attempt for message in _of_event(event)]
    is_stepping = False
    messages = []
    for time, what, step in sorted(sent, key=lambda message: message[0]):
        if what == _GO_ON:
            what = pulse.STEP if is_stepping else pulse.FIRST_STEP
        elif what in (pulse.STEP, pulse.FIRST_STEP):
            is_stepping = what == pulse.STEP
        messages.append((time, what, step))
    return messages


_GO_ON = "go on"  # with the steps, or with the first one


def _of_event(event: Event) -> Iterator[tuple[float, str, int]]:
    """Yields the messages that correspond to an event."""
    time, step = event["time"], event["step"]
    name = event["event"]
    begin = time - event.get("seconds", 0.0)
    match name:
        case "launched":
            yield time, pulse.BEGIN, 0
        case "started" | "resumed":
            yield begin, pulse.RESTORE, 0
            yield time, pulse.UNDONE, step
            yield time, pulse.COMPILE, 0
        case "compiled":
            yield time, pulse.FIRST_STEP, step + 1
        case "first_step":
            yield time, pulse.STEP, step + 1
        case "evaluated":
            yield begin, pulse.EVALUATE, step
            yield time, _GO_ON, step + 1
        case "saving":
            yield begin, pulse.SAVE, step
            yield time, _GO_ON, step + 1
        case "saved":
            yield time, pulse.SAVED, step
        case "snapshot":
            yield begin, pulse.SAVE, step
            yield time, pulse.HELD, step
            yield time, _GO_ON, step + 1
        case "rolled_back":
            yield begin, pulse.RESTORE, step
            yield begin, pulse.UNDONE, event["to_step"]
            yield time, pulse.FIRST_STEP, event["to_step"] + 1
        case _ if name in ENDINGS:
            yield begin, pulse.END, step
