"""`spmdtrain estimate`: time and memory of a step, or of sampling, without the hardware."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from spmdtrain.cli.devices import without_devices
from spmdtrain.cli.shared_arguments import (
    add_config,
    add_hardware,
    positive_int,
    refuse_together,
)
from spmdtrain.config import DONE, ConfigError, load
from spmdtrain.config.schema import RunConfig
from spmdtrain.processes import xla_flags

if TYPE_CHECKING:
    from spmdtrain.planner.cost.hardware import Hardware


def add_estimate(commands) -> None:
    """Adds the command `estimate` and its arguments."""
    estimate = commands.add_parser(
        "estimate", help="predict time and memory of a step on hardware that need not be present"
    )
    add_config(estimate)
    add_hardware(estimate)
    estimate.add_argument(
        "--devices",
        type=positive_int,
        metavar="N",
        help="number of devices (default: the product of the mesh)",
    )
    estimate.add_argument(
        "--anchor",
        metavar="RUN",
        help="scale the times by those that a run on this hardware measured",
    )
    estimate.add_argument(
        "--sweep",
        metavar="hardware.KEY=A,B",
        help="estimate at several values of one figure",
    )
    estimate.add_argument(
        "--compile",
        action="store_true",
        help="compile the real step for these GPUs and print XLA's own figures",
    )
    estimate.add_argument(
        "--generate",
        type=_prompt_and_new,
        metavar="PROMPT+NEW",
        help="predict generation instead, e.g. 512+128 tokens",
    )
    estimate.add_argument(
        "--batch",
        type=positive_int,
        metavar="N",
        help="sequences to generate at once (default: 1)",
    )
    estimate.set_defaults(command=run_estimate)


def _prompt_and_new(text: str) -> tuple[int, int]:
    """Reads PROMPT+NEW, two numbers of tokens."""
    prompt, plus, new = text.partition("+")
    if not plus:
        raise argparse.ArgumentTypeError(f"{text} is not PROMPT+NEW, e.g. 512+128")
    return positive_int(prompt), positive_int(new)


def run_estimate(parsed: argparse.Namespace) -> int:
    """Prints the cost of a step, or of generation, on hardware that need not be present."""
    refuse_together(parsed, "sweep", "generate", "compile", "anchor")
    refuse_together(parsed, "generate", "compile", "anchor")
    if parsed.batch and not parsed.generate:
        raise ConfigError(
            "--batch is the number of sequences for --generate, which is missing",
            asked=f"--batch {parsed.batch}",
            fix=f"--generate 512+128 --batch {parsed.batch}",
        )
    from spmdtrain.planner.cost.hardware import hardware as named_hardware

    hardware = named_hardware(parsed.hardware)
    config = load(parsed.config, parsed.set)
    if parsed.compile:
        xla_flags.set_xla_flags(deviceless=True)
    without_devices()
    if parsed.sweep is not None:
        return _sweep(parsed, config, hardware)
    if parsed.generate:
        return _estimate_inference(parsed, config, hardware)
    return _estimate_step(parsed, config, hardware)


def _estimate_step(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import anchor, deviceless, report, traffic
    from spmdtrain.planner.estimate import estimate as estimate_config
    from spmdtrain.planner.estimate import with_vocab
    from spmdtrain.planner.own_model import describe

    config = with_vocab(config)
    cost = estimate_config(config, parsed.devices, hardware)
    scale = 1.0
    if parsed.anchor is not None:
        scale = anchor.anchor_scale(Path(parsed.anchor), hardware)
        cost = cost.scaled(scale)

    compiled = None
    if parsed.compile:
        compiled = deviceless.compile_step(config, cost.workload.mesh.sizes, hardware)
        if parsed.anchor is None:  # the anchor's scale already includes what its run hides
            cost = cost.as_compiled(compiled["traffic"] or [])

    values = report.estimate_values(cost)
    texts = [report.estimate_text(cost)]
    if config.model.make:
        texts.append(describe(config))
    if parsed.anchor is not None:
        values["anchor"] = scale
        texts.append(report.anchor_text(parsed.anchor, scale))
    if compiled is not None:
        needed = traffic.needed_traffic(cost.workload)
        values["compiled"] = compiled
        values["needed_traffic"] = needed
        texts.append(report.compiled_text(compiled, cost.memory, needed))
    print(json.dumps(values) if parsed.json else "\n".join(texts))
    return DONE


def _sweep(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import report
    from spmdtrain.planner.estimate import sweep

    figure, rows = sweep(config, parsed.devices, hardware, parsed.sweep)
    if parsed.json:
        print(json.dumps(report.sweep_values(figure, rows)))
    else:
        print(report.sweep_text(figure, rows))
    return DONE


def _estimate_inference(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import report
    from spmdtrain.planner.inference import estimate_inference

    prompt, new = parsed.generate
    cost = estimate_inference(
        config, parsed.devices, hardware, batch=parsed.batch or 1, prompt=prompt, new=new
    )
    if parsed.json:
        print(json.dumps(report.inference_values(cost)))
    else:
        print(report.inference_text(cost, hardware))
    return DONE
