"""The arguments of every command, and what they may be."""

import argparse

from pallas_kernels.gpus import GPUS
from spmdtrain.cli import data, doctor, launching, planning, running
from spmdtrain.config import ConfigError
from spmdtrain.config.schema import SEEDS
from spmdtrain.launch.patience import STEP_SECONDS


class _Parser(argparse.ArgumentParser):
    """argparse, refusing with our error: a usage error ends like a config error."""

    def error(self, message: str):
        raise ConfigError(message, fix=f"{self.prog} --help")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser. `parsed.command(parsed)` then runs the command and returns its code."""
    parser = _Parser(
        prog="spmdtrain",
        description="Train transformers on any mesh of devices from one SPMD program.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_launch(commands)
    _add_show(commands)
    _add_sample(commands)
    _add_eval(commands)
    _add_data(commands)
    _add_tokenizer(commands)
    _add_schedule(commands)
    _add_estimate(commands)
    _add_plan(commands)
    _add_calibrate(commands)
    _add_doctor(commands)
    return parser


# The commands, in the order of `--help`.


def _add_train(commands) -> None:
    train = commands.add_parser(
        "train", help="train; goes on where an earlier run in the same directory stopped"
    )
    _add_config(train)
    train.add_argument("--run", metavar="DIR", help="run directory (default: runs/NAME_OF_CONFIG)")
    train.add_argument(
        "--fresh",
        action="store_true",
        help="start anew; an older run in the directory is set aside",
    )
    train.add_argument(
        "--print-config",
        action="store_true",
        help="print the resolved config with origins, and end",
    )
    train.add_argument(
        "--hardware",
        metavar="NAME",
        help="predicts the run for it (default: the GPU at hand, where it is described)",
    )
    _add_devices(train)
    train.set_defaults(command=running.train)


def _add_launch(commands) -> None:
    launch = commands.add_parser(
        "launch", help="train in processes that are watched, and started again when they fail"
    )
    launch.add_argument(
        "--local-processes",
        type=_positive,
        default=1,
        metavar="N",
        help="processes on this host (default: %(default)s)",
    )
    launch.add_argument(
        "--step-seconds",
        type=_seconds,
        default=STEP_SECONDS,
        metavar="S",
        help="a step may take so long, or 5 times the longest so far, before it counts as a hang "
        "(default: %(default)s)",
    )
    launch.add_argument("--report", metavar="FILE", help="writes what the time was spent on, JSON")
    launch.add_argument(
        "command_line",
        nargs=argparse.REMAINDER,
        metavar="train ...",
        help="the run, as without launch",
    )
    launch.set_defaults(command=launching.launch)


def _add_show(commands) -> None:
    show = commands.add_parser(
        "show", help="the resolved config, the mesh and every parameter; nothing is allocated"
    )
    _add_config(show)
    show.add_argument(
        "--svg", metavar="FILE", help="writes a picture: the mesh and which devices hold what"
    )
    show.add_argument("--json", action="store_true", help="for programs")
    _add_devices(show)
    show.set_defaults(command=running.show)


def _add_sample(commands) -> None:
    sample = commands.add_parser("sample", help="text from a trained run")
    sample.add_argument("run", metavar="RUN", help="run directory")
    _add_make(sample)
    sample.add_argument("--prompt", help="text to go on from (default: a line break)")
    sample.add_argument(
        "--prompts", metavar="FILE", help="a prompt on each line, all made as one batch"
    )
    sample.add_argument(
        "--length",
        type=_positive,
        help="tokens to add (default: what the model has positions for, at most 200)",
    )
    sample.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends before this text; end-of-text: before the token that ends a document; "
        "may be repeated",
    )
    sample.add_argument(
        "--json", action="store_true", help='for programs: {"prompt", "text"} on each line'
    )
    sample.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0: the likeliest token (default: %(default)s)",
    )
    sample.add_argument("--top-k", type=int, help="among the k likeliest tokens only")
    sample.add_argument(
        "--top-p",
        type=float,
        help="among the likeliest tokens that reach probability p together",
    )
    sample.add_argument("--seed", type=_seed, default=0, help="another seed, another text")
    _add_set(
        sample,
        "mesh.tensor=2, say (the default is one device); mesh.*, rules.* and model.attention alone",
    )
    _add_devices(sample)
    sample.set_defaults(command=running.sample)


def _add_eval(commands) -> None:
    evaluate = commands.add_parser(
        "eval", help="loss, perplexity and bits per byte of a trained run, on any text"
    )
    evaluate.add_argument("run", metavar="RUN", help="run directory")
    evaluate.add_argument(
        "paths",
        nargs="*",
        metavar="FILE",
        help="texts or token files (default: the validation data of the run)",
    )
    evaluate.add_argument(
        "--step", type=_positive, metavar="N", help="of the checkpoint (default: the newest)"
    )
    evaluate.add_argument(
        "--field", default="text", metavar="NAME", help="of the text in JSON lines and tables"
    )
    evaluate.add_argument(
        "--tasks",
        metavar="A,B",
        help="tasks of lm-evaluation-harness in the place of a loss; needs the package lm-eval",
    )
    evaluate.add_argument(
        "--limit", type=_positive, metavar="N", help="examples of each task (default: all)"
    )
    _add_make(evaluate)
    _add_set(evaluate, "mesh.data=8, say (the default is one device); eval.batches and the like")
    evaluate.add_argument("--json", action="store_true", help="for programs")
    _add_devices(evaluate)
    evaluate.set_defaults(command=running.evaluate)


def _add_data(commands) -> None:
    group = commands.add_parser("data", help="token files")
    commands = group.add_subparsers(title="commands", required=True, metavar="COMMAND")
    prepare = commands.add_parser("prepare", help="documents to token files")
    _add_documents(prepare)
    prepare.add_argument(
        "--out", required=True, metavar="NAME", help="writes NAME.bin and its sidecars"
    )
    prepare.add_argument(
        "--tokenizer",
        default="bytes",
        help="bytes | characters | a tokenizer.json (default: bytes)",
    )
    prepare.add_argument(
        "--end-of-text",
        default="auto",
        metavar="TOKEN",
        help="stands behind each document: a token, auto (the tokenizer's own) or none "
        "(default: auto)",
    )
    prepare.add_argument(
        "--chat",
        action="store_true",
        help="documents are lists of messages with role and content; the loss is on the answers",
    )
    prepare.add_argument(
        "--template",
        type=_escaped,
        help="what a message is written as, with {role} and {content} (default: ChatML)",
    )
    prepare.add_argument(
        "--workers",
        type=_positive,
        default=1,
        metavar="N",
        help="processes that make tokens (default: 1)",
    )
    prepare.add_argument(
        "--shard-tokens",
        type=_positive,
        metavar="N",
        help="writes NAME-00000.bin and so on, of N tokens each, "
        "and goes on behind the last one when it was killed",
    )
    prepare.set_defaults(command=data.prepare)


def _add_tokenizer(commands) -> None:
    group = commands.add_parser("tokenizer", help="a tokenizer of one's own")
    commands = group.add_subparsers(title="commands", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="documents to the tokenizer.json of a byte-level BPE")
    _add_documents(train)
    train.add_argument("--out", required=True, metavar="FILE", help="a tokenizer.json")
    train.add_argument(
        "--vocab", type=_positive, required=True, metavar="N", help="tokens, 32000 say"
    )
    train.add_argument(
        "--special",
        action="append",
        default=[],
        metavar="TOKEN",
        help="one more token that is never cut, beside <|endoftext|>; may be repeated",
    )
    train.set_defaults(command=data.train_tokenizer)


def _add_schedule(commands) -> None:
    schedule = commands.add_parser(
        "schedule", help="a pipeline schedule: its timeline, bubble and stash; no devices"
    )
    schedule.add_argument(
        "--kind",
        default="1f1b",
        metavar="KIND",
        help="gpipe | 1f1b | interleaved | zero_bubble | "
        "a .json or .csv file with its own sizes (default: %(default)s)",
    )
    schedule.add_argument("--stages", type=_positive, metavar="P", help="of the pipeline")
    schedule.add_argument("--microbatches", type=_positive, metavar="M", help="per step")
    schedule.add_argument(
        "--chunks", type=_positive, metavar="V", help="runs of layers per stage (default: 1)"
    )
    schedule.add_argument(
        "--forward",
        type=_time,
        metavar="TIME",
        help="of a microbatch through all chunks of a stage, in any one unit (default: 1)",
    )
    schedule.add_argument(
        "--backward",
        type=_time,
        metavar="TIME",
        help="the same, of the backward without weight gradient",
    )
    schedule.add_argument(
        "--weight",
        type=_time,
        metavar="TIME",
        help="the same; adds to backwards that are not split",
    )
    schedule.add_argument(
        "--hop", type=_time, metavar="TIME", help="from a stage to the next (default: 0)"
    )
    schedule.add_argument(
        "--svg", metavar="FILE", help="writes a picture, as wide as the times say"
    )
    schedule.add_argument(
        "--json", action="store_true", help="for programs; --kind FILE.json reads it back"
    )
    schedule.set_defaults(command=planning.schedule)


def _add_estimate(commands) -> None:
    estimate = commands.add_parser(
        "estimate", help="time and memory of a step on hardware that need not be here"
    )
    _add_config(estimate)
    _add_hardware(estimate)
    estimate.add_argument(
        "--devices",
        type=_positive,
        metavar="N",
        help="how many (default: the product of the mesh)",
    )
    estimate.add_argument(
        "--anchor",
        metavar="RUN",
        help="scales the times by what a run on this hardware measured",
    )
    estimate.add_argument(
        "--sweep",
        metavar="hardware.KEY=A,B",
        help="the estimate at several values of one figure",
    )
    estimate.add_argument(
        "--compile",
        action="store_true",
        help="compiles the real step for these GPUs and prints XLA's own figures",
    )
    estimate.add_argument(
        "--generate",
        type=_prompt_and_new,
        metavar="PROMPT+NEW",
        help="prices generation instead: 512+128 tokens",
    )
    estimate.add_argument(
        "--batch",
        type=_positive,
        metavar="N",
        help="sequences to generate at once (default: 1)",
    )
    estimate.set_defaults(command=planning.estimate)


def _add_plan(commands) -> None:
    plan = commands.add_parser(
        "plan", help="which layout: searches them all and says why the others lost"
    )
    _add_config(plan)
    _add_hardware(plan)
    plan.add_argument("--devices", type=_positive, required=True, metavar="N", help="how many")
    plan.add_argument("--top", type=_positive, metavar="N", help="meshes to print (default: 10)")
    plan.add_argument(
        "--rules",
        action="store_true",
        help="keeps the config's mesh; its tensor axis used best, as a [rules] table",
    )
    plan.add_argument(
        "--compile",
        type=_positive,
        metavar="K",
        help="compiles the best K for these GPUs and ranks them again, a minute or two for each",
    )
    plan.set_defaults(command=planning.plan)


def _add_calibrate(commands) -> None:
    calibrate = commands.add_parser(
        "calibrate", help="measures this machine and writes a file for --hardware"
    )
    calibrate.add_argument(
        "--out",
        default="hardware.toml",
        metavar="FILE",
        help="a .toml file (default: %(default)s)",
    )
    _add_devices(calibrate)
    calibrate.set_defaults(command=planning.calibrate)


def _add_doctor(commands) -> None:
    examine = commands.add_parser(
        "doctor", help="devices, versions, libraries and flags; what is wrong and how to mend it"
    )
    examine.add_argument("--json", action="store_true", help="for programs")
    _add_devices(examine)
    examine.set_defaults(command=doctor.doctor)


# Arguments that several commands have.


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, as in configs/")
    _add_set(parser, "overrides one setting; may be repeated")


def _add_documents(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="files or globs: text (a document each), .jsonl, .parquet, .arrow, "
        "text and .jsonl also as .gz and .zst; or the folder of a saved dataset",
    )
    parser.add_argument(
        "--field",
        metavar="NAME",
        help="that holds the document, of .jsonl and tables (default: text; of chats: messages)",
    )
    parser.add_argument(
        "--split-on",
        type=_escaped,
        metavar="TEXT",
        help=r"what separates the documents of a text file: '<|endoftext|>' or '\n\n\n', say",
    )


def _add_set(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


def _add_make(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--make",
        metavar="FILE.py:CLASS",
        help="the model of a run that was trained with model.make; its code runs",
    )


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    names = f"{', '.join(GPUS)} or a .toml file"
    parser.add_argument("--hardware", required=True, metavar="NAME", help=names)
    parser.add_argument("--json", action="store_true", help="for programs")


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--simulate-devices",
        type=_positive,
        metavar="N",
        help="pretend to have N devices, on CPU",
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="of process 0, where several processes run one program",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are")
    parser.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")


# What a value may be. argparse turns these errors into a refusal that names the argument.


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= SEEDS:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 to {SEEDS - 1}")
    return int(text)


def _seconds(text: str) -> float:
    seconds = _time(text)
    if not seconds:
        raise argparse.ArgumentTypeError("0 seconds are no limit")
    return seconds


def _time(text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = -1.0
    if not 0 <= time <= 1e12:  # nan neither; the bound keeps sums finite
        raise argparse.ArgumentTypeError(f"{text} is not a time: a number from 0 to 1e12")
    return time


def _escaped(text: str) -> str:
    r"""Return the text with \n and \t in it read as a line break and a tab."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _prompt_and_new(text: str) -> tuple[int, int]:
    prompt, plus, new = text.partition("+")
    if not plus:
        raise argparse.ArgumentTypeError(f"{text} is not PROMPT+NEW, 512+128 say")
    return _positive(prompt), _positive(new)
