"""`spmdtrain data teach`: saves a teacher's predictions at the training tokens of a run."""

import argparse

from spmdtrain.cli.devices import start_jax
from spmdtrain.cli.shared_arguments import add_config, add_devices, positive_int
from spmdtrain.config import DONE, load


def add_teach(commands) -> None:
    """Adds the command `data teach` and its arguments."""
    teach = commands.add_parser(
        "teach", help="save what a teacher says of the training tokens, for distill.logits"
    )
    add_config(teach)
    teach.add_argument(
        "teacher",
        metavar="TEACHER",
        help="a run, whose newest weights are used, or a folder of Hugging Face",
    )
    teach.add_argument("--out", required=True, metavar="DIR", help="the folder to write")
    teach.add_argument(
        "--top",
        type=positive_int,
        default=32,
        metavar="N",
        help="number of likeliest tokens to save after each token (default: 32)",
    )
    add_devices(teach)
    teach.set_defaults(command=run_teach)


def run_teach(parsed: argparse.Namespace) -> int:
    """Writes the folder, and prints a line about its contents."""
    of_teacher = ["distill.logits=none", f"distill.teacher={parsed.teacher}"]
    config = load(parsed.config, [*parsed.set, *of_teacher])
    start_jax(parsed)
    from spmdtrain.running.distillation.write_logits import write_logits

    saved = write_logits(config, parsed.out, top=parsed.top)
    print(f"{parsed.out}: {saved.tokens:,} tokens, {saved.described}")
    return DONE
