"""Writes the head of the page: the state in a sentence, figures or a table of runs, and remarks."""

import math
import re
import time
from collections import Counter
from html import unescape
from typing import Any

import numpy as np

from spmdtrain.lab.page.account import Event, account
from spmdtrain.lab.page.columns import known, mean, median, quantile, smoothed
from spmdtrain.lab.page.cost.alarm import alarm
from spmdtrain.lab.page.formats import number, plural, safe, seconds, share
from spmdtrain.lab.page.read import RunRead
from spmdtrain.lab.page.troubles import LOST, story, troubles
from spmdtrain.processes import pulse
from spmdtrain.processes.goodput import Report

TAIL = 20  # steps whose mean is reported as the current loss
ENDINGS = {
    "finished": "finished",
    "preempted": "stopped by a signal, saved",
    "stopped": "stopped by a hook, saved",
    "stopped_early": "stopped early: evaluations no longer improve",
    "diverged": "diverged",
}
SLOW = 2.0  # times the median step
STANDS_OUT = 6.0  # robust standard deviations of a norm around its neighbours
MOVES = 0.002  # of held-out loss, between two evaluations
FAR_ABOVE = 0.2  # of held-out loss over that of training
INPUT_SHARE = 0.1  # of a step
FEWEST = 30  # steps that a rule needs
EVALUATIONS = 4  # that a rule needs


def time_spent(run: RunRead) -> Report | None:
    """Returns the account of the run's time, up to now if it is running."""
    return account(run.events, time.time() if run.is_alive else None)


def state(run: RunRead) -> tuple[str, bool]:
    """Returns the state of a run in words, and True if it is good."""
    last = run.events[-1] if run.events else {}
    words = ""
    for event in run.events:
        if event["event"] == "launched":
            words = ""
        words = ENDINGS.get(event["event"], words)
    if run.is_alive:
        return "running", True
    if last.get("event") != "ended":
        return words or "not running: it ended without a message, as a killed run does", False
    code = last["exit_code"]
    if words and code in (0, 3):
        return words, words == "finished"
    phase = str(last.get("phase", "")).replace("_", " ")
    why = f": {last['why']}" if last.get("why") else ""
    by = " by a signal" if code > 128 else ""
    if code == 0:
        return "ended: nothing was left to do", True
    return f"ended{by} with exit code {code} in {phase or 'its work'}{why}", False


def last_step(run: RunRead) -> int:
    """Returns the newest step with figures."""
    steps = known(run.steps["step"])
    return int(steps.max()) if len(steps) else 0


def mesh_of(run: RunRead) -> str:
    """Returns the axes of the mesh that are split, in words."""
    starts = [event["mesh"] for event in run.events if isinstance(event.get("mesh"), dict)]
    axes = starts[-1] if starts else run.config.get("mesh", {})
    split = [
        f"{axis} {count}"
        for axis, count in (axes.items() if isinstance(axes, dict) else ())
        if type(count) is int and count > 1
    ]
    return " × ".join(split) or "one device"


def sentence(run: RunRead) -> str:
    """Returns a sentence of HTML: the model, its devices, its progress, and how the run ended."""
    words, is_good = state(run)
    what = run.setting("model", "make") or run.setting("model", "name", "a model")
    total = run.setting("train", "steps")
    of = f" of {total:,}" if isinstance(total, int) else ""
    when = ""
    if run.events:
        at = time.gmtime(min(max(run.events[-1]["time"], 0), 2**40))
        when = f", {time.strftime('%Y-%m-%d %H:%M UTC', at)}"
    return (
        f"<p class=lead>{safe(what)} on {safe(mesh_of(run))}; step {last_step(run):,}{of}, "
        f'<b class="{"good" if is_good else "poor"}">{safe(words)}</b>{when}.</p>'
    )


def training_loss(run: RunRead) -> float:
    """Returns the mean loss of the last steps."""
    return mean(run.steps["loss"][-TAIL:]) if len(run.steps) else math.nan


def held_out_loss(run: RunRead) -> float:
    """Returns the loss of the last evaluation."""
    losses = known(run.evaluations["eval_loss"])
    return float(losses[-1]) if len(losses) else math.nan


def cards(run: RunRead) -> str:
    """Returns the six figures of one run."""
    losses = known(run.steps["loss"])
    first = f"from {number(float(losses[0]), 4)}; mean of the last {TAIL}" if len(losses) else ""
    held = held_out_loss(run)
    best = ""
    evaluated = known(run.evaluations["eval_loss"])
    if len(evaluated):
        perplexity = f"e^loss {number(math.exp(min(held, 700.0)))}"
        is_best = evaluated[-1] <= evaluated.min()
        lowest = "its best" if is_best else f"best {number(float(evaluated.min()), 4)}"
        best = f"{perplexity}; {lowest}"
    took = run.steps["step_seconds"]
    spent = time_spent(run)
    goodput = note = "–"
    if spent is not None:
        goodput = f"{spent['goodput']:.0%}"
        note = f"steps {seconds(spent['seconds'][pulse.STEP])} of {seconds(spent['wall_seconds'])}"
    bad = troubles(run)
    rate = median(run.steps["tokens_per_second"][1:])
    figures = [
        ("training loss", number(training_loss(run), 4), first),
        ("held-out loss", number(held, 4), best),
        ("tokens", number(float(known(run.steps["tokens"]).sum())), f"{number(rate)}/s, median"),
        ("step", seconds(median(took[1:])), f"99 %: {seconds(quantile(took[1:], 0.99))}"),
        ("goodput", goodput, note),
        ("trouble", str(len(bad) or "none"), _kinds(bad) or "no step was bad, no process lost"),
    ]
    inner = "".join(
        f"<div class=card><dt>{title}</dt><dd class=value>{value}</dd>"
        f"<dd class=dim>{details}</dd></div>"
        for title, value, details in figures
    )
    return f"<dl class=cards>{inner}</dl>"


def _kinds(bad: list[Event]) -> str:
    """Lists how many events there are of each name."""
    counts = Counter("failed" if event["event"] == "ended" else event["event"] for event in bad)
    return ", ".join(f"{count} {safe(name.replace('_', ' '))}" for name, count in counts.items())


def figures(run: RunRead) -> dict[str, Any]:
    """Returns the figures of the page's head as JSON values; unknown ones are None."""
    took = run.steps["step_seconds"][1:]
    numbers = {
        "loss": training_loss(run),
        "eval_loss": held_out_loss(run),
        "tokens": float(known(run.steps["tokens"]).sum()),
        "tokens_per_second": median(run.steps["tokens_per_second"][1:]),
        "step_seconds": median(took),
        "step_seconds_99": quantile(took, 0.99),
    }
    return {
        "run": run.directory,
        "state": state(run)[0],
        "step": last_step(run),
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        "trouble": len(troubles(run)),
        "time": time_spent(run),
        "worth_a_look": [unescape(re.sub("<[^>]*>", "", remark)) for remark in remarks(run)],
    }


def table(runs: list[RunRead]) -> str:
    """Returns the figures of several runs, a row each."""
    rows = []
    for at, run in enumerate(runs):
        spent = time_spent(run)
        took = median(run.steps["step_seconds"][1:])
        cells = [
            f"{last_step(run):,}",
            number(training_loss(run), 4),
            number(held_out_loss(run), 4),
            number(float(known(run.steps["tokens"]).sum())),
            seconds(took),
            share(spent["seconds"][pulse.STEP], spent["wall_seconds"]) if spent else "–",
            str(len(troubles(run)) or "none"),
        ]
        inner = "".join(f"<td class=num>{cell}</td>" for cell in cells)
        rows.append(
            f'<tr><th scope=row><i class="swatch c{at}"></i>{safe(run.name)}</th>{inner}'
            f"<td>{safe(state(run)[0])}</td></tr>"
        )
    names = ("step", "training loss", "held-out loss", "tokens", "seconds a step", "goodput")
    head = "".join(f"<th class=num>{name}</th>" for name in (*names, "trouble"))
    return (
        f"<div class=scroll><table class=runs><thead><tr><th>run</th>{head}<th>state</th></tr>"
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def remarks(run: RunRead) -> list[str]:
    """Returns remarks that a careful reader would make, as HTML, by explicit rules."""
    rules = (_of_lost, _of_slowing, _of_steps, _of_norms, _of_evaluations, _of_input)
    lines = [remark for rule in rules for remark in rule(run)]
    words, is_good = state(run)
    if not is_good and not run.is_alive and run.events:
        lines.insert(0, f"{safe(words[0].upper() + words[1:])}.")
    return lines


def _of_lost(run: RunRead) -> list[str]:
    """Names the killed attempts; the newest is named by the state of the run."""
    killed = [event for event in story(run) if event["event"] == LOST]
    if not killed or (len(killed) == 1 and run.events[-1]["event"] != "ended" and not run.is_alive):
        return []
    last = killed[-1]
    return [
        f"{plural(len(killed), 'attempt')} of the run ended without a message, as a killed process "
        f"does, the last one in step {last['step']:,}: the output of its processes, or of the "
        "system, says what killed it."
    ]


def _of_slowing(run: RunRead) -> list[str]:
    slower = alarm(run)
    if slower is None:
        return []
    command = f"<code>{safe(run.command('profile', '--steps 3'))}</code> says in which part"
    why = {
        "input": "the wait for batches grew, so the input holds it up",
        "step": f"the wait for batches did not grow, so it is the step itself: {command}",
    }
    ratio = f"{slower.ratio:.2f} times the predicted time, before it was {slower.usual:.2f}"
    if slower.predicted is None:
        ratio = f"{seconds(slower.ratio)} a step, before it was {seconds(slower.usual)}"
    return [f"From step {slower.first:,} on the run is slower, {ratio}: {why[slower.component]}."]


def _of_steps(run: RunRead) -> list[str]:
    took = known(run.steps["step_seconds"][1:])
    if len(took) < FEWEST:
        return []
    usual, slowest = float(np.median(took)), float(np.quantile(took, 0.99))
    if not usual or slowest <= SLOW * usual:
        return []
    over = took[took > SLOW * usual]
    lost = float((over - usual).sum() / took.sum())
    return [
        f"The slowest steps took {slowest / usual:.1f} times the median; what they took beyond "
        f"it is {lost:.0%} of the time in steps."
    ]


def _of_norms(run: RunRead) -> list[str]:
    norms = run.steps["grad_norm"]
    around = smoothed(norms, 40)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = norms / around
    ratios = known(ratio)
    if len(ratios) < FEWEST:
        return []
    spread = 1.4826 * float(np.median(np.abs(ratios - np.median(ratios))))
    hot = np.flatnonzero(ratio - 1 > max(STANDS_OUT * spread, 0.5))
    if not len(hot):
        return []
    worst = hot[np.argmax(ratio[hot])]
    step = int(run.steps["step"][worst])
    return [
        f"The gradient norm stood out in {plural(len(hot), 'step')}, most in step {step:,} "
        f"({ratio[worst]:.1f} times its neighbours): "
        f"<code>{safe(run.command('explain', f'--step {step}'))}</code> asks why"
    ]


def _of_evaluations(run: RunRead) -> list[str]:
    losses = known(run.evaluations["eval_loss"])
    if len(losses) < EVALUATIONS:
        return []
    lines = []
    move = float(losses[-1] - losses[-2])
    if move < -MOVES:
        more = 2 * last_step(run)
        lines.append(
            f"Held-out loss was still falling, by {-move:.3f} between the last two evaluations: "
            f"<code>--set train.steps={more}</code> continues the run."
        )
    if move > MOVES:
        lines.append(f"Held-out loss rose by {move:.3f} between the last two evaluations.")
    gap = float(losses[-1]) - training_loss(run)
    if gap > FAR_ABOVE:
        lines.append(
            f"Held-out loss is {gap:.2f} above that of training: overfitting, or other text."
        )
    return lines


def _of_input(run: RunRead) -> list[str]:
    waits = known(run.steps["input_seconds"][1:])
    took = known(run.steps["step_seconds"][1:])
    if len(waits) < FEWEST or waits.sum() <= INPUT_SHARE * took.sum():
        return []
    return [
        f"The loop waited for batches for {share(float(waits.sum()), float(took.sum()))} of the "
        "time in steps: prepare the data into token files, or raise "
        "<code>--set data.read_ahead=8</code>."
    ]
