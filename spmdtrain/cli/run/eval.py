"""`spmdtrain eval`: measures the loss of a trained run on any text, or its scores at tasks."""

import argparse
import json

from spmdtrain.cli.devices import start_jax
from spmdtrain.cli.run.waiting import waiting
from spmdtrain.cli.shared_arguments import (
    add_devices,
    add_ema,
    add_make,
    add_own,
    add_set,
    add_step,
    of_run,
    positive_int,
)
from spmdtrain.config import DONE, ConfigError
from spmdtrain.config.settable import OF_EVALUATION


def add_eval(commands) -> None:
    """Adds the command `eval` and its arguments."""
    evaluate = commands.add_parser(
        "eval", help="measure loss, perplexity and bits per byte of a trained run on any text"
    )
    evaluate.add_argument("run", metavar="RUN", help="run directory")
    evaluate.add_argument(
        "paths",
        nargs="*",
        metavar="FILE",
        help="texts or token files (default: the validation data of the run)",
    )
    add_step(evaluate)
    evaluate.add_argument(
        "--field",
        default="text",
        metavar="NAME",
        help="field of the text in JSON lines and tables (default: text)",
    )
    evaluate.add_argument(
        "--tasks",
        metavar="A,B",
        help="run tasks of lm-evaluation-harness instead of a loss; needs the package lm-eval",
    )
    evaluate.add_argument(
        "--limit", type=positive_int, metavar="N", help="examples per task (default: all)"
    )
    add_make(evaluate)
    add_own(evaluate)
    add_ema(evaluate)
    add_set(evaluate, "e.g. mesh.data=8 (default: one device) or eval.batches=4", OF_EVALUATION)
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    add_devices(evaluate)
    evaluate.set_defaults(command=run_eval)


def run_eval(parsed: argparse.Namespace) -> int:
    """Prints a trained run's loss on its validation data or on files, or its scores at tasks."""
    if parsed.tasks and parsed.paths:
        raise ConfigError("--tasks and files cannot go together", fix="one of them at a time")
    if parsed.tasks:
        start_jax(parsed)
        return _evaluate_tasks(parsed)
    with waiting(parsed, f"evaluating {parsed.run}"):
        from spmdtrain.inference.evaluate import evaluate

        figures = evaluate(
            parsed.run,
            parsed.paths,
            field=parsed.field,
            own=parsed.own,
            **of_run(parsed),
        )
    if parsed.json:
        print(json.dumps(figures))
        return DONE
    parts = [f"loss {figures['loss']:.4f}"]
    if figures["perplexity"] is not None:
        parts.append(f"perplexity {figures['perplexity']:.4g}")
    if figures["bits_per_byte"] is not None:
        parts.append(f"{figures['bits_per_byte']:.4f} bits per byte")
    unit = "pairs" if "pairs" in figures else "tokens"
    counted = f"{figures[unit]:,} of {figures[f'split_{unit}']:,} {unit}"
    print(f"{'  '.join(parts)}  ({counted} of {figures['data']}, step {figures['step']})")
    for name, count in figures.items():
        word, slash, source = name.partition("/")
        if word == "tokens" and slash:
            print(f"  {source}  {_source_loss(figures, source)}  ({count:,} tokens)")
    return DONE


def _source_loss(figures: dict, source: str) -> str:
    """Describes the loss of one source of a mixture."""
    if f"loss/{source}" not in figures:
        return "no token with a loss"
    text = f"loss {figures[f'loss/{source}']:.4f}"
    bits = figures.get(f"bits_per_byte/{source}")
    return text if bits is None else f"{text}  {bits:.4f} bits per byte"


def _evaluate_tasks(parsed: argparse.Namespace) -> int:
    from spmdtrain.inference.harness import evaluate_tasks

    by_task = evaluate_tasks(
        parsed.run,
        parsed.tasks.split(","),
        limit=parsed.limit,
        **of_run(parsed),
    )
    if parsed.json:
        print(json.dumps(by_task, default=str))
        return DONE
    for task, figures in by_task.items():
        for name, value in figures.items():
            if isinstance(value, float):
                print(f"{task}  {name}  {value:.4f}")
    return DONE
