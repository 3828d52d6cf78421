"""`spmdtrain show`: prints the resolved config, the mesh and every parameter."""

import argparse
import json
import sys

from spmdtrain.cli.devices import start_jax
from spmdtrain.cli.outputs import write_picture
from spmdtrain.cli.shared_arguments import add_config, add_devices
from spmdtrain.config import DONE, load


def add_show(commands) -> None:
    """Adds the command `show` and its arguments."""
    show = commands.add_parser(
        "show", help="print the resolved config, the mesh and every parameter; nothing is allocated"
    )
    add_config(show)
    show.add_argument(
        "--svg", metavar="FILE", help="write a picture: the mesh, and which devices hold what"
    )
    show.add_argument("--json", action="store_true", help="print JSON")
    add_devices(show)
    show.set_defaults(command=run_show)


def run_show(parsed: argparse.Namespace) -> int:
    """Prints the config, the mesh and every parameter; --svg draws what each device holds."""
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
