"""Shows where the seconds of a step go, as predicted by the planner and as traced."""

from collections import defaultdict
from collections.abc import Mapping

from spmdtrain.lab.page.columns import median
from spmdtrain.lab.page.cost.machine import numbers_in
from spmdtrain.lab.page.formats import plural, safe, seconds, share
from spmdtrain.lab.page.read import RunRead

MOST_PARTS = 12
# The planner's word for the bound of each sort of work in a trace. Its `host` counts as idle here.
BOUNDS = {
    "matmul": "compute",
    "kernel": "compute",
    "elementwise": "memory",
    "copy": "memory",
    "communication": "network",
    "idle": "idle",
}


def waterfall(run: RunRead) -> str:
    """Returns waterfalls of the parts of a step: predicted, and of the newest traced step."""
    return _predicted(run) + _measured(run)


def by_bound(run: RunRead) -> dict[str, tuple[float, float]]:
    """Returns (predicted, measured) seconds of a step by what bounds them.

    Empty unless the run has both a prediction and a profile.
    """
    terms = numbers_in(run.predicted.get("breakdown_seconds"))
    bounds = run.predicted.get("bound_by")
    sorts = numbers_in(run.profile.get("sorts"))
    if not terms or not sorts or not isinstance(bounds, dict):
        return {}
    predicted: dict[str, float] = defaultdict(float)
    measured: dict[str, float] = defaultdict(float)
    for term, took in terms.items():
        bound = str(bounds.get(term, "idle"))
        predicted["idle" if bound == "host" else bound] += took
    for sort, took in sorts.items():
        measured[BOUNDS.get(sort, "memory")] += took
    names = dict.fromkeys([*predicted, *measured])
    return {name: (predicted[name], measured[name]) for name in names}


def farthest_bound(run: RunRead) -> str | None:
    """Returns the bound whose seconds exceed the prediction most, or None if unknown."""
    more = {name: now - then for name, (then, now) in by_bound(run).items()}
    return max(more, key=lambda name: more[name]) if more else None


def _predicted(run: RunRead) -> str:
    parts = numbers_in(run.predicted.get("breakdown_seconds"))
    parts = {name: took for name, took in parts.items() if took > 0}
    if not parts:
        return ""
    measured = median(run.steps["step_seconds"][1:])
    hardware = safe(run.predicted.get("hardware", "?"))
    note = (
        f"Predicted for {hardware}: {seconds(sum(parts.values()))} a step. Measured here, in the "
        f"median: {seconds(measured)}. <code>{safe(run.command('profile', '--steps 3'))}</code> "
        "measures the parts."
    )
    return _table(parts, "part of a step", "predicted", note)


def _measured(run: RunRead) -> str:
    tables = ""
    step, devices = run.profile.get("step"), run.profile.get("devices")
    for name, title in (("sorts", "sort of work"), ("parts", "part of the model")):
        parts = {part: took for part, took in numbers_in(run.profile.get(name)).items() if took > 0}
        if parts and type(step) is int and type(devices) is int:
            note = f"Traced in step {step:,}, the mean over {plural(devices, 'device')}."
            tables += _table(parts, title, "measured", note)
    if bounds := by_bound(run):
        bounds_in_words = "; ".join(
            f"{name} {seconds(now)}, predicted {seconds(then)}"
            for name, (then, now) in bounds.items()
        )
        tables += f"<p class=dim>By what bounds it: {safe(bounds_in_words)}.</p>"
    return tables


def _table(parts: Mapping[str, float], title: str, how: str, note: str) -> str:
    total = sum(parts.values())
    order = sorted(parts.items(), key=lambda item: -item[1])
    if len(order) > MOST_PARTS:
        rest = sum(took for _, took in order[MOST_PARTS:])
        order = [*order[:MOST_PARTS], ("all else", rest)]
    rows, at = [], 0.0
    for name, took in order:
        rows.append(
            f"<tr><th scope=row>{safe(name.replace('_', ' '))}</th><td class=bar><div>"
            f'<i class="gap" style="width:{100 * at / total:.2f}%"></i>'
            f'<i class="m1" style="width:{100 * took / total:.2f}%"></i></div></td>'
            f"<td class=num>{seconds(took)}</td><td class=num>{share(took, total)}</td></tr>"
        )
        at += took
    return (
        f"<div class=scroll><table class=waterfall><thead><tr><th>{title}</th><th></th>"
        f"<th class=num>{how}</th><th class=num>share</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div><p class=dim>{note}</p>"
    )
