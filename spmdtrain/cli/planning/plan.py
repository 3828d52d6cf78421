"""`spmdtrain plan`: the best layout for given devices."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from spmdtrain.cli.devices import without_devices
from spmdtrain.cli.outputs import refuse_unwritable, write_picture
from spmdtrain.cli.shared_arguments import (
    add_config,
    add_hardware,
    positive_int,
    refuse_together,
)
from spmdtrain.config import DONE, ConfigError, load
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
        "--devices",
        type=positive_ints,
        required=True,
        metavar="N",
        help="number of devices; several, as 8,16,64, are compared, and so are several --hardware",
    )
    plan.add_argument(
        "--tokens",
        type=amount,
        metavar="N",
        help="compare to N tokens, such as 1e12 (default: those of train.steps)",
    )
    plan.add_argument(
        "--price",
        type=prices,
        metavar="NAME=X,...",
        help="money for an hour of one GPU, as h100=2.5,h200=3.2: rank by the cost of the training",
    )
    plan.add_argument("--svg", metavar="FILE", help="draw ranking and memory of what is printed")
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


def positive_ints(text: str) -> list[int]:
    """Reads whole numbers of at least 1, separated by commas."""
    return [positive_int(part) for part in text.split(",")]


def amount(text: str) -> float:
    """Reads a number above 0 and up to 1e18, such as 1e12."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1e18:  # also refuses nan
        raise argparse.ArgumentTypeError(f"{text:.40} is not a number above 0 and up to 1e18")
    return number


def prices(text: str) -> dict[str, float]:
    """Reads prices by the name of their hardware, as "h100=2.5,h200=3.2"."""
    price_of = {}
    for part in text.split(","):
        name, equals, price = part.partition("=")
        if not name or not equals:
            raise argparse.ArgumentTypeError(f"{part:.40} is not NAME=PRICE, as h100=2.5")
        price_of[name] = amount(price)
    return price_of


def run_plan(parsed: argparse.Namespace) -> int:
    """Prints the best layouts on some devices; with --rules, the best rules of one mesh.

    For several kinds or numbers of devices, or with tokens or prices, it prints the best of each.
    """
    refuse_together(parsed, "rules", "top", "compile", "tokens", "price", "svg")
    refuse_together(parsed, "top", "compile")
    refuse_together(parsed, "compile", "tokens", "price", "svg")
    from spmdtrain.planner.cost.hardware import hardware as named_hardware

    kinds = [named_hardware(name) for name in parsed.hardware.split(",")]
    config = load(parsed.config, parsed.set)
    without_devices()
    if parsed.svg:
        refuse_unwritable(Path(parsed.svg))
    several = len(kinds) > 1 or len(parsed.devices) > 1
    if several or parsed.tokens or parsed.price:
        _refuse_for_one(parsed, several)
        return _compare(parsed, config, kinds)
    (hardware,), (parsed.devices,) = kinds, parsed.devices
    if parsed.rules:
        return _plan_rules(parsed, config, hardware)
    return _plan_layout(parsed, config, hardware)


def _refuse_for_one(parsed: argparse.Namespace, several: bool) -> None:
    """Refuses options that apply to the layouts of a single kind and number of devices."""
    for name in ("rules", "compile", "top"):
        if getattr(parsed, name):
            what = "several devices" if several else "--tokens and --price"
            raise ConfigError(f"--{name} looks at one plan, and {what} compare", fix="one of both")


def _compare(parsed: argparse.Namespace, config: RunConfig, kinds: "Sequence[Hardware]") -> int:
    from spmdtrain.planner.offers import picture
    from spmdtrain.planner.offers.offer_tables import offers_text, offers_values
    from spmdtrain.planner.offers.offers import offers

    unknown = set(parsed.price or {}) - {kind.name for kind in kinds}
    if unknown:
        raise ConfigError(
            f"--price names {min(unknown)}, which --hardware does not",
            found=", ".join(kind.name for kind in kinds),
        )
    offered = offers(config, kinds, parsed.devices, parsed.tokens, parsed.price)
    if parsed.svg:
        rows = picture.rows_of_offers(offered)
        write_picture(parsed.svg, picture.picture(f"{offered[0].tokens:.4g} tokens", rows))
    print(json.dumps(offers_values(offered)) if parsed.json else offers_text(offered))
    return DONE


def _plan_layout(parsed: argparse.Namespace, config: RunConfig, hardware: "Hardware") -> int:
    from spmdtrain.planner import report
    from spmdtrain.planner.own_model import describe
    from spmdtrain.planner.plan import best_of_each_mesh
    from spmdtrain.planner.plan import plan as plan_config

    plans = plan_config(config, parsed.devices, hardware)
    if parsed.compile:
        return _plan_compiled(parsed, best_of_each_mesh(plans, parsed.compile))
    shown = best_of_each_mesh(plans, parsed.top or 10)
    if parsed.svg:
        from spmdtrain.planner.offers.picture import picture, rows_of_plans

        title = f"step on {parsed.devices} x {hardware.name}"
        write_picture(parsed.svg, picture(title, rows_of_plans(shown)))
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
