"""Shows where the time went: the account of the run's time, its course, and its events."""

from collections import Counter

from spmdtrain.lab.page.account import Event, Stretch, stretches
from spmdtrain.lab.page.chart import round_numbers
from spmdtrain.lab.page.formats import safe, seconds, share
from spmdtrain.lab.page.heading import time_spent
from spmdtrain.lab.page.read import RunRead
from spmdtrain.lab.page.troubles import is_trouble, story
from spmdtrain.processes import pulse
from spmdtrain.processes.goodput import DOWN, HANG, REPEATED

NAMES = {
    pulse.STEP: "training steps",
    REPEATED: "steps taken again",
    pulse.BEGIN: "starting",
    pulse.RESTORE: "reading or making the state",
    pulse.COMPILE: "compiling",
    pulse.FIRST_STEP: "first step",
    pulse.EVALUATE: "evaluating",
    pulse.SAVE: "saving",
    pulse.END: "last writing",
    HANG: "hanging",
    DOWN: "not running",
}
MOST_STRETCHES = 400
MOST_EVENTS = 300
MOST_SHOWN = 40  # events in the table
STRIP = 1000.0


def spent(run: RunRead) -> str:
    """Returns the account as a table and a timeline, or "" for a run without a launch."""
    account = time_spent(run)
    if account is None:
        return ""
    wall = account["wall_seconds"]
    rows = "".join(
        f'<tr><th scope=row><i class="swatch {what}"></i>{NAMES[what]}</th>'
        f'<td class=bar><div><i class="{what}" style="width:{100 * took / (wall or 1):.2f}%"></i>'
        f"</div></td>"
        f"<td class=num>{seconds(took)}</td><td class=num>{share(took, wall)}</td></tr>"
        for what, took in sorted(account["seconds"].items(), key=lambda item: -item[1])
        if took > 0
    )
    return (
        "<div class=scroll><table class=account><thead><tr><th>what</th><th></th>"
        f"<th class=num>time</th><th class=num>share</th></tr></thead><tbody>{rows}</tbody>"
        f"<tfoot><tr><th scope=row>all</th><td></td><td class=num>{seconds(wall)}</td><td></td>"
        f"</tr></tfoot></table></div>{_strip(run, wall)}{_events(run)}"
    )


def _strip(run: RunRead, wall: float) -> str:
    periods = stretches(run.events)
    if not periods or not wall:
        return ""
    begin = periods[0].begin
    body = [
        f'<rect class="{time.what}" x="{_x(time.begin - begin, wall):.1f}" y="14" height="20" '
        f'width="{max(_x(time.end - time.begin, wall), 0.5):.1f}"/>'
        for time in _coarse(periods)
    ]
    for event in story(run)[-MOST_EVENTS:]:
        kind = "bad" if is_trouble(event) else safe(event["event"])
        if kind in ("bad", "saved", "evaluated", "launched", "ended"):
            x = _x(min(max(event["time"] - begin, 0.0), wall), wall)
            top = {"saved": 40, "evaluated": 46}.get(kind, 6)
            body.append(f'<path class="event {kind}" d="M{x:.1f} {top}h0"/>')
    ticks = "".join(
        f'<span style="left:{100 * at / wall:.1f}%">{seconds(at)}</span>'
        for at in round_numbers(0.0, wall, 6)
    )
    counts = Counter(event["event"] for event in story(run))
    summary = ", ".join(f"{count} {name}" for name, count in counts.items())
    return (
        '<div class="plot strip"><svg viewBox="0 0 1000 52" preserveAspectRatio="none" role="img" '
        f'aria-label="{safe("When the run did what. Events: " + summary)}">{"".join(body)}</svg>'
        f'<div class="x" aria-hidden="true">{ticks}</div></div>'
        '<p class="dim">Above the strip: launches, ends and trouble (red). Below it: saves, and '
        "lower, evaluations.</p>"
    )


def _x(at: float, wall: float) -> float:
    return STRIP * at / wall


def _coarse(periods: list[Stretch]) -> list[Stretch]:
    """Returns the longest periods in order; the others are too narrow to be seen."""
    if len(periods) <= MOST_STRETCHES:
        return periods
    longest = sorted(periods, key=lambda time: time.begin - time.end)[:MOST_STRETCHES]
    return sorted(longest)


def _events(run: RunRead) -> str:
    """Returns the last events with their figures, except saves and evaluations."""
    plain = ("saved", "saving", "snapshot", "evaluated", "first_step", "compiled")
    shown = [event for event in story(run) if event["event"] not in plain][-MOST_SHOWN:]
    begin = run.events[0]["time"]
    rows = "".join(
        f"<tr><td class=num>{seconds(max(event['time'] - begin, 0.0))}</td>"
        f"<th scope=row>{safe(event['event'])}</th><td class=num>{event['step']:,}</td>"
        f"<td>{_details(event)}</td></tr>"
        for event in shown
    )
    return (
        f"<details><summary>the last {len(shown)} events other than saves and "
        "evaluations</summary><div class=scroll><table class=events><thead><tr><th "
        "class=num>after</th><th>event</th><th "
        f"class=num>step</th><th></th></tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _details(event: Event) -> str:
    names = ("why", "samples", "to_step", "from_step", "process", "host", "exit_code", "phase")
    return safe(", ".join(f"{name} {event[name]}" for name in names if name in event))
