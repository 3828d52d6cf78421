"""Whatever a person gets wrong costs one line on stderr, the documented exit code and no traceback.

Most cases go through the command line in this process, where jax sees 8 devices already; a few
start it anew.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_tries import wrong_with

from spmdtrain.cli import main

ROOT = Path(__file__).parent.parent
CONFIG, DATA, CHECKPOINT, STORAGE = 4, 5, 6, 10
TINY = """
[model]
layers = 1
embed = 16
heads = 2
[mesh]
data = 2
fsdp = 2
tensor = 2
[train]
steps = 2
global_batch = 8
sequence_length = 8
[data]
corpus = "text"
path = "text.txt"
tokenizer = "characters"
validation_fraction = 0.2
"""
FILES = {
    "tiny.toml": TINY,
    "key.toml": 'extends = "tiny.toml"\n[train]\nstpes = 3\n',
    "section.toml": "[trian]\nsteps = 3\n",
    "type.toml": '[train]\nsteps = "many"\n',
    "broken.toml": "[train\nsteps = 3\n",
    "first.toml": 'extends = "second.toml"\n',
    "second.toml": 'extends = "first.toml"\n',
    "orphan.toml": 'extends = "parent.toml"\n',
    "text.txt": "to be or not to be, that is the question: \n" * 20,
    "same_letters.txt": "question: to be, or not to be that is the\n" * 20,
    "short.txt": "short text",
    "empty.txt": "",
    "tokenizer.json": "{}",
    "two_stages.csv": "F0.0,\n,F0.0 B0.0\nB0.0,\n",
    "two_backwards.csv": "F0.0 B0.0 B0.0\n",
    "file": "",
}


def made_runs() -> None:
    """RUN and its damaged copies, in the working directory; one training in all."""
    assert main(["train", "tiny.toml", "--run", "run"]) == 0
    for name in ("empty_step", "cut_step", "no_item"):
        shutil.copytree("run", name)
    Path("empty_step/checkpoints/7").mkdir()
    cut = [file for file in Path("cut_step/checkpoints/2").rglob("d/*") if file.is_file()]
    assert cut, "Orbax keeps array data in folders called d"
    for file in cut:
        os.truncate(file, 20)
    shutil.rmtree("no_item/checkpoints/2/params")
    for name, config in {"no_config": None, "not_json": "{", "no_object": "[]"}.items():
        Path(name).mkdir()
        if config:
            Path(name, "config.json").write_text(config)
    saved = json.loads(Path("run/config.json").read_text())
    model = saved["config"]["model"]
    for name, change in {
        "no_origin": {"origin": None},
        "odd_origin": {"origin": ["model.vocab"]},
        "no_settings": {"config": {}},
        "no_vocab": {"config": {"model": model | {"vocab": None}}},
        "no_model": {"config": {"model": 3}},
    }.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(saved | change))
    Path("no_checkpoint").mkdir()
    shutil.copy("run/config.json", "no_checkpoint")
    Path("log_is_folder/metrics.jsonl").mkdir(parents=True)
    Path("link_inside").mkdir()
    Path("link_inside/events.jsonl").symlink_to("/dev/full")


def made_token_files() -> None:
    assert main(["data", "prepare", "text.txt", "--out", "good"]) == 0
    for name in ("cut", "no_sidecar", "bad_sidecar", "no_index", "bad_ids"):
        for suffix in ("bin", "idx", "json"):
            shutil.copy(f"good.{suffix}", f"{name}.{suffix}")
    os.truncate("cut.bin", 100)
    Path("no_sidecar.json").unlink()
    Path("bad_sidecar.json").write_text("{")
    Path("no_index.idx").unlink()
    Path("bad_ids.bin").write_bytes(b"\xff" * Path("good.bin").stat().st_size)


@pytest.fixture(scope="module", autouse=True)
def workplace(tmp_path_factory):
    """Every case runs here, with relative paths as a person types them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("workplace"))
        for name, text in FILES.items():
            Path(name).write_text(text)
        Path("bare.bin").write_bytes(bytes(each for id in range(60) for each in (id, 0)))
        Path("latin.txt").write_bytes("café au lait".encode("latin-1"))
        made_runs()
        made_token_files()
        yield


def refusal(capsys, code: int, arguments: list[str]) -> str:
    """The one line that `spmdtrain ARGUMENTS` gave; any exception that is ours fails the test by
    itself.
    """
    capsys.readouterr()
    assert main(arguments) == code
    return checked(capsys.readouterr().err)


def checked(errors: str) -> str:
    assert "Traceback" not in errors
    assert errors.startswith("spmdtrain: ") and errors.endswith("\n") and errors.count("\n") == 1, (
        errors
    )
    line = errors.removeprefix("spmdtrain: ").rstrip()
    assert wrong_with(line.partition("; try ")[2]) == [], line
    return line


def train(*settings: str, run: str = "unused") -> list[str]:
    return [
        "train",
        "tiny.toml",
        "--run",
        run,
        *(word for setting in settings for word in ("--set", setting)),
    ]


def resume(run: str, *settings: str) -> list[str]:
    return train("train.steps=9", *settings, run=run)


def sample(*arguments: str, run: str = "run") -> list[str]:
    return ["sample", run, "--prompt", "to", "--length", "4", *arguments]


def schedule(*arguments: str) -> list[str]:
    return ["schedule", "--stages", "4", "--microbatches", "6", *arguments]


def estimate(*arguments: str) -> list[str]:
    return ["estimate", "tiny.toml", "--hardware", "h100", *arguments]


def tokens(name: str) -> list[str]:
    return train("data.corpus=tokens", "data.tokenizer=bytes", f"data.path={name}.bin")


THREE = tuple(
    word
    for axis, size in {"data": 1, "fsdp": 1, "tensor": 1, "context": 3}.items()
    for word in ("--set", f"mesh.{axis}={size}")
)
SWEEP = ("--sweep", "hardware.memory_bandwidth=1e12")
HUGE = "99999999999999999999999"
# exit code, words of the line, command line
TABLE = {
    # config files and --set
    "unknown key": (
        CONFIG,
        "train.stpes|key.toml|did you mean train.steps?",
        ["train", "key.toml"],
    ),
    "unknown section": (
        CONFIG,
        "trian|section.toml|did you mean train?",
        ["train", "section.toml"],
    ),
    "wrong type": (
        CONFIG,
        "train.steps='many'|type.toml|must be an integer",
        ["train", "type.toml"],
    ),
    "not TOML": (CONFIG, "broken.toml|is not TOML|line 1", ["train", "broken.toml"]),
    "missing config": (
        CONFIG,
        "there is no config file tony.toml|try tiny.toml",
        ["train", "tony.toml"],
    ),
    "config is a folder": (CONFIG, "config file run|Is a directory", ["train", "run"]),
    "extends in a circle": (
        CONFIG,
        "extends itself|first.toml -> second.toml -> first.toml",
        ["train", "first.toml"],
    ),
    "extends nothing": (CONFIG, "parent.toml (extended by orphan.toml)", ["train", "orphan.toml"]),
    "--set without a value": (
        CONFIG,
        "'train.steps' is not KEY=VALUE|try --set",
        train("train.steps"),
    ),
    "--set of a section": (CONFIG, "train is a section, not a value", train("train=3")),
    "--set without section": (
        CONFIG,
        "unknown key steps|did you mean train.steps?",
        train("steps=3"),
    ),
    "--set of a wrong type": (
        CONFIG,
        "train.steps='many'|from --set|an integer",
        train("train.steps=many"),
    ),
    "unknown choice": (
        CONFIG,
        "'cosin'|'linear'|did you mean 'cosine'?",
        train("optimizer.schedule=cosin"),
    ),
    "unknown model": (CONFIG, "model.name='gtp'|did you mean 'gpt'?", train("model.name=gtp")),
    "negative rate": (
        CONFIG,
        "learning_rate=-1.0|greater than 0",
        train("optimizer.learning_rate=-1"),
    ),
    "rate that is not a number": (
        CONFIG,
        "learning_rate=nan|finite",
        train("optimizer.learning_rate=nan"),
    ),
    "seed of too many bits": (
        CONFIG,
        "train.seed=4294967296|less than 4294967296",
        train("train.seed=4294967296"),
    ),
    "warm-up past the end": (
        CONFIG,
        "optimizer.warmup=9|train.steps=2",
        train("optimizer.warmup=9"),
    ),
    "sequence too long": (CONFIG, "sequence_length=8|max_length=4", train("model.max_length=4")),
    "nothing to go back to": (
        CONFIG,
        "guard.policy='rollback'|checkpoint.every=0|set checkpoint.every='auto'",
        train("guard.policy=rollback", "checkpoint.every=0"),
    ),
    "a window nobody looks at": (
        CONFIG,
        "guard.window=8|set guard.sigmas=6",
        train("guard.window=8"),
    ),
    "heads do not divide": (
        CONFIG,
        "model.embed=16|model.heads=3|model.head_dim",
        train("model.heads=3"),
    ),
    "text without a path": (
        CONFIG,
        "data.path is needed for data.corpus='text'",
        train("data.path=none"),
    ),
    "a path nobody reads": (
        CONFIG,
        "data.path='text.txt'|data.corpus='text'",
        train("data.corpus=stdlib"),
    ),
    "nothing to evaluate on": (
        CONFIG,
        "eval.every|data.validation_fraction=0",
        train("eval.every=1", "data.validation_fraction=0"),
    ),
    # the command line
    "no command": (CONFIG, "required: COMMAND|try spmdtrain --help", []),
    "unknown command": (CONFIG, "invalid choice: 'trian'|'train'|--help", ["trian", "tiny.toml"]),
    "missing argument": (CONFIG, "required: CONFIG|try spmdtrain train --help", ["train"]),
    "unknown option": (
        CONFIG,
        "unrecognized arguments: --bogus",
        ["train", "tiny.toml", "--bogus"],
    ),
    "no devices": (
        CONFIG,
        "0 is not a whole number of at least 1",
        ["train", "tiny.toml", "--simulate-devices", "0"],
    ),
    "devices in words": (
        CONFIG,
        "many is not a whole number",
        ["train", "tiny.toml", "--simulate-devices", "many"],
    ),
    "devices without end": (
        CONFIG,
        "asked --simulate-devices 99999999999|1 to 4096",
        ["train", "tiny.toml", "--simulate-devices", "99999999999"],
    ),
    "--processes alone": (
        CONFIG,
        "--coordinator and --process missing|asked --processes 2|try --coordinator HOST:PORT",
        ["train", "tiny.toml", "--processes", "2"],
    ),
    "process out of range": (
        CONFIG,
        "no such process|--process 2",
        ["train", "tiny.toml", "--coordinator", "host:1", "--processes", "2", "--process", "2"],
    ),
    "coordinator without port": (
        CONFIG,
        "no port|try --coordinator host:12345",
        ["train", "tiny.toml", "--coordinator", "host", "--processes", "2", "--process", "0"],
    ),
    # meshes
    "mesh too large": (
        CONFIG,
        "mesh.data=4 (--set)|16 devices|found 8|try --set mesh.data=2",
        train("mesh.data=4"),
    ),
    "mesh too small": (CONFIG, "4 devices|found 8|try --set mesh.data=2", train("mesh.data=1")),
    "show of a mesh too large": (
        CONFIG,
        "16 devices|found 8",
        ["show", "tiny.toml", "--set", "mesh.data=4"],
    ),
    "two axes to fill": (
        CONFIG,
        "mesh.data and mesh.fsdp are both -1|only one",
        train("mesh.data=-1", "mesh.fsdp=-1"),
    ),
    "an axis of no devices": (CONFIG, "mesh.data=0|at least 1", train("mesh.data=0")),
    "heads over tensor": (
        CONFIG,
        "attention|kv_heads=2 is not divisible by tensor = 4|try kv_heads = 4",
        train("mesh.data=1", "mesh.tensor=4"),
    ),
    "key-value heads over tensor": (
        CONFIG,
        "kv_heads=2 is not divisible by tensor = 4",
        train("mesh.data=1", "mesh.tensor=4", "model.heads=4", "model.kv_heads=2"),
    ),
    "width over fsdp": (
        CONFIG,
        "embed=18 is not divisible by fsdp = 4|try embed = 20",
        train("mesh.data=1", "mesh.fsdp=4", "model.embed=18"),
    ),
    "mlp over tensor": (
        CONFIG,
        "mlp.down_fe|ffn=33 is not divisible by tensor = 2|try ffn = 34",
        train("model.ffn=33"),
    ),
    "time over context": (
        CONFIG,
        "train.sequence_length: time=7 is not divisible by context = 2",
        train("mesh.data=1", "mesh.context=2", "train.sequence_length=7"),
    ),
    "batch over the mesh": (
        CONFIG,
        "train.global_batch=6 is not divisible by data=2 x fsdp=2 = 4|"
        "try --set train.global_batch=4 or 8",
        train("train.global_batch=6"),
    ),
    "microbatch": (
        CONFIG,
        "data=2 x fsdp=2 x train.microbatch=3 = 12",
        train("train.microbatch=3"),
    ),
    # rules
    "rule of a near-miss": (
        CONFIG,
        "'embd'|did you mean 'embed'?",
        train("rules.parameters.embd=fsdp"),
    ),
    "rule to no mesh axis": (
        CONFIG,
        "'fsdb'|did you mean 'fsdp'?",
        train("rules.parameters.embed=fsdb"),
    ),
    "two dims on one mesh axis": (
        CONFIG,
        "'kv_heads' and 'embed' both use mesh axis 'tensor'|try --set rules.parameters.embed=",
        train("rules.parameters.embed=tensor"),
    ),
    "weights over data": (
        CONFIG,
        "rules.parameters.embed|'data'|itself",
        train("rules.parameters.embed=data"),
    ),
    "layers over a batch axis": (
        CONFIG,
        "rules.parameters.layer|'fsdp'|cannot split layers|try --set rules.parameters.layer=",
        train("rules.parameters.layer=fsdp"),
    ),
    "time over a batch axis": (
        CONFIG,
        "'batch' and 'time' both use mesh axis 'fsdp'",
        train("rules.activations.time=fsdp"),
    ),
    "rule for the batch": (
        CONFIG,
        "always split over data x fsdp x expert",
        train("rules.activations.batch="),
    ),
    # data
    "missing text": (DATA, "no file matches tex.txt|try text.txt", train("data.path=tex.txt")),
    "text is a folder": (DATA, "run is a folder|try run/**/*.txt", train("data.path=run")),
    "not UTF-8": (
        DATA,
        "latin.txt is not UTF-8|byte 0xe9 at offset 3",
        train("data.path=latin.txt"),
    ),
    "empty text": (DATA, "the corpus is empty", train("data.path=empty.txt")),
    "text too short": (
        DATA,
        "training split is too short|train.sequence_length=8|found 8 of 10 tokens",
        train("data.path=short.txt"),
    ),
    "unknown tokenizer": (DATA, "no tokenizer 'bites'|try bytes", train("data.tokenizer=bites")),
    "not a tokenizer.json": (
        DATA,
        "is not a Hugging Face tokenizer.json",
        train("data.tokenizer=tokenizer.json"),
    ),
    "vocabulary too small": (
        DATA,
        "asked model.vocab=4|found 16|try --set model.vocab=16",
        train("model.vocab=4"),
    ),
    "token file missing": (DATA, "no file matches none.bin", tokens("none")),
    "token file cut": (
        DATA,
        "cut.bin is truncated|asked 1722 bytes|found 100 bytes",
        tokens("cut"),
    ),
    "token file without sidecar": (
        DATA,
        "no sidecar no_sidecar.json|data prepare",
        tokens("no_sidecar"),
    ),
    "token file with a broken sidecar": (
        DATA,
        "bad_sidecar.json is not JSON",
        tokens("bad_sidecar"),
    ),
    "token file without index": (DATA, "no_index.idx is missing", tokens("no_index")),
    "ids beyond the vocabulary": (
        DATA,
        "bad_ids.bin: id 65535|vocabulary of 256",
        tokens("bad_ids"),
    ),
    "prepare nothing": (
        DATA,
        "no file matches none.txt",
        ["data", "prepare", "none.txt", "--out", "new"],
    ),
    "prepare over a token file": (
        DATA,
        "good.bin exists already|another --out",
        ["data", "prepare", "text.txt", "--out", "good"],
    ),
    "prepare into a file": (
        STORAGE,
        "cannot write file/x.bin",
        ["data", "prepare", "text.txt", "--out", "file/x"],
    ),
    # going on from a checkpoint
    "resume another shape": (
        CHECKPOINT,
        "run/checkpoints/2 does not fit|asked model.embed=32|try --set model.embed=16",
        resume("run", "model.embed=32"),
    ),
    "resume another optimizer": (
        CHECKPOINT,
        "does not fit: optimizer|asked optimizer.name=sgd|found optimizer.name=adamw",
        resume("run", "optimizer.name=sgd"),
    ),
    "resume another seed": (
        CHECKPOINT,
        "train.seed has changed|asked 1|--fresh",
        resume("run", "train.seed=1"),
    ),
    "resume a changed corpus": (
        CHECKPOINT,
        "the corpus is not the one|asked data.path=same_letters.txt|--set data.path=",
        resume("run", "data.path=same_letters.txt"),
    ),
    "resume a cut step": (
        CHECKPOINT,
        "checkpoints/2 is damaged: it cannot be read",
        resume("cut_step"),
    ),
    "resume half a step": (CHECKPOINT, "checkpoints/2 is damaged|params", resume("no_item")),
    "start from no run": (
        CHECKPOINT,
        "train.init_from='nowhere' holds no checkpoint",
        train("train.init_from=nowhere"),
    ),
    "start from another shape": (
        CHECKPOINT,
        "does not fit",
        train("train.init_from=run", "model.embed=32", run="unused_2"),
    ),
    # the run directory
    "run directory is a file": (
        STORAGE,
        "cannot write the run directory file|File exists",
        train(run="file"),
    ),
    "run directory in a file": (
        STORAGE,
        "cannot write the run directory file/x",
        train(run="file/x"),
    ),
    "log is a folder": (
        STORAGE,
        "log_is_folder/metrics.jsonl is a folder",
        train(run="log_is_folder"),
    ),
    "a link in the run": (
        CHECKPOINT,
        "link_inside/events.jsonl is a link|/dev/full",
        train(run="link_inside"),
    ),
    # sampling
    "sample no run": (
        CHECKPOINT,
        "nowhere is not a run directory|which has a config.json",
        sample(run="nowhere"),
    ),
    "eval bare ids": (
        DATA,
        "bare.bin: id 16 at token|vocabulary of 16",
        ["eval", "run", "bare.bin"],
    ),
    "eval a damaged text of tokens": (DATA, "cut.bin", ["eval", "run", "cut.bin"]),
    "replay on a mesh that does not fit": (
        CONFIG,
        "time=8|try --set rules.activations.time= to keep it whole",
        ["replay", "run", "--step", "2", *THREE],
    ),
    "eval with a sequence that does not fit": (
        CHECKPOINT,
        "does not fit|try the configuration that it was saved with",
        ["eval", "run", "text.txt", "--set", "train.sequence_length=16"],
    ),
    "sample a folder": (CHECKPOINT, "no_config is not a run directory", sample(run="no_config")),
    "sample a broken config": (CHECKPOINT, "not_json/config.json", sample(run="not_json")),
    "sample a config of nothing": (CHECKPOINT, "no_object/config.json", sample(run="no_object")),
    "sample without checkpoint": (
        CHECKPOINT,
        "no_checkpoint holds no checkpoint",
        sample(run="no_checkpoint"),
    ),
    "sample a cut step": (
        CHECKPOINT,
        "checkpoints/2 is damaged: it cannot be read",
        sample(run="cut_step"),
    ),
    "sample an empty step": (
        CHECKPOINT,
        "checkpoints/7 is damaged|try --step 2",
        [*sample(run="empty_step"), "--step", "7"],
    ),
    "no file of prompts": (
        CONFIG,
        "--prompts none.txt|No such file",
        ["sample", "run", "--prompts", "none.txt"],
    ),
    "sample too many devices": (
        CONFIG,
        "asked mesh.tensor=16 (--set): 16 devices|found 8",
        sample("--set", "mesh.tensor=16"),
    ),
    "top-p out of range": (CONFIG, "--top-p 2.0|above 0 and at most 1", sample("--top-p", "2")),
    "top-k of nothing": (CONFIG, "--top-k 0", sample("--top-k", "0")),
    "temperature below zero": (CONFIG, "--temperature -1.0", sample("--temperature", "-1")),
    "temperature of nan": (CONFIG, "--temperature nan", sample("--temperature", "nan")),
    "sampling seed of too many bits": (
        CONFIG,
        f"--seed: {HUGE}|0 to 4294967295",
        sample("--seed", HUGE),
    ),
    "sampling seed below zero": (CONFIG, "--seed: -1|0 to 4294967295", sample("--seed=-1")),
    "sample other settings": (
        CONFIG,
        "asked --set model.layers=2|mesh.*, rules.*, model.attention",
        sample("--set", "model.layers=2"),
    ),
    "sample without origins": (
        CHECKPOINT,
        "no_origin/config.json holds no resolved",
        sample(run="no_origin"),
    ),
    "sample odd origins": (
        CHECKPOINT,
        "odd_origin/config.json holds no resolved",
        sample(run="odd_origin"),
    ),
    "sample without settings": (
        CHECKPOINT,
        "no_settings/config.json holds no resolved",
        sample(run="no_settings"),
    ),
    "sample without vocabulary": (
        CHECKPOINT,
        "no_vocab/config.json holds no resolved",
        sample(run="no_vocab"),
    ),
    "sample settings of no model": (
        CHECKPOINT,
        "no_model/config.json holds no resolved",
        sample(run="no_model"),
    ),
    "empty prompt": (CONFIG, "--prompt is empty", sample("--prompt", "")),
    "unknown character": (
        DATA,
        "character 'z' (U+007A) at position 0",
        sample("--prompt", "zebra"),
    ),
    # the planner
    "sweep beside generation": (
        CONFIG,
        "--sweep and --generate|try",
        estimate(*SWEEP, "--generate", "8+8"),
    ),
    "sweep beside compile": (CONFIG, "--sweep and --compile", estimate(*SWEEP, "--compile")),
    "sweep beside an anchor": (
        CONFIG,
        "--sweep and --anchor",
        estimate(*SWEEP, "--anchor", "nowhere"),
    ),
    "sweep of nothing": (CONFIG, "--sweep|try --sweep hardware.", estimate("--sweep", "")),
    "generation beside an anchor": (
        CONFIG,
        "--generate and --anchor",
        estimate("--generate", "8+8", "--anchor", "nowhere"),
    ),
    "generation beside compile": (
        CONFIG,
        "--generate and --compile",
        estimate("--generate", "8+8", "--compile"),
    ),
    "batch of no generation": (CONFIG, "--batch|--generate 512+128", estimate("--batch", "3")),
    "top of the rules": (
        CONFIG,
        "--rules and --top",
        ["plan", "tiny.toml", "--hardware", "h100", "--devices", "8", "--rules", "--top", "3"],
    ),
    # pipeline schedules
    "schedule of no size": (
        CONFIG,
        "1f1b needs --stages and --microbatches",
        ["schedule", "--stages", "4"],
    ),
    "unknown schedule": (CONFIG, "asked --kind 2f2b|1f1b|.csv file", schedule("--kind", "2f2b")),
    "no such schedule file": (
        CONFIG,
        "cannot be read|none.csv",
        ["schedule", "--kind", "none.csv"],
    ),
    "schedule that breaks a rule": (
        CONFIG,
        "two_backwards.csv|tick 0, stage 0",
        schedule("--kind", "two_backwards.csv"),
    ),
    "schedule file of another size": (
        CONFIG,
        "two_stages.csv has its own sizes|asked --stages 4|found stages 2",
        schedule("--kind", "two_stages.csv"),
    ),
    "schedule of no stages": (
        CONFIG,
        "--stages: 0 is not a whole number",
        schedule("--stages", "0"),
    ),
    "schedule too large": (
        CONFIG,
        "too large|about 6,000,000,032 ticks x stages",
        schedule("--microbatches", "1500000000"),
    ),
    "chunks of a kind without": (
        CONFIG,
        "one chunk per stage|try 'interleaved'",
        schedule("--chunks", "2"),
    ),
    "microbatches over stages": (
        CONFIG,
        "microbatches=6 with stages=4|try microbatches=4 or microbatches=8",
        schedule("--kind", "interleaved", "--chunks", "2"),
    ),
    "negative time": (CONFIG, "--hop: -1 is not a time|from 0", schedule("--hop", "-1")),
    "time that is not a number": (
        CONFIG,
        "--forward: nan is not a time",
        schedule("--forward", "nan"),
    ),
    "time without end": (CONFIG, "--backward: inf is not a time", schedule("--backward", "inf")),
    "time in words": (CONFIG, "--weight: long is not a time", schedule("--weight", "long")),
    "no time at all": (
        CONFIG,
        "must be above 0|found 0 for all",
        schedule("--forward", "0", "--backward", "0", "--weight", "0"),
    ),
    "picture into a file": (
        STORAGE,
        "cannot write file/x.svg: Not a directory",
        schedule("--svg", "file/x.svg"),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_mistake_costs_one_line_that_says_what_and_the_documented_exit_code(capsys, name):
    code, words, arguments = TABLE[name]
    line = refusal(capsys, code, arguments)
    assert [word for word in words.split("|") if word not in line] == [], line
    assert not list(Path().glob("unused*/checkpoints/*")), (
        "refused, but trained and saved all the same"
    )


REFUSED_BEFORE_JAX = (
    "unknown key",
    "missing config",
    "negative rate",
    "unknown command",
    "missing argument",
    "no devices",
    "--processes alone",
    "two axes to fill",
    "prepare nothing",
    "negative time",
    "schedule file of another size",
)


COMMAND = "import sys; from spmdtrain.cli import main; sys.exit(main(sys.argv[1:]))"


def from_anew(program: str, *arguments: str) -> tuple[subprocess.CompletedProcess, float]:
    """Python code as a program of its own, and the processor seconds it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, sum(
        getattr(after, kind) - getattr(before, kind) for kind in ("ru_utime", "ru_stime")
    )


@pytest.mark.seconds
@pytest.mark.parametrize("name", REFUSED_BEFORE_JAX)
def test_what_needs_no_device_is_refused_before_jax_is_imported_and_within_a_second(name):
    code, _, arguments = TABLE[name]
    without_jax = "import sys; sys.modules['jax'] = None"  # an import of it fails, with a traceback
    done, seconds = from_anew(f"{without_jax}; {COMMAND}", *arguments)
    assert done.returncode == code, done.stderr
    checked(done.stderr)
    assert seconds < 1


@pytest.mark.parametrize(
    "name", ["missing text", "sample no run", "mesh too large", "resume a cut step"]
)
@pytest.mark.seconds
def test_a_program_of_its_own_gives_the_same_line_soon_after_its_libraries_are_imported(name):
    """Threads of XLA and Orbax write where this process cannot look: only a program's own stderr
    shows all of it.

    Its processor seconds are held against those of the imports alone, measured in turn: a busy
    machine slows both. Of a few pairs the quickest of each counts.
    """
    code, words, arguments = TABLE[name]
    refusals, imports = [], []
    for _ in range(4):
        done, seconds = from_anew(COMMAND, *arguments)
        assert done.returncode == code, done.stderr
        line = checked(done.stderr)
        assert [word for word in words.split("|") if word not in line] == [], line
        refusals.append(seconds)
        alone, seconds = from_anew("import jax, flax.nnx, optax, orbax.checkpoint")
        assert alone.returncode == 0, alone.stderr
        imports.append(seconds)
        if min(refusals) < 1.5 * min(imports):
            break
    assert min(refusals) < 1.5 * min(imports)
