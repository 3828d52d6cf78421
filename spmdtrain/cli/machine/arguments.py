"""The arguments of `tune`."""

from spmdtrain.cli.machine import tuning
from spmdtrain.cli.shared_arguments import add_config, positive_int


def add_tune(commands) -> None:
    """Adds `tune`."""
    tune = commands.add_parser(
        "tune", help="measure the kernels of a config on this GPU; train does so by itself"
    )
    add_config(tune)
    tune.add_argument(
        "--devices",
        type=positive_int,
        metavar="N",
        help="devices of the run (default: the GPUs of this machine)",
    )
    tune.add_argument("--again", action="store_true", help="measure also what is known")
    tune.add_argument(
        "--interpreted",
        action="store_true",
        help="interpret kernels on the CPU, for tests of tiny configs; nothing is remembered",
    )
    tune.add_argument(
        "--export", metavar="FILE", help="write what is known of this GPU, for other machines"
    )
    tune.add_argument("--json", action="store_true", help="print JSON")
    tune.set_defaults(command=tuning.tune)
