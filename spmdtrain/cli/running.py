"""Runs the commands on runs: `train`, `show`, `sample`, `eval`."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from spmdtrain.cli.devices import start_jax
from spmdtrain.cli.machine.tuning import before_training
from spmdtrain.cli.outputs import write_picture
from spmdtrain.cli.prompts import TALK, as_json, check_alone, questions, read_prompts
from spmdtrain.config import DONE, PREEMPTED, ConfigError, UserError, load, to_toml
from spmdtrain.processes import pulse
from spmdtrain.processes.scheduler import is_first
from spmdtrain.running.report import stages

if TYPE_CHECKING:
    from spmdtrain.config.schema import RunConfig
    from spmdtrain.running.guards.memory import OutOfMemoryError


def train(parsed: argparse.Namespace) -> int:
    """Trains or resumes a run. Returns PREEMPTED if it was asked to stop and has saved."""
    pulse.begin()
    config = load(parsed.config, parsed.set)
    if parsed.print_config:
        from spmdtrain.processes import xla_flags

        print(f"{xla_flags.as_comment()}\n{to_toml(config)}", end="")
        return DONE
    directory = f"runs/{Path(parsed.config).stem}" if parsed.run is None else parsed.run
    if parsed.hardware is not None:
        from spmdtrain.planner.cost.hardware import hardware

        hardware(parsed.hardware)  # refuses a typo before jax looks for devices
    with stages.shown(quiet=not is_first(parsed.process)):
        return _train(parsed, config, directory)


def _train(parsed: argparse.Namespace, config: "RunConfig", directory: str) -> int:
    before_training(parsed, config)
    stages.enter("starting jax")
    start_jax(parsed)
    from spmdtrain.running.guards.memory import OutOfMemoryError
    from spmdtrain.running.loop import run

    prediction = _prediction(config, parsed.hardware)
    try:
        outcome = run(
            config, directory, fresh=parsed.fresh, step=parsed.step, prediction=prediction
        )
    except OutOfMemoryError as error:
        raise _with_remedy(error) from None
    pulse.tell(pulse.DONE, outcome.step)
    return PREEMPTED if outcome.status == "preempted" else DONE


def _with_remedy(error: "OutOfMemoryError") -> "OutOfMemoryError":
    """Returns the error with the cheapest change that fits, if the planner knows one."""
    from spmdtrain.planner.remedy import cheapest_change

    if not error.needed or not error.available:
        return error
    setup = error.setup
    sizes = dict(setup.mesh.shape)
    found = cheapest_change(setup.config, sizes, error.available / error.needed)
    if not found:
        return error
    return error.with_fix(" ".join(f"--set {setting}" for setting in found))


def _prediction(config, name: str | None):
    """Predicts time and memory of a step on the hardware `name`, or else on the local device.

    Without a `name`, None if the device is not described or the estimate is refused. Every process
    predicts, so that either all are refused or none.
    """
    import jax

    from spmdtrain.planner.cost.hardware import NAME_OF_DEVICE_KIND, hardware
    from spmdtrain.planner.estimate import estimate
    from spmdtrain.running.report.summary import Prediction

    known = name or NAME_OF_DEVICE_KIND.get(jax.devices()[0].device_kind)
    if known is None:
        return None
    try:
        found = estimate(config, jax.device_count(), hardware(known))
    except UserError:
        if name:
            raise
        return None  # nobody asked; the run itself reports what is wrong with it
    return Prediction(found.hardware.name, found.time.seconds, found.memory.total)


def show(parsed: argparse.Namespace) -> int:
    """Prints the config, the mesh and every parameter; --svg draws which devices hold what."""
    config = load(parsed.config, parsed.set)
    start_jax(parsed, alone=True)
    from spmdtrain.show import sharding_svg
    from spmdtrain.show import show as shown

    if parsed.svg is not None:
        write_picture(parsed.svg, sharding_svg.svg(shown.setup_of(config)))
    if parsed.json:
        values, _ = shown.describe(config)
        print(json.dumps(values, indent=1))
    else:
        print(shown.show(config))
    if parsed.svg is not None:
        output = sys.stderr if parsed.json else sys.stdout  # the JSON stays alone on stdout
        print(f"{parsed.svg}: the mesh, a batch and the parameters, drawn", file=output)
    return DONE


def sample(parsed: argparse.Namespace) -> int:
    """Prints text that a trained run generates."""
    if parsed.chat is TALK:
        return _talk(parsed)
    prompts = read_prompts(parsed)
    with _waiting(parsed, f"reading {parsed.run} and generating"):
        from spmdtrain.inference import sample

        choice = sample.Choice(parsed.temperature, parsed.top_k, parsed.top_p)
        texts = sample.generate(
            parsed.run,
            prompts,
            parsed.length,
            step=parsed.step,
            choice=choice,
            seed=parsed.seed,
            stop=parsed.stop,
            overrides=parsed.set,
            make=parsed.make,
            ema=parsed.ema,
            parse_special=parsed.parse_special,
        )
    if parsed.json:
        for prompt, text in zip(prompts, texts, strict=True):
            print(as_json(prompt, text))
    else:
        print("\n\n".join(texts))
    return DONE


def _talk(parsed: argparse.Namespace) -> int:
    """Answers the questions on standard input, each with the whole conversation so far."""
    check_alone(parsed)
    with _waiting(parsed, f"reading {parsed.run}"):
        import jax

        from spmdtrain.inference import sample
        from spmdtrain.inference.chat import Chat

        if jax.process_count() > 1:
            raise ConfigError("several processes have several inputs", fix='--chat "TEXT"')
        chat = Chat(
            parsed.run,
            parsed.length,
            step=parsed.step,
            choice=sample.Choice(parsed.temperature, parsed.top_k, parsed.top_p),
            seed=parsed.seed,
            stop=parsed.stop,
            overrides=parsed.set,
            make=parsed.make,
            ema=parsed.ema,
        )
    with chat:
        for question in questions():
            asked = [*chat.messages, {"role": "user", "content": question}]
            text = chat.ask(question)
            print(as_json(asked, text) if parsed.json else text, flush=True)
    return DONE


def evaluate(parsed: argparse.Namespace) -> int:
    """Prints a trained run's loss on its validation data or on files, or its scores at tasks."""
    if parsed.tasks and parsed.paths:
        raise ConfigError("--tasks and files cannot go together", fix="one of them at a time")
    if parsed.tasks:
        start_jax(parsed)
        return _evaluate_tasks(parsed)
    with _waiting(parsed, f"evaluating {parsed.run}"):
        from spmdtrain.inference.evaluate import evaluate

        found = evaluate(
            parsed.run,
            parsed.paths,
            step=parsed.step,
            field=parsed.field,
            overrides=parsed.set,
            make=parsed.make,
            ema=parsed.ema,
        )
    if parsed.json:
        print(json.dumps(found))
        return DONE
    parts = [f"loss {found['loss']:.4f}"]
    if found["perplexity"] is not None:
        parts.append(f"perplexity {found['perplexity']:.4g}")
    if found["bits_per_byte"] is not None:
        parts.append(f"{found['bits_per_byte']:.4f} bits per byte")
    unit = "pairs" if found["perplexity"] is None else "tokens"
    tokens = f"{found['tokens']:,} of {found['split_tokens']:,} {unit}"
    print(f"{'  '.join(parts)}  ({tokens}, step {found['step']})")
    for name, count in found.items():
        word, slash, source = name.partition("/")
        if word == "tokens" and slash:
            print(f"  {source}  {_source_loss(found, source)}  ({count:,} tokens)")
    return DONE


@contextlib.contextmanager
def _waiting(parsed: argparse.Namespace, stage: str) -> Iterator[None]:
    """Imports jax, and shows the command's stage to a person at a terminal."""
    watched = sys.stderr.isatty() and is_first(parsed.process)
    with stages.shown(sys.stderr, quiet=not watched):
        stages.enter("starting jax")
        start_jax(parsed)
        stages.enter(stage)
        yield


def _source_loss(found: dict, source: str) -> str:
    """Describes the loss of one source of a mixture."""
    if f"loss/{source}" not in found:
        return "no token with a loss"
    text = f"loss {found[f'loss/{source}']:.4f}"
    bits = found.get(f"bits_per_byte/{source}")
    return text if bits is None else f"{text}  {bits:.4f} bits per byte"


def _evaluate_tasks(parsed: argparse.Namespace) -> int:
    from spmdtrain.inference.harness import evaluate_tasks

    found = evaluate_tasks(
        parsed.run,
        parsed.tasks.split(","),
        limit=parsed.limit,
        step=parsed.step,
        overrides=parsed.set,
        make=parsed.make,
        ema=parsed.ema,
    )
    if parsed.json:
        print(json.dumps(found, default=str))
        return DONE
    for task, figures in found.items():
        for name, value in figures.items():
            if isinstance(value, float):
                print(f"{task}  {name}  {value:.4f}")
    return DONE
