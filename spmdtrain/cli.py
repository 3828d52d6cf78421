"""The command line: arguments in, exit code out. jax is imported once a command has its settings, not for `--help`."""

import argparse
import errno
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from spmdtrain.config import PREEMPTED, ConfigError, StorageError, UserError, load, to_toml
from spmdtrain.config.schema import SEEDS

DONE = 0
CLOSED_PIPE = 141  # as of a program that SIGPIPE ends
LARGEST_SCHEDULE = 1_000_000  # ticks x stages: seconds of work here, and more than anybody looks at


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. A person's mistake is one line on stderr and its exit code; only our bugs show a traceback."""
    try:
        parsed = _parser().parse_args(arguments)
        code = parsed.command(parsed)
        print(end="", flush=True)
        return code
    except UserError as error:
        print(f"spmdtrain: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would try again at its end
        if error.errno == errno.EPIPE:  # `| head`: nobody reads on, and nobody made a mistake
            return CLOSED_PIPE
        print(f"spmdtrain: cannot write: {error.strerror}", file=sys.stderr)
        return StorageError.exit_code
    except KeyboardInterrupt:  # before the loop took over the signal: nothing to save yet
        return 130


def _train(parsed: argparse.Namespace) -> int:
    config = load(parsed.config, parsed.set)
    if parsed.print_config:
        print(to_toml(config), end="")
        return DONE
    directory = parsed.run or f"runs/{Path(parsed.config).stem}"
    if parsed.hardware is not None:
        from spmdtrain.planner.hardware import hardware

        hardware(parsed.hardware)  # a typo is refused before devices are looked for
    _start_jax(parsed)
    from spmdtrain.train.loop import run

    outcome = run(config, directory, fresh=parsed.fresh, prediction=_prediction(config, parsed.hardware))
    return PREEMPTED if outcome.status == "preempted" else DONE


def _prediction(config, name: str | None):
    """Plain numbers for `run`: for the hardware `name`, else for the device at hand where it is described, else None.
    Every process makes them, so that all are refused or none."""
    import jax

    from spmdtrain.planner import report
    from spmdtrain.planner.hardware import KINDS, hardware
    from spmdtrain.train.summary import Prediction

    known = name or KINDS.get(jax.devices()[0].device_kind)
    if known is None:
        return None
    try:
        config, device = report.with_vocab(config), hardware(known)
        price, held = report.priced(config, report.mesh_sizes(config, jax.device_count(), device), device)
    except UserError:
        if name:
            raise
        return None  # nobody asked; what is wrong with the run, the run says
    return Prediction(device.name, price.step, held.total)


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


def _schedule(parsed: argparse.Namespace) -> int:
    from spmdtrain.parallel import schedule, schedule_file, simulate, timeline

    sizes = {name: size for name in ("stages", "microbatches", "chunks") if (size := getattr(parsed, name)) is not None}
    if parsed.kind in schedule.KINDS:
        _refuse_sizes(parsed.kind, **sizes)
        table = schedule.build(parsed.kind, **sizes)
    elif Path(parsed.kind).suffix in (".json", ".csv"):
        table = schedule_file.read(parsed.kind)
        for name, size in sizes.items():
            if getattr(table, name) != size:
                found = f"{name} {getattr(table, name)}"
                raise ConfigError(f"{parsed.kind} has its own sizes", asked=f"--{name} {size}", found=found)
    else:
        choices = f"{', '.join(schedule.KINDS)}, or a .json or .csv file"
        raise ConfigError("unknown pipeline schedule", asked=f"--kind {parsed.kind}", fix=choices)

    names = ("forward", "backward", "weight", "hop")
    times = simulate.Times(**{name: time for name in names if (time := getattr(parsed, name)) is not None})
    if not times.microbatch:
        raise ConfigError("one of --forward, --backward and --weight takes some time", found="0 for all")
    if parsed.svg is not None:
        try:
            Path(parsed.svg).write_text(timeline.svg(table, times), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot write {parsed.svg}: {error.strerror}") from None

    if parsed.json:
        print(json.dumps(schedule_file.to_json(table, times)))
    else:
        width = shutil.get_terminal_size((0, 0)).columns or None  # no terminal: nothing to fit into
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(timeline.draw(table, times, width=width, colour=colour))
        print(f"\n{timeline.bubbles(table, times, peers=parsed.kind in schedule.KINDS)}")
    if parsed.svg is not None:
        print(f"{parsed.svg}: the same, drawn to scale", file=sys.stderr if parsed.json else sys.stdout)
    return DONE


def _estimate(parsed: argparse.Namespace) -> int:
    _refuse_together(parsed, "sweep", "generate", "compile", "anchor")
    _refuse_together(parsed, "generate", "compile", "anchor")
    if parsed.batch and not parsed.generate:
        fix = f"--generate 512+128 --batch {parsed.batch}"
        raise ConfigError("--batch is how many sequences --generate makes", asked=f"--batch {parsed.batch}", fix=fix)
    from spmdtrain.planner import anchor, report
    from spmdtrain.planner.hardware import hardware

    _without_devices()
    device = hardware(parsed.hardware)
    config = report.with_vocab(load(parsed.config, parsed.set))
    if parsed.sweep is not None:
        rows = report.sweep(config, parsed.devices, device, parsed.sweep)
        print(json.dumps(rows) if parsed.json else report.show_sweep(rows))
        return DONE
    sizes = report.mesh_sizes(config, parsed.devices, device)
    if parsed.generate:
        return _generate(parsed, config, sizes, device)
    scale = 1.0 if parsed.anchor is None else anchor.anchored(parsed.anchor, device)
    price, held = report.priced(config, sizes, device, scale)
    found = report.describe(price, held) | ({"anchor": scale} if parsed.anchor else {})
    shown = [report.show(price, held)] + ([f"anchored on {parsed.anchor}: x {scale:.3g}"] if parsed.anchor else [])
    if parsed.compile:
        from spmdtrain.planner import deviceless

        found["compiled"] = deviceless.compile_step(config, sizes, device)
        shown.append(report.show_compiled(found["compiled"], held))
    print(json.dumps(found) if parsed.json else "\n".join(shown))
    return DONE


def _generate(parsed: argparse.Namespace, config, sizes, device) -> int:
    from dataclasses import asdict

    from spmdtrain.planner import report
    from spmdtrain.planner.generation import generate
    from spmdtrain.planner.job import job_of

    prompt, new = parsed.generate
    job = job_of(config, sizes)
    found = generate(job, parsed.batch or 1, prompt, new, device, report.our_stack(config, device))
    values = asdict(found) | {"tokens_per_second": found.tokens_per_second}
    print(json.dumps(values) if parsed.json else report.show_generation(found, device))
    return DONE


def _plan(parsed: argparse.Namespace) -> int:
    _refuse_together(parsed, "rules", "top")
    from spmdtrain.planner import report, search
    from spmdtrain.planner.hardware import hardware

    device = hardware(parsed.hardware)
    config = report.with_vocab(load(parsed.config, parsed.set))
    if parsed.rules:
        return _rules(parsed, config, device)
    plans = report.plan(config, parsed.devices, device, report.our_stack(config, device))
    best = search.distinct(plans, parsed.top or 10)
    if parsed.json:
        print(json.dumps([report.describe(plan.price, plan.memory) | {"why": plan.why} for plan in best]))
    else:
        print(report.show_plans(best, plans))
    return DONE


def _rules(parsed: argparse.Namespace, config, device) -> int:
    from spmdtrain.planner import assign, report

    job, _ = report.checked(config, report.mesh_sizes(config, parsed.devices, device))
    ours = report.our_stack(config, device)
    found = assign.assign(job, device, ours)
    if parsed.json:
        print(json.dumps([each.describe() for each in found]))
    else:
        print(assign.show(found, assign.assign(job, device, ours, by_rules=False)))
    return DONE


def _calibrate(parsed: argparse.Namespace) -> int:
    if not parsed.out.endswith(".toml"):
        raise ConfigError(f"--out {parsed.out}: --hardware reads .toml files", fix=f"--out {parsed.out}.toml")
    _refuse_unwritable(Path(parsed.out))  # before minutes of measuring
    _start_jax(parsed)
    from spmdtrain.planner import calibrate

    found = calibrate.calibrate()
    calibrate.write(found, Path(parsed.out))
    print(
        f"{parsed.out}: {found['bfloat16'] / 1e12:.4g} TFLOP/s bfloat16, {found['float32'] / 1e12:.4g} float32, "
        f"{found['memory_bandwidth'] / 1e9:.4g} GB/s memory, {found['link_bandwidth'] / 1e9:.4g} GB/s links"
    )
    return DONE


def _refuse_together(parsed: argparse.Namespace, first: str, *others: str) -> None:
    """`first` would pass over the other options in silence."""
    given = [name for name in (first, *others) if getattr(parsed, name) not in (None, False)]
    if first in given[:1] and given[1:]:
        raise ConfigError(f"--{first} and --{given[1]} cannot go together", fix="one of them at a time")


def _refuse_unwritable(path: Path) -> None:
    """Leaves the file, or that there is none, as it was."""
    try:
        there = os.path.lexists(path)
        path.open("a").close()
        if not there:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


def _without_devices() -> None:
    """jax is asked for shapes only: it need not take hold of a GPU."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def _refuse_sizes(kind: str, stages: int | None = None, microbatches: int | None = None, chunks: int = 1) -> None:
    """What is missing, and what would take minutes or more memory than there is."""
    if stages is None or microbatches is None:
        raise ConfigError(f"--kind {kind} needs --stages and --microbatches", fix="--stages 4 --microbatches 8")
    cells = stages * (microbatches * chunks + stages * (chunks + 1))
    if cells > LARGEST_SCHEDULE:
        asked = f"--stages {stages} --microbatches {microbatches} --chunks {chunks}"
        found = f"about {cells:,} ticks x stages, at most {LARGEST_SCHEDULE:,}"
        raise ConfigError("the schedule is too large to lay out", asked=asked, found=found)


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
    train.add_argument(
        "--hardware", metavar="NAME", help="predicts the run for it (default: the GPU at hand, where it is described)"
    )
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
    sample.add_argument("--seed", type=_seed, default=0, help="another seed, another text")
    _add_set(sample, "mesh.tensor=2, say (the default is one device); mesh.*, rules.* and model.attention alone")
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

    schedule = commands.add_parser("schedule", help="a pipeline schedule: its timeline, bubble and stash; no devices")
    kinds = "gpipe | 1f1b | interleaved | zero_bubble | a .json or .csv file with its own sizes (default: %(default)s)"
    schedule.add_argument("--kind", default="1f1b", metavar="KIND", help=kinds)
    schedule.add_argument("--stages", type=_positive, metavar="P", help="of the pipeline")
    schedule.add_argument("--microbatches", type=_positive, metavar="M", help="per step")
    schedule.add_argument("--chunks", type=_positive, metavar="V", help="runs of layers per stage (default: 1)")
    through = "of a microbatch through all chunks of a stage, in any one unit (default: 1)"
    schedule.add_argument("--forward", type=_time, metavar="TIME", help=through)
    schedule.add_argument(
        "--backward", type=_time, metavar="TIME", help="the same, of the backward without weight gradient"
    )
    schedule.add_argument("--weight", type=_time, metavar="TIME", help="the same; adds to backwards that are not split")
    schedule.add_argument("--hop", type=_time, metavar="TIME", help="from a stage to the next (default: 0)")
    schedule.add_argument("--svg", metavar="FILE", help="writes a picture, as wide as the times say")
    schedule.add_argument("--json", action="store_true", help="for programs; --kind FILE.json reads it back")
    schedule.set_defaults(command=_schedule)

    estimate = commands.add_parser("estimate", help="time and memory of a step on hardware that need not be here")
    _add_config(estimate)
    _add_hardware(estimate)
    estimate.add_argument("--devices", type=_positive, metavar="N", help="how many (default: the product of the mesh)")
    estimate.add_argument("--anchor", metavar="RUN", help="scales the times by what a run on this hardware measured")
    estimate.add_argument("--sweep", metavar="hardware.KEY=A,B", help="the estimate at several values of one figure")
    estimate.add_argument(
        "--compile", action="store_true", help="compiles the real step for these GPUs and prints XLA's own figures"
    )
    estimate.add_argument(
        "--generate", type=_prompt_and_new, metavar="PROMPT+NEW", help="prices generation instead: 512+128 tokens"
    )
    estimate.add_argument("--batch", type=_positive, metavar="N", help="sequences to generate at once (default: 1)")
    estimate.set_defaults(command=_estimate)

    plan = commands.add_parser("plan", help="which layout: searches them all and says why the others lost")
    _add_config(plan)
    _add_hardware(plan)
    plan.add_argument("--devices", type=_positive, required=True, metavar="N", help="how many")
    plan.add_argument("--top", type=_positive, metavar="N", help="meshes to print (default: 10)")
    plan.add_argument(
        "--rules",
        action="store_true",
        help="keeps the config's mesh; its tensor axis used best, as a [rules] table",
    )
    plan.set_defaults(command=_plan)

    calibrate = commands.add_parser("calibrate", help="measures this machine and writes a file for --hardware")
    calibrate.add_argument("--out", default="hardware.toml", metavar="FILE", help="a .toml file (default: %(default)s)")
    _add_devices(calibrate)
    calibrate.set_defaults(command=_calibrate)
    return parser


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    names = "a100-40, a100-80, h100, h100-pcie, h200, b200, gb200, mi300x or a .toml file"
    parser.add_argument("--hardware", required=True, metavar="NAME", help=names)
    parser.add_argument("--json", action="store_true", help="for programs")


def _prompt_and_new(text: str) -> tuple[int, int]:
    prompt, plus, new = text.partition("+")
    if not plus:
        raise argparse.ArgumentTypeError(f"{text} is not PROMPT+NEW, 512+128 say")
    return _positive(prompt), _positive(new)


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


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= SEEDS:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 to {SEEDS - 1}")
    return int(text)


def _time(text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = -1.0
    if not 0 <= time <= 1e12:  # nan neither; the bound keeps sums finite
        raise argparse.ArgumentTypeError(f"{text} is not a time: a number from 0 to 1e12")
    return time


if __name__ == "__main__":
    sys.exit(main())
