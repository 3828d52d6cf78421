"""`spmdtrain data reference`: writes a reference model's log-probabilities of pairs of answers."""

import argparse

from spmdtrain.cli.devices import start_jax
from spmdtrain.cli.shared_arguments import (
    add_devices,
    add_ema,
    add_make,
    add_set,
    add_step,
    of_run,
)
from spmdtrain.config import DONE
from spmdtrain.config.settable import OF_REFERENCE


def add_reference(commands) -> None:
    """Adds the command `data reference` and its arguments."""
    reference = commands.add_parser(
        "reference", help="write a reference model's log-probabilities of pairs of answers, for DPO"
    )
    reference.add_argument("path", metavar="FILE", help="a token file of pairs")
    reference.add_argument("run", metavar="RUN", help="run directory of the reference model")
    add_make(reference)
    add_ema(reference)
    add_step(reference)
    add_set(
        reference,
        "e.g. train.sequence_length=4096 or mesh.tensor=2 (default: one device)",
        OF_REFERENCE,
    )
    add_devices(reference)
    reference.set_defaults(command=run_reference)


def run_reference(parsed: argparse.Namespace) -> int:
    """Writes the log-probabilities that a run gives to pairs of answers."""
    start_jax(parsed)
    from spmdtrain.inference.reference import write_reference

    numbers = write_reference(
        parsed.path,
        parsed.run,
        **of_run(parsed),
    )
    chosen, rejected = numbers.mean(0)
    share = 100 * (numbers[:, 0] > numbers[:, 1]).mean()
    print(
        f"{parsed.path}: {len(numbers):,} pairs; log-probabilities {chosen:.1f} (chosen) and "
        f"{rejected:.1f} (rejected) on average; the chosen answer is likelier in {share:.0f} %"
    )
    return DONE
