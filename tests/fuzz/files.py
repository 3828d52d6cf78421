"""Whether the files of a run say one and the same."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fuzz.runs import Run, lines_of
from spmdtrain.config import RunConfig


def faults(
    run: Run, config: RunConfig, changed_at: int = 0, before: RunConfig | None = None
) -> Iterator[str]:
    """What is wrong with the run directory of a run that ended as its `end` says.

    Up to the step `changed_at` it ran with the config `before`, where there is one.
    """
    yield from _metrics(run, config, changed_at, before or config)
    yield from _events(run, config)
    yield from _checkpoints(run, config)


def _metrics(run: Run, config: RunConfig, changed_at: int, before: RunConfig) -> Iterator[str]:
    lines = lines_of(run.directory / "metrics.jsonl")
    steps = [line["step"] for line in lines if "loss" in line]
    evaluated = [line["step"] for line in lines if "eval_loss" in line]
    if steps != list(range(1, len(steps) + 1)):
        yield f"metrics.jsonl has the steps {steps}"
    if run.end == "finished" and len(steps) != config.train.steps:
        yield f"metrics.jsonl ends at step {len(steps)} of {config.train.steps}"
    due = [
        step
        for step in (0, *steps)
        if _is_due(step, before if step <= changed_at and changed_at else config)
    ]
    if run.end == "finished" and evaluated != due:
        yield f"evaluated at steps {evaluated}, asked {due}"
    finite = all(
        np.isfinite(each["loss"]) and np.isfinite(each["grad_norm"]) for each in run.steps.values()
    )
    if run.end == "finished" and not (
        finite and all(np.isfinite(loss) for loss in run.evals.values())
    ):
        yield "not finite without DivergedError"


def _is_due(step: int, config: RunConfig) -> bool:
    """Whether the validation split is evaluated after this step; step 0: before the first one."""
    every = config.eval.every
    if step == 0:
        return every > 0 and (config.eval.at_start or config.train.init_from is not None)
    return every > 0 and (step % every == 0 or step == config.train.steps)


def _events(run: Run, config: RunConfig) -> Iterator[str]:
    happened = [
        (line["event"], line["step"])
        for line in lines_of(run.directory / "events.jsonl")
        if line["event"] not in ("launched", "ended")
    ]
    last = {"finished": "finished", "preempted": "preempted", "diverged": "diverged"}.get(run.end)
    if last and happened[-1][0] != last:
        yield f"events.jsonl ends in {happened[-1]}, the run in {run.end}"
    if run.end == "finished" and happened[-1][1] != config.train.steps:
        yield f"events.jsonl ends in {happened[-1]} of {config.train.steps} steps"


def _checkpoints(run: Run, config: RunConfig) -> Iterator[str]:
    there = listed(run.directory)
    saved = sorted(
        {
            line["step"]
            for line in lines_of(run.directory / "events.jsonl")
            if line["event"] == "saved"
        }
    )
    newest = max(there, default=0)  # a kill may come between a save and its event
    if saved and saved[-1] not in there and newest < saved[-1]:
        yield f"events.jsonl says that step {saved[-1]} is saved, checkpoints/ has {there}"
    if run.end in ("finished", "preempted") and not there:
        yield "nothing is saved at the end"
    if run.end in ("finished", "preempted") and len(there) > config.checkpoint.keep:
        yield f"checkpoints/ has {there}, asked to keep {config.checkpoint.keep}"
    for step in set(there) & set(run.seen.saved):
        for path, value in run.seen.saved[step].items():
            if np.issubdtype(value.dtype, np.integer):
                continue
            if not (is_window(value, step) if path.endswith("['recent']") else _is_finite(value)):
                yield f"a checkpoint with values that are not finite: {path.split('.')[-1]}"
                break
    named = re.search(r"step (\d+) is the newest checkpoint", run.said)
    if run.end == "diverged" and named and int(named[1]) not in there:
        yield f"the message names step {named[1]} as saved, checkpoints/ has {there}"


def _is_finite(value: np.ndarray) -> bool:
    return bool(np.isfinite(value.astype(np.float32)).all())


def is_window(rows: np.ndarray, step: int) -> bool:
    """Whether these are figures of good steps, at most one for each, the newest last; the rows
    that no step has filled yet are infinities.
    """
    taken = np.isfinite(rows).all(1)
    empty = np.isposinf(rows).all(1)
    count = taken.sum()
    return bool((taken | empty).all() and taken[len(rows) - count :].all() and count <= step)


def listed(directory: Path) -> list[int]:
    """Steps that checkpoints/ has."""
    return sorted(
        int(path.name) for path in (directory / "checkpoints").glob("*") if path.name.isdigit()
    )
