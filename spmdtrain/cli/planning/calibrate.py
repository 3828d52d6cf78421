"""`spmdtrain calibrate`: measures the rates of these devices for the planner."""

import argparse
from pathlib import Path

from spmdtrain.cli.devices import start_jax
from spmdtrain.cli.outputs import refuse_unwritable
from spmdtrain.cli.shared_arguments import add_devices
from spmdtrain.config import DONE, ConfigError


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
    calibrate.set_defaults(command=run_calibrate)


def run_calibrate(parsed: argparse.Namespace) -> int:
    """Measures this machine and writes a file that --hardware reads."""
    if not parsed.out.endswith(".toml"):
        raise ConfigError(
            f"--out {parsed.out}: --hardware reads .toml files", fix=f"--out {parsed.out}.toml"
        )
    refuse_unwritable(Path(parsed.out))  # before minutes of measuring
    start_jax(parsed)
    from spmdtrain.planner import calibrate

    rates = calibrate.calibrate()
    calibrate.write(rates, Path(parsed.out))
    print(
        f"{parsed.out}: {rates['bfloat16'] / 1e12:.4g} TFLOP/s bfloat16, "
        f"{rates['float32'] / 1e12:.4g} float32, "
        f"{rates['memory_bandwidth'] / 1e9:.4g} GB/s memory, "
        f"{rates['link_bandwidth'] / 1e9:.4g} GB/s links"
    )
    return DONE
