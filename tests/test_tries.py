"""What an error tells a person to try works when it is typed: names are there, commands parse."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import named
import pytest

from spmdtrain.cli import main
from spmdtrain.cli.parser import make_parser
from spmdtrain.cli.typable import make_typable
from spmdtrain.config import ConfigError, UserError

ROOT = Path(__file__).parent.parent
ERRORS = {kind.__name__ for kind in (UserError, *UserError.__subclasses__())}


def literals(node: ast.expr) -> Iterator[str]:
    """The texts that an expression may be; what is put in at run time is an X."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)
    elif isinstance(node, ast.BoolOp | ast.Dict):
        for value in node.values:
            yield from literals(value)
    elif isinstance(node, ast.BinOp):
        for left in literals(node.left):
            for right in literals(node.right) or [""]:
                yield left + right


def tries() -> Iterator[tuple[str, str]]:
    """(where, text) of everything that an error may tell somebody to try."""
    for path in sorted((ROOT / "spmdtrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            values = []
            if isinstance(node, ast.Call):
                values = [word.value for word in node.keywords if word.arg == "fix"]
            elif isinstance(node, ast.Assign):
                names = {getattr(target, "id", "") for target in node.targets}
                values = [node.value] if names & {"fix", "fixes"} else []
            for value in values:
                for text in literals(value):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


TRIES = dict.fromkeys(tries())


def wrong_with(text: str) -> list[str]:
    found = [*named.overrides(text), *named.make_targets(text), *named.settings(text)]
    if not text.startswith(("pip ", "make ", "srun ", "sbatch ", "env ")):
        found += named.flags(text)
    for command in re.findall(r"spmdtrain ([a-z].*)", text):
        found += named.command(command)
        words = named.END.split(command)[0].split()
        if len(words) <= 2 and words[0] in ("data", "tokenizer"):
            found.append(f"{text}: a command that lacks what it requires")
    return found


def test_every_try_of_an_error_names_what_is_there():
    assert len(TRIES) > 100
    wrong = {where: found for where, text in TRIES if (found := wrong_with(text))}
    assert wrong == {}


# Where people bring files of others, which they cannot know as well as their own.
OF_OTHERS = ("interop", "config/published", "running/published")


def test_every_refusal_of_a_published_file_says_what_to_try():
    silent, spoken = [], 0
    for room in OF_OTHERS:
        for path in sorted((ROOT / "spmdtrain" / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ERRORS:
                    continue
                if any(word.arg == "fix" for word in node.keywords):
                    spoken += 1
                else:
                    silent.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert silent == [] and spoken > 80


@pytest.mark.parametrize(
    "text",
    [
        "spmdtrain data prepare FILE",
        "spmdtrain data prepare",
        "spmdtrain trian CONFIG",
        "--set train.stpes=3",
        "--simulated-devices 8",
        "make nothing",
        "a lower optimizer.rate",
    ],
)
def test_a_try_that_does_not_work_is_found(text):
    assert wrong_with(text)


READING = {
    # command -> an error's `try` -> the one that is shown
    ("eval", "RUN"): {
        "--set model.vocab=9": "--set model.vocab=9 in training; a run is read with the settings",
        "--set data.tokenizer=F, or --set model.vocab=9": "--set data.tokenizer=F, or --set model.",
        "--set mesh.data=2 or --simulate-devices 4": "--set mesh.data=2 or --simulate-devices 4",
        "time = 9 (--set train.steps=9), or --set rules.activations.time= to keep it whole": (
            "--set rules.activations.time= to keep it whole"
        ),
        "the settings of it, or another --run": "the settings of it",
        "spmdtrain import DIR --set model.vocab=9": "spmdtrain import DIR --set model.vocab=9",
    },
    ("import", "D", "--out", "RUN"): {
        "waiting until it ends, or another --run": "waiting until it ends",
    },
    ("export", "RUN", "D", "--to", "hf"): {
        "--set mesh.data=2": "--set mesh.data=2 in training; a run is read",
        "--ema": "--ema",
        "the weights as they are, or training with --set optimizer.ema=0.9": "the weights as they",
    },
    ("sample", "RUN"): {"--set mesh.tensor=2": "--set mesh.tensor=2"},
    ("train", "C"): {
        "--untie": "--untie, an option of another command",
        "--set a.b=2": "--set a.b=2",
    },
    ("replay", "RUN"): {"--set train.remat=full": "--set train.remat=full"},
}


@pytest.mark.parametrize(
    ("typed", "fix", "wanted"),
    [(typed, *pair) for typed, fixes in READING.items() for pair in fixes.items()],
)
def test_an_error_proposes_what_the_command_takes(typed, fix, wanted):
    parsed = make_parser().parse_args([*typed])
    error = ConfigError("what", asked="a", found="b", fix=fix)
    make_typable(error, parsed)
    assert error.fix.startswith(wanted)
    assert error.fix.count("training") <= 1
    assert str(error) == f"what; asked a; found b; try {error.fix}"
    assert str(error) == str(ConfigError("what", asked="a", found="b", fix=error.fix))


CONFIG = '[model]\nlayers = 1\nembed = 16\nheads = 1\n[data]\ncorpus = "synthetic"\n'
# What is typed, where it ends with an error; the words of its `try` are then typed behind it, or in
# the place of what they correct.
TYPED = [
    ["schedule", "--kind", "1f1b"],
    ["schedule", "--kind", "gpipe", "--stages", "2", "--microbatches", "2", "--chunks", "2"],
    ["estimate", "c.toml", "--hardware", "h100", "--batch", "3"],
    ["show", "c.toml", "--simulate-devices", "100000"],
    ["data", "prepare", "c.toml"],
    ["show", "c.tml"],
    ["show", "c.toml", "--set", "train.steps"],
    ["plan", "c.toml", "--devices", "8"],
]


@pytest.mark.parametrize("typed", TYPED, ids=" ".join)
def test_a_try_that_is_typed_works(typed, tmp_path, monkeypatch, capsys):
    """The error that it mends is not there any more."""
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(CONFIG)
    assert main(typed) == 4
    line = capsys.readouterr().err.strip()
    fix = line.partition("; try ")[2]
    assert fix, line
    if fix.startswith("spmdtrain ") and fix.endswith("--help"):
        with pytest.raises(SystemExit) as ended:
            main(fix.split()[1:])
        assert ended.value.code == 0
        return
    if fix.startswith("--set "):
        again = [*typed[:-2], *fix.split()]
    elif fix.startswith("--"):
        flags = {word for word in fix.split() if word.startswith("--")}
        kept = [
            word
            for before, word in zip(["", *typed], typed, strict=False)
            if word not in flags and before not in flags
        ]
        again = kept + fix.split()
    elif fix.endswith(".toml"):
        again = [fix if word == "c.tml" else word for word in typed]
    else:
        return  # words, which the first test reads
    make_parser().parse_args(again)
    main(again)
    assert line not in capsys.readouterr().err
