"""`spmdtrain plan`: the best layout for given devices."""

import argparse
import json
from typing import TYPE_CHECKING

from spmdtrain.cli.devices import without_devices
from spmdtrain.cli.shared_arguments import (
    add_config,
    add_hardware,
    positive_int,
    refuse_together,
)
from spmdtrain.config import DONE, load
from spmdtrain.config.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spmdtrain.planner.cost.hardware import Hardware
    from spmdtrain.planner.plan import Plan


def add_plan(commands) -> None:
    """Adds the command `plan` and its arguments."""
    plan = commands.add_parser(
        "plan", help="find the best layout: search them all and say why the others lost"
    )
    add_config(plan)
    add_hardware(plan)
    plan.add_argument(
        "--devices", type=positive_int, required=True, metavar="N", help="number of devices"
    )
    plan.add_argument("--top", type=positive_int, metavar="N", help="meshes to print (default: 10)")
    plan.add_argument(
        "--rules",
        action="store_true",
        help="keep the config's mesh; print the best use of its tensor axis, as a [rules] table",
    )
    plan.add_argument(
        "--compile",
        type=positive_int,
        metavar="K",
        help="compile the best K for these GPUs and rank them again, a minute or two each",
    )
    plan.set_defaults(command=run_plan)


def run_plan(parsed: argparse.Namespace) -> int:
    """Prints the best layouts on some devices; with --rules, the best rules of one mesh."""
    refuse_together(parsed, "rules", "top", "compile")
    refuse_together(parsed, "top", "compile")
    from spmdtrain.planner.cost.hardware import hardware as named_hardware

    hardware = named_hardware(parsed.hardware)
    config = load(parsed.config, parsed.set)
    without_devices()
    if parsed.rules:
        return _plan_rules(parsed, config, hardware)
    return _plan_layout(parsed, config, hardware)


def _plan_layout(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import report
    from spmdtrain.planner.own_model import describe
    from spmdtrain.planner.plan import best_of_each_mesh
    from spmdtrain.planner.plan import plan as plan_config

    plans = plan_config(config, parsed.devices, hardware)
    if parsed.compile:
        return _plan_compiled(parsed, best_of_each_mesh(plans, parsed.compile))
    shown = best_of_each_mesh(plans, parsed.top or 10)
    if parsed.json:
        print(json.dumps(report.plan_values(shown)))
    else:
        if config.model.make:
            print(describe(config), end="\n\n")
        print(report.plan_text(shown, plans))
    return DONE


def _plan_compiled(parsed: argparse.Namespace, plans: "Sequence[Plan]") -> int:
    from spmdtrain.planner import deviceless, report
    from spmdtrain.planner.compiled_plans import compile_plans
    from spmdtrain.planner.cost.hardware import hardware as named_hardware

    # A missing compiler is one line now, not a reason next to every layout.
    deviceless.described_devices(named_hardware(parsed.hardware), parsed.devices)
    arguments = [parsed.config, "--hardware", parsed.hardware, "--devices", str(parsed.devices)]
    for setting in parsed.set:
        arguments += ["--set", setting]
    compiled = compile_plans(plans, arguments)
    if parsed.json:
        print(json.dumps(report.compiled_plans_values(compiled)))
    else:
        print(report.compiled_plans_text(compiled))
    return DONE


def _plan_rules(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import report
    from spmdtrain.planner.plan_rules import plan_rules

    by_rules, freely = plan_rules(config, parsed.devices, hardware)
    if parsed.json:
        print(json.dumps(report.rules_values(by_rules)))
    else:
        print(report.rules_text(by_rules, freely))
    return DONE
