"""The command line: arguments in, exit code out. jax is imported once a command has its settings, not for `--help`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from spmdtrain.config import PREEMPTED, ConfigError, UserError, load, to_toml

DONE = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. A person's mistake is one line on stderr and its exit code; only our bugs show a traceback."""
    try:
        parsed = _parser().parse_args(arguments)
        return parsed.command(parsed)
    except UserError as error:
        print(f"spmdtrain: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before the loop took over the signal: nothing to save yet
        return 130


def _train(parsed: argparse.Namespace) -> int:
    config = load(parsed.config, parsed.set)
    if parsed.print_config:
        print(to_toml(config), end="")
        return DONE
    directory = parsed.run or f"runs/{Path(parsed.config).stem}"
    _start_jax(parsed)
    from spmdtrain.train.loop import run

    outcome = run(config, directory, fresh=parsed.fresh)
    return PREEMPTED if outcome.status == "preempted" else DONE


def _show(parsed: argparse.Namespace) -> int:
    config = load(parsed.config, parsed.set)
    _start_jax(parsed)
    from spmdtrain.train import show

    print(json.dumps(show.describe(config)[0], indent=1) if parsed.json else show.show(config))
    return DONE


def _sample(parsed: argparse.Namespace) -> int:
    _start_jax(parsed)
    from spmdtrain.train.generate import Choice, sample

    choice = Choice(parsed.temperature, parsed.top_k, parsed.top_p)
    print(sample(Path(parsed.run), parsed.prompt, parsed.length, choice, parsed.seed, parsed.set))
    return DONE


def _prepare(parsed: argparse.Namespace) -> int:
    from spmdtrain.data.prepare import prepare

    prepare(parsed.paths, parsed.out, parsed.tokenizer)
    return DONE


def _start_jax(parsed: argparse.Namespace) -> None:
    """Devices and processes are settled before jax looks for them; compiled programs are kept between runs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's remarks on its own choices
    from spmdtrain.parallel import processes

    if parsed.simulate_devices is not None:
        processes.simulate_devices(parsed.simulate_devices)
    processes.start(parsed.coordinator, parsed.processes, parsed.process)
    import jax

    if not jax.config.jax_compilation_cache_dir:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmdtrain" / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(cache))


class _Parser(argparse.ArgumentParser):
    """argparse, with its refusals as our errors: a usage error ends like a config error."""

    def error(self, message: str):
        raise ConfigError(f"{message}", fix=f"{self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="spmdtrain", description="Train transformers on any mesh of devices from one SPMD program.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train; goes on where an earlier run in the same directory stopped")
    _add_config(train)
    train.add_argument("--run", metavar="DIR", help="run directory (default: runs/NAME_OF_CONFIG)")
    train.add_argument("--fresh", action="store_true", help="start anew; an older run in the directory is set aside")
    train.add_argument("--print-config", action="store_true", help="print the resolved config with origins, and end")
    _add_devices(train)
    train.set_defaults(command=_train)

    show = commands.add_parser("show", help="the resolved config, the mesh and every parameter; nothing is allocated")
    _add_config(show)
    show.add_argument("--json", action="store_true", help="for programs")
    _add_devices(show)
    show.set_defaults(command=_show)

    sample = commands.add_parser("sample", help="text from a trained run")
    sample.add_argument("run", metavar="RUN", help="run directory")
    sample.add_argument("--prompt", default="\n", help="text to go on from (default: a line break)")
    sample.add_argument("--length", type=_positive, help="tokens to add (default: what the model has positions for)")
    sample.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default: %(default)s)")
    sample.add_argument("--top-k", type=int, help="among the k likeliest tokens only")
    sample.add_argument("--top-p", type=float, help="among the likeliest tokens that reach probability p together")
    sample.add_argument("--seed", type=int, default=0, help="another seed, another text")
    _add_set(sample, "mesh.tensor=2, say; the default is one device")
    _add_devices(sample)
    sample.set_defaults(command=_sample)

    data = commands.add_parser("data", help="token files").add_subparsers(
        title="commands", required=True, metavar="COMMAND"
    )
    prepare = data.add_parser("prepare", help="text files to one token file")
    prepare.add_argument("paths", nargs="+", metavar="PATH", help="text files or globs, a document each")
    prepare.add_argument("--out", required=True, metavar="NAME", help="writes NAME.bin and its sidecars")
    prepare.add_argument("--tokenizer", default="bytes", help="bytes | characters | a tokenizer.json (default: bytes)")
    prepare.set_defaults(command=_prepare)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, as in configs/")
    _add_set(parser, "overrides one setting; may be repeated")


def _add_set(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--simulate-devices", type=_positive, metavar="N", help="pretend to have N devices, on CPU")
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0, where several processes run one program"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are")
    parser.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
