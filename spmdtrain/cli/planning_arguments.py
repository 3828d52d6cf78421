"""The arguments of the planner's commands: `schedule`, `estimate`, `plan`, `calibrate`."""

from spmdtrain.cli import planning
from spmdtrain.cli.shared_arguments import (
    add_config,
    add_devices,
    add_hardware,
    duration,
    positive_int,
    prompt_and_new,
)


def add_schedule(commands) -> None:
    """Adds the command `schedule` and its arguments."""
    schedule = commands.add_parser(
        "schedule",
        help="print a pipeline schedule: its timeline, bubble and stash; no devices",
    )
    schedule.add_argument(
        "--kind",
        default="1f1b",
        metavar="KIND",
        help="gpipe | 1f1b | interleaved | zero_bubble | "
        "a .json or .csv file with its own sizes (default: %(default)s)",
    )
    schedule.add_argument("--stages", type=positive_int, metavar="P", help="stages of the pipeline")
    schedule.add_argument("--microbatches", type=positive_int, metavar="M", help="per step")
    schedule.add_argument(
        "--chunks", type=positive_int, metavar="V", help="runs of layers per stage (default: 1)"
    )
    schedule.add_argument(
        "--forward",
        type=duration,
        metavar="TIME",
        help="time of a microbatch through all chunks of a stage, in any one unit (default: 1)",
    )
    schedule.add_argument(
        "--backward",
        type=duration,
        metavar="TIME",
        help="the same for the backward without the weight gradient",
    )
    schedule.add_argument(
        "--weight",
        type=duration,
        metavar="TIME",
        help="the same for the weight gradient; part of a backward that is not split",
    )
    schedule.add_argument(
        "--hop", type=duration, metavar="TIME", help="time from a stage to the next (default: 0)"
    )
    schedule.add_argument("--svg", metavar="FILE", help="write a picture, drawn to scale")
    schedule.add_argument(
        "--json", action="store_true", help="print JSON; --kind FILE.json reads it back"
    )
    schedule.set_defaults(command=planning.schedule)


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
        type=prompt_and_new,
        metavar="PROMPT+NEW",
        help="predict generation instead, e.g. 512+128 tokens",
    )
    estimate.add_argument(
        "--batch",
        type=positive_int,
        metavar="N",
        help="sequences to generate at once (default: 1)",
    )
    estimate.set_defaults(command=planning.estimate)


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
    plan.set_defaults(command=planning.plan)


def add_calibrate(commands) -> None:
    """Adds the command `calibrate` and its arguments."""
    calibrate = commands.add_parser(
        "calibrate", help="measure this machine and write a file for --hardware"
    )
    calibrate.add_argument(
        "--out",
        default="hardware.toml",
        metavar="FILE",
        help="the .toml file to write (default: %(default)s)",
    )
    add_devices(calibrate)
    calibrate.set_defaults(command=planning.calibrate)
