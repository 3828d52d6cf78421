"""Draws the curves of the page: losses, norms, rate, speed, memory, and a histogram of steps."""

import math

import numpy as np

from spmdtrain.lab.page.chart import Chart, powers
from spmdtrain.lab.page.columns import known, median, quantile, smoothed
from spmdtrain.lab.page.formats import safe, seconds
from spmdtrain.lab.page.heading import last_step
from spmdtrain.lab.page.read import RunRead
from spmdtrain.lab.page.troubles import LOST, story

SPAN = 20  # steps that a mean covers
POINTS = 1200  # of all runs in a chart
FEWEST_POINTS = 100  # of a run in a chart
MOST_SOURCES = 6
MOST_MARKS = 60
BINS = 36
OF_NO_CHART = ("_stderr", "/sample_len")  # the harness's notes on its own figures
BAD = ("skipped", "rolled_back", "diverged", "corrupted", LOST)


def curves(runs: list[RunRead]) -> str:
    """Returns all charts as HTML."""
    last = float(max(last_step(run) for run in runs) or 1)
    charts = [
        _norms(runs, last),
        _lines(runs, last, "rate", "Learning rate", "learning_rate", from_zero=True),
        _lines(
            runs, last, "speed", "Tokens a second", "tokens_per_second", from_zero=True, span=10
        ),
        _lines(runs, last, "memory-held", "Memory of the fullest device, bytes", "memory_bytes"),
        _lines(runs, last, "mfu", "MFU", "mfu", from_zero=True, span=10),
        _lines(runs, last, "input", "Wait for input, seconds", "input_seconds", from_zero=True),
    ]
    small = [
        _sources(runs, last).html(),
        _tasks(runs, last).html(),
        *(chart.html() for chart in charts),
        _times(runs),
    ]
    return _loss(runs, last).html() + f"<div class=pair>{''.join(small)}</div>"


def _buckets(runs: list[RunRead], lines: int = 1) -> int:
    return max(POINTS // (len(runs) * lines * 3), FEWEST_POINTS)


def _named(runs: list[RunRead], run: RunRead, what: str) -> str:
    return f"{run.name}: {what}" if len(runs) > 1 else what


def _loss(runs: list[RunRead], last: float) -> Chart:
    note = f"line: mean of {SPAN} steps around; pale: each step; dots: evaluation, on held-out text"
    chart = Chart("loss", "Loss", note, last, _buckets(runs), is_tall=True)
    for at, run in enumerate(runs):
        step, loss = run.steps["step"], run.steps["loss"]
        chart.add("", f"c{at}", step, loss, "faint")
        chart.add(_named(runs, run, "training"), f"c{at}", step, smoothed(loss, SPAN))
        held = run.evaluations
        chart.add(
            _named(runs, run, "evaluation"), f"c{at}", held["step"], held["eval_loss"], "dots"
        )
        bad = [event for event in story(run) if event["event"] in BAD]
        chart.marks += [(min(event["step"], last), event["event"]) for event in bad[-MOST_MARKS:]]
    return chart


def _sources(runs: list[RunRead], last: float) -> Chart:
    names = sorted({n for run in runs for n in run.steps.names if n.startswith("loss/")})
    note = "training, mean of 20 steps around"
    if len(names) > MOST_SOURCES:
        note += f"; {MOST_SOURCES} of {len(names)} sources"
    names = names[:MOST_SOURCES]
    buckets = max(_buckets(runs, len(names) or 1), FEWEST_POINTS)
    chart = Chart("sources", "Loss by source", note, last, buckets)
    for at, run in enumerate(runs):
        for place, name in enumerate(names):
            style = f"c{at} d{place % 3}" if len(runs) > 1 else f"c{place}"
            label = _named(runs, run, name.removeprefix("loss/"))
            chart.add(label, style, run.steps["step"], smoothed(run.steps[name], SPAN))
    return chart


def _tasks(runs: list[RunRead], last: float) -> Chart:
    """Returns the chart of `eval.tasks`, empty if no run has them."""
    names = [
        name
        for name in sorted({n for run in runs for n in run.evaluations.names})
        if name.startswith("task/") and not name.endswith(OF_NO_CHART)
    ]
    note = f"{MOST_SOURCES} of {len(names)} figures" if len(names) > MOST_SOURCES else ""
    names = names[:MOST_SOURCES]
    chart = Chart("tasks", "Tasks", note, last, _buckets(runs))
    for at, run in enumerate(runs):
        for place, name in enumerate(names):
            style = f"c{at if len(runs) > 1 else place}"
            label = _named(runs, run, name.removeprefix("task/"))
            chart.add(label, style, run.evaluations["step"], run.evaluations[name], "dots")
    return chart


def _norms(runs: list[RunRead], last: float) -> Chart:
    chart = Chart("norm", "Gradient norm", "before clipping; log scale", last, _buckets(runs))
    chart.is_log = True
    for at, run in enumerate(runs):
        step, norm = run.steps["step"], run.steps["grad_norm"]
        chart.add("", f"c{at}", step, norm, "faint")
        chart.add(_named(runs, run, "norm"), f"c{at}", step, smoothed(norm, SPAN))
    return chart


def _lines(
    runs: list[RunRead],
    last: float,
    key: str,
    title: str,
    name: str,
    *,
    from_zero: bool = False,
    span: int = 1,
) -> Chart:
    """Returns the chart of one figure without the first step, empty if no run has it."""
    note = f"mean of {span} steps around" if span > 1 else ""
    chart = Chart(key, title, note, last, _buckets(runs), from_zero=from_zero)
    for at, run in enumerate(runs):
        values = smoothed(run.steps[name][1:], span)
        chart.add(_named(runs, run, title.lower()), f"c{at}", run.steps["step"][1:], values)
    return chart


def _times(runs: list[RunRead]) -> str:
    """Returns the histogram of step times on a log scale, with the medians."""
    times = [known(run.steps["step_seconds"][1:]) for run in runs]
    times = [values[values > 0] for values in times]
    every = np.concatenate(times)
    if len(every) < 2:
        return ""
    low = math.log10(float(every.min()))
    high = max(math.log10(float(np.quantile(every, 0.999)) * 1.02), low + 0.01)
    edges = np.logspace(low, high, BINS + 1)
    counts = [np.histogram(values, edges)[0] / max(len(values), 1) for values in times]
    top = max(float(shares.max()) for shares in counts) or 1.0

    def place(value: float) -> float:
        return 1000 * (math.log10(value) - low) / (high - low)

    body = []
    for at, share in enumerate(counts):
        steps = "".join(
            f"H{place(edge):.0f}V{100 - 95 * value / top:.1f}"
            for edge, value in zip(edges[:-1].tolist(), share.tolist(), strict=True)
        )
        body.append(f'<path class="bars c{at}" d="M0 100{steps}H1000V100Z"/>')
    for at, values in enumerate(times):
        if len(values):
            body.append(f'<path class="mid c{at}" d="M{place(median(values)):.0f} 0V100"/>')
    ticks = powers(low, high, 6)
    labels = "".join(f'<span style="left:{place(t) / 10:.1f}%">{seconds(t)}</span>' for t in ticks)
    medians = "; ".join(
        f"{run.name}: median {seconds(median(values))}, "
        f"99 % within {seconds(quantile(values, 0.99))}"
        for run, values in zip(runs, times, strict=True)
    )
    return (
        "<figure class=chart id=step-times><figcaption><b>Time of a step</b> <span>share of the "
        "steps, log scale; lines: medians</span></figcaption>"
        f'<p class="dim">{safe(medians)}</p><div class="plot"><svg viewBox="0 0 1000 100" '
        f'preserveAspectRatio="none" role="img" aria-label="{safe("Time of a step. " + medians)}">'
        f'{"".join(body)}</svg><div class="x" aria-hidden="true">{labels}</div></div></figure>'
    )
