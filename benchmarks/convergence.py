"""What each option of the craft costs in loss: on real text, three seeds, beside its baseline.

    python benchmarks/convergence.py --text FILE --write docs/convergence.md [--only NAME ...]
        [--seeds 1]

A run is a GPT of two layers on the bytes of a text, 300 steps of 32 x 64 tokens. The margin of an
option was written down before its first run; an option that misses it stays in the table.
"""

import argparse
import atexit
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from spmdtrain.config.run_files import RunFiles

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
QUIET = subprocess.DEVNULL
START, END = "<!-- the table -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Option:
    """Settings beside those of its baseline, and the share by which its loss may be higher."""

    name: str
    settings: tuple[str, ...]
    margin: float
    baseline: tuple[str, ...] = ()
    islands: int = 1  # runs that meet; the loss is that of the first, after the last meeting
    tables: str = ""  # TOML that follows that of every run: `--set` takes no lists of tables
    teacher: tuple[str, ...] = ()  # settings of a run that is trained first, with seed 0
    top: int = 0  # the likeliest tokens that it saves; 0: it is on the mesh


BFLOAT16 = ("precision.compute=bfloat16",)
DATA = ("mesh.data=4",)  # simulated; four shards are summed
# Together the 32 sequences of the baseline; all are evaluated on the same windows.
ISLANDS = ("train.global_batch=8", "eval.batches=256", "islands.every=20", "islands.after=100")
# The tokens of the baseline in 400 steps: a sixth of them in smaller batches, or shorter sequences.
STAGED = ("train.steps=400", "eval.every=400")
SMALLER = """
[[train.stages]]
until = 100
global_batch = 8
[[train.stages]]
until = 150
global_batch = 16
"""
SHORTER = """
[[train.stages]]
until = 100
sequence_length = 16
[[train.stages]]
until = 150
sequence_length = 32
"""
OPTIONS = (
    Option("bfloat16 matmuls", BFLOAT16, 0.005),
    Option("bfloat16 moments", ("optimizer.moment_dtype=bfloat16",), 0.002),
    Option("8-bit moments", ("optimizer.moment_dtype=8bit",), 0.002),
    Option("bfloat16 weights, rounded to nearest", ("precision.params=bfloat16",), 0.002),
    Option(
        "bfloat16 weights, stochastic rounding",
        ("precision.params=bfloat16", "precision.rounding=stochastic"),
        0.002,
    ),
    Option(
        "bfloat16 weights, stochastic rounding, 8-bit moments",
        (
            "precision.params=bfloat16",
            "precision.rounding=stochastic",
            "optimizer.moment_dtype=8bit",
        ),
        0.002,
    ),
    Option("8-bit matmuls", (*BFLOAT16, "precision.matmul=float8"), 0.005, BFLOAT16),
    Option(
        "8-bit matmuls, delayed scaling",
        (*BFLOAT16, "precision.matmul=float8", "precision.scaling=delayed"),
        0.005,
        BFLOAT16,
    ),
    Option("8-bit matmuls in blocks", (*BFLOAT16, "precision.matmul=mxfp8"), 0.005, BFLOAT16),
    Option("gradients in int8", (*DATA, "compression.codec=int8"), 0.005, DATA),
    Option("gradients in float8", (*DATA, "compression.codec=float8"), 0.005, DATA),
    Option("gradients as factors of rank 4", (*DATA, "compression.codec=lowrank"), 0.02, DATA),
    # As many bytes as rank 4.
    Option(
        "gradients as factors of rank 3 in attention, 5 in MLPs on their way up, else 4",
        (
            *DATA,
            "compression.codec=lowrank",
            "compression.ranks.*attention*=3",
            "compression.ranks.*up_*=5",
        ),
        0.02,
        DATA,
    ),
    Option(
        "gradients as factors of rank 8, the first third in float32",
        (*DATA, "compression.codec=lowrank", "compression.rank=8", "compression.after=100"),
        0.02,
        DATA,
    ),
    Option("the largest 1% of gradients", (*DATA, "compression.codec=topk"), 0.02, DATA),
    Option(
        "the largest 1% of gradients, the first third in float32",
        (*DATA, "compression.codec=topk", "compression.after=100"),
        0.02,
        DATA,
    ),
    Option(
        "the largest 5% of gradients, the first third in float32",
        (*DATA, "compression.codec=topk", "compression.keep=0.05", "compression.after=100"),
        0.02,
        DATA,
    ),
    Option(
        "the largest 1% likewise, AdamW without momentum",
        (*DATA, "compression.codec=topk", "compression.after=100", "optimizer.beta1=0"),
        0.02,
        DATA,
    ),
    # The gradual share rises from a quarter of the run to three quarters of it.
    Option("2 of 4 weights from a quarter on", ("sparsity.pattern=2:4", "sparsity.since=75"), 0.05),
    Option(
        "half of the weights, gradually",
        (
            "sparsity.pattern=magnitude",
            "sparsity.since=75",
            "sparsity.every=15",
            "sparsity.until=225",
        ),
        0.03,
    ),
    Option("4 islands, the first third in step", ISLANDS, 0.05, islands=4),
    Option("4 islands in int8, likewise", (*ISLANDS, "islands.codec=int8"), 0.05, islands=4),
    Option(
        "4 islands that average, likewise", (*ISLANDS, "islands.outer=average"), 0.05, islands=4
    ),
    Option(
        "4 islands in 2 fragments, likewise", (*ISLANDS, "islands.fragments=2"), 0.05, islands=4
    ),
    Option("4 islands, 5 steps late, likewise", (*ISLANDS, "islands.delay=5"), 0.05, islands=4),
    Option("batches of 8, 16, then 32", STAGED, 0.005, tables=SMALLER),
    Option(
        "batches likewise, rate by their root",
        (*STAGED, "optimizer.rate_by_batch=sqrt"),
        0.005,
        tables=SMALLER,
    ),
    Option("sequences of 16, 32, then 64 tokens", STAGED, 0.005, tables=SHORTER),
    # At the rate and the warm-up of the baseline. Whoever computes more may not end higher.
    Option(
        "SOAP, at AdamW's rate",
        ("optimizer.name=soap", "optimizer.learning_rate=3e-3", "optimizer.warmup=30"),
        0.0,
    ),
    # Trained on the same text in the same steps. Whoever learns from it may not end higher.
    Option(
        "a teacher twice as wide",
        ("distill.temperature=2", "distill.share=0.5"),
        0.0,
        teacher=("model.embed=128",),
    ),
    Option(
        "its 32 likeliest tokens, saved",
        ("distill.temperature=2", "distill.share=0.5"),
        0.0,
        teacher=("model.embed=128",),
        top=32,
    ),
)

RUN = """
[model]
name = "gpt"
layers = 2
embed = 64
heads = 4
[train]
steps = 300
global_batch = 32
sequence_length = 64
clip = 1.0
[optimizer]
learning_rate = 3e-3
warmup = 30
[data]
corpus = "text"
path = "{text}"
tokenizer = "bytes"
validation_fraction = 0.1
[eval]
every = 300
batches = 64
[checkpoint]
every = 0
"""


@cache
def trained_teacher(text: Path, settings: tuple[str, ...]) -> Path:
    """Returns the directory of a run with these settings, trained once for all seeds."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    config = folder / "run.toml"
    config.write_text(RUN.format(text=text))
    more = [*settings, "eval.every=0", "train.seed=0"]
    subprocess.run(command(config, folder / "run", more), cwd=ROOT, stdout=QUIET, check=True)
    return folder / "run"


def taught_by(text: Path, option: Option) -> str:
    """Returns the setting that names the teacher of an option, or what it has saved."""
    teacher = trained_teacher(text, option.teacher)
    if not option.top:
        return f"distill.teacher={teacher}"
    return f"distill.logits={saved_logits(teacher, option.settings, option.top)}"


@cache
def saved_logits(teacher: Path, settings: tuple[str, ...], top: int) -> Path:
    """Returns the folder of a teacher's likeliest tokens, written once for all seeds."""
    folder = teacher.parent / "logits"
    words = [
        sys.executable,
        "-m",
        "spmdtrain.cli",
        "data",
        "teach",
        str(teacher.parent / "run.toml"),
    ]
    words += [str(teacher), "--out", str(folder), "--top", str(top)]
    words += [word for setting in settings for word in ("--set", setting)]
    subprocess.run(words, cwd=ROOT, stdout=QUIET, stderr=QUIET, check=True)
    return folder


def held_out_loss(text: Path, option: Option, seed: int) -> float:
    """Returns the loss of the last evaluation of one run, in a process of its own.

    If there are several islands, each is one, and they meet in a folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "run.toml")
        config.write_text(RUN.format(text=text) + option.tables)
        taught = []
        if option.teacher:
            taught = [taught_by(text, option)]
        runs = [Path(folder, f"run{index}") for index in range(option.islands)]
        started = []
        for index, run in enumerate(runs):
            more = [*taught, *option.settings, f"train.seed={seed}"]
            if option.islands > 1:
                more += [f"islands.count={option.islands}", f"islands.index={index}"]
                more += [f"islands.directory={folder}/meetings"]
            started.append(subprocess.Popen(command(config, run, more), cwd=ROOT, stdout=QUIET))
        if any([each.wait() for each in started]):
            sys.exit(f"a run of {option.name} failed")
        return [line["eval_loss"] for line in RunFiles(runs[0]).metrics if "eval_loss" in line][-1]


def command(config: Path, run: Path, settings: Sequence[str]) -> list[str]:
    """Returns the command that trains with these settings."""
    words = [sys.executable, "-m", "spmdtrain.cli", "train", str(config), "--run", str(run)]
    if tuple(settings[: len(DATA)]) == DATA:
        words += ["--simulate-devices", "4"]
    return words + [word for setting in settings for word in ("--set", setting)]


def rows(text: Path, options: Sequence[Option], seeds: Sequence[int]) -> Iterator[str]:
    """Yields the lines of the table; a baseline that several options share runs once."""
    found: dict[tuple[tuple[str, ...], str, int], list[float]] = {}

    def losses(option: Option) -> list[float]:
        key = option.settings, option.tables, option.top  # which differ where the teachers do
        if key not in found:
            found[key] = [held_out_loss(text, option, seed) for seed in seeds]
        return found[key]

    yield "| option | settings | loss | baseline | difference | margin | holds |"
    yield "|---|---|---|---|---|---|---|"
    for each in options:
        own, base = losses(each), losses(Option("the baseline", each.baseline, 0.0))
        share = statistics.mean(own) / statistics.mean(base) - 1
        said = ", ".join(f"`{one}`" for one in (*each.settings, *_stages(each.tables)))
        holds = "yes" if share <= each.margin else "**no**"
        figures = (_spread(own), _spread(base), f"{share:+.2%}", f"{each.margin:.1%}", holds)
        yield " | ".join([f"| {each.name}", said, *figures]) + " |"


def _stages(tables: str) -> list[str]:
    """Returns the stages of a run as one would write them in a line."""
    return [
        f"train.stages: {', '.join(f'{key}={value}' for key, value in stage.items())}"
        for stage in tomllib.loads(tables).get("train", {}).get("stages", [])
    ]


def _spread(losses: Sequence[float]) -> str:
    if len(losses) == 1:
        return f"{losses[0]:.4f}, one seed"
    return f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"


def with_rows(page: str, table: Sequence[str]) -> str:
    """Returns a page with these lines of the table: of an option measured before, instead of its
    row. The rows of the other options stay, and all are in the order of OPTIONS.
    """
    head, _, rest = page.partition(START)
    inside, _, tail = rest.partition(END)
    heading, rows = table[:2], [*inside.strip().splitlines()[2:], *table[2:]]
    by_name = {row.split("|")[1].strip(): row for row in rows}
    kept = [by_name[each.name] for each in OPTIONS if each.name in by_name]
    return "\n".join([f"{head}{START}", "", *heading, *kept, "", f"{END}{tail}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="a file of real text, 1 MB")
    parser.add_argument("--only", nargs="+", help="names of options")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many; default: 3")
    parser.add_argument("--write", type=Path, help="the page whose table gets the rows")
    given = parser.parse_args()
    options = [each for each in OPTIONS if not given.only or each.name in given.only]
    table = []
    for line in rows(given.text.resolve(), options, SEEDS[: given.seeds]):
        table.append(line)
        print(line, flush=True)
    if given.write:
        given.write.write_text(with_rows(given.write.read_text(), table))


if __name__ == "__main__":
    main()
