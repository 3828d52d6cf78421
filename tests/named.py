"""What a text names: files, headings, commands, flags, settings, make targets and Python names; and
which of these are not there.

It reads pages, comments of configs, docstrings, and what errors tell a person to try.
"""

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from spmdtrain.cli.parser import make_parser
from spmdtrain.config import ConfigError, RunConfig
from spmdtrain.config.load import FROM, _alternatives

ROOT = Path(__file__).parent.parent

# Files that runs and people make, and files of other projects: named, and not in the checkout.
ELSEWHERE = re.compile(
    r"^(RUN|runs|books|checkpoints|profile|tensorboard|wandb|build|benchmarks/results|my_\w+|~|\.|/|-)"
    r"|^(train|valid|val|text|tokenizer|config|metrics|events|compiled|summary|state|meta|hardware"
    r"|cluster|pipeline|mesh|schedule|plan|x|t|a|b|run|report|messages|model|own|mine|nccl)\b"
)
# Sections that are also names of modules and variables in Python code.
ENDINGS = ("toml", "py", "md", "json", "svg")
SECTION = "|".join(RunConfig.model_fields)
SETTING = re.compile(rf"(?<![\w./\"'(-])({SECTION})\.([a-z_][a-z_0-9]*)(\.[a-z_0-9]+)?(?![\w(/])")


# A block that shows a mistake, with the line that it costs.
MISTAKE = re.compile(
    r"^<!-- test: exit code \d+ -->\n```bash\n.*?^```$(\s*^```text\n.*?^```$)?", re.M | re.S
)


def wrong_in(text: str, beside: Path = ROOT) -> list[str]:
    """What is wrong with the names of a text in Markdown, TOML, Python or plain words."""
    text = MISTAKE.sub("", text)
    found = [commands, overrides, flags, make_targets, settings, headings, python_names]
    wrong = [each for look in found for each in look(text)]
    return [*wrong, *files(text, beside=beside), *links(text, beside)]


# --- settings -------------------------------------------------------------------------------------


@cache
def fields_of(section: str) -> dict[str, object]:
    """Name of a setting -> its type, over all classes that the section may have."""
    found = {}
    for kind in _alternatives(RunConfig.model_fields[section].annotation):
        found |= {name: field.annotation for name, field in kind.model_fields.items()}
        found |= {name: None for name, each in vars(kind).items() if isinstance(each, property)}
    return found


def is_setting(key: str) -> bool:
    """True if `a.b` names a setting, `a` a section, and what is below it is free or a setting."""
    section, _, below = key.partition(".")
    if key in ("section.setting", f"model.{FROM}"):  # a placeholder, and what is no setting
        return True
    if section not in RunConfig.model_fields:
        return False
    name = below.partition(".")[0]
    return not name or name in fields_of(section) or name in ("NAME", "KEY", "*", "X")


def overrides(text: str) -> Iterator[str]:
    """`--set a.b=c`: there is such a setting."""
    for key in re.findall(r"--set[ =]['\"]?([A-Za-z_]\w*(?:[.*\w]*\.[\w*]+|(?==)))", text):
        if not key.isupper() and not is_setting(key):
            yield f"--set {key}: no such setting"


def settings(text: str, *, also: frozenset[str] = frozenset()) -> Iterator[str]:
    """`a.b` in running text, where `a` is a section: there is such a setting."""
    for match in SETTING.finditer(text):
        key = f"{match[1]}.{match[2]}"
        if (
            key not in also
            and not is_setting(key)
            and match[2] not in ("toml", "py", "md", "json", "svg")
        ):
            yield f"{key}: no such setting"


# --- commands and flags ---------------------------------------------------------------------------


@cache
def options() -> dict[str, set[str]]:
    """Words of a command ("data prepare") -> its options; "" has those of all."""
    found: dict[str, set[str]] = {}
    todo: list[tuple[str, argparse.ArgumentParser]] = [("", make_parser())]
    while todo:
        words, parser = todo.pop()
        found[words] = {*parser._option_string_actions}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += [(f"{words} {name}".strip(), each) for name, each in action.choices.items()]
    return found | {"": set().union(*found.values())}


# Options of other programs that stand in our texts.
FOREIGN_TEXT = """--user --pty --signal --gpus-per-node --gpus-per-task --ntasks-per-node --nodes
    --no-deps --times --minutes --seed --draws --only --write --export --universal --env-file --rm
    --gpus --kill-on-bad-exit --local-dir --steps --mesh"""
FOREIGN = frozenset(FOREIGN_TEXT.split())
# Where a command that stands in a sentence ends.
END = re.compile(
    r"\s+[|>&(#]|[;,)(]|\.+(?:\s|$)|:(?:\s|$)|\u2019|\s(?:or|and|of|says?|is|reads?|writes?|does|for|in|"
    r"with|from|holds?|draws?|shows?|to|on)\b"
)


def flags(text: str) -> Iterator[str]:
    """`--flag`: one of ours, where no other program is named in the line."""
    for line in text.splitlines():
        if re.search(r"\b(python|pytest|make|pip|uv|docker|sbatch|sed|mkdocs|git|ARGS)\b", line):
            continue
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", line):
            if flag not in options()[""] and flag not in FOREIGN and not flag.startswith("--xla_"):
                yield f"{flag}: no command has it"


def commands(text: str) -> Iterator[str]:
    """`spmdtrain WORD ...`: a command that there is, with what it requires and knows."""
    text = text.replace("\\\n", " ")
    for line in text.splitlines():
        if re.search(r"\bimport spmdtrain|^\s*from ", line):
            continue
        for found in re.findall(r"(?<![\w.`/-])`?(?:\.venv/bin/)?spmdtrain ([a-z][^`]*)", line):
            yield from command(found)


def command(words: str) -> Iterator[str]:
    """Parses the words behind `spmdtrain`. What stops at a comma or bracket is only a name."""
    shortened = "..." in words
    words = re.split(
        r"\s+[|>&(#]|[;)(]|,(?=\s|$)|\s(?:or|and|of|says?|is|reads?|writes?|does|for|in|with|from|holds?|draws?|shows?|to|on)\b|\.+(?:\s|$)|:(?:\s|$)|’",
        words.replace("\\|", "|"),
    )[0]
    try:
        typed = shlex.split(words)
    except ValueError:
        return
    name = [word for word in typed[:2] if re.fullmatch("[a-z]+", word)]
    if not name or name[0] not in options():
        yield f"spmdtrain {words}: no command {name[0] if name else typed[0]}"
        return
    for flag in [word.partition("=")[0] for word in typed if word.startswith("--")]:
        known = options().get(" ".join(name)) or options()[name[0]]
        if name[0] == "launch":
            known = known | options()["train"]
        if flag not in known:
            yield f"spmdtrain {words}: {name[0]} has no {flag}"
    if len(typed) == len(name) or shortened or "--help" in typed:
        return  # a name, not a command to type
    try:
        make_parser().parse_args([_meant(word) for word in typed])
    except ConfigError as error:
        yield f"spmdtrain {words}: {error.what}"


def _meant(word: str) -> str:
    """A word as one would type it in the place of a placeholder: N is a number, 512+128 stays."""
    if word in ("N", "K", "M", "P", "V", "S", "I", "TIME"):
        return "2"
    return word.replace("{", "").replace("}", "") or "x"


def make_targets(text: str) -> Iterator[str]:
    """`make x`: the Makefile has such a target."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    for target in re.findall(r"(?:`|^|, )make ([a-z][a-z-]*)", text, re.M):
        if target not in targets:
            yield f"make {target}: no such target"


# --- files and headings ---------------------------------------------------------------------------


@cache
def file_names() -> set[str]:
    kept = [path for path in ROOT.rglob("*") if not _is_left_out(path.relative_to(ROOT))]
    return {path.name for path in kept} | {str(path.relative_to(ROOT)) for path in kept}


def _is_left_out(path: Path) -> bool:
    return any(
        part.startswith((".venv", ".git", ".ruff", ".pytest", ".hyp", "build", "runs", "__pyc"))
        for part in path.parts
    )


def files(text: str, *, beside: Path = ROOT) -> Iterator[str]:
    """A path in backticks, or bare with one of our folders in front: it is there."""
    named = re.findall(r"`([\w./-]+\.(?:py|md|toml|yaml|yml|sbatch|svg|txt|sh))`", text)
    named += re.findall(
        r"(?<![\w./])((?:spmdtrain|pallas_kernels|tests|examples|configs|benchmarks|docs)/[\w./-]*\w)",
        text,
    )
    for path in dict.fromkeys(named):
        if path in file_names() or (ROOT / path).exists() or (beside / path).exists():
            continue
        if not ELSEWHERE.match(path):
            yield f"{path}: no such file"


def anchors_of(text: str) -> set[str]:
    """The anchors of the headings of a page, as mkdocs and code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[-\s]+", "-", each) for each in plain}


def links(text: str, beside: Path) -> Iterator[str]:
    """[words](page.md#heading) and ![](picture): the file is there, and has the heading."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (beside / path) if path else None
        if file is not None and not file.exists():
            yield f"{target}: no such file"
        elif anchor:
            page = file.read_text(encoding="utf-8") if file is not None else text
            if anchor not in anchors_of(page):
                yield f"{target}: no such heading"


def headings(text: str) -> Iterator[str]:
    """README, "A heading": the README has it; the same of a page of docs/."""
    for page, heading in re.findall(
        r"\b(README|[a-z_]+\.md|CONTRIBUTING)[^\n\"]{0,12}\"([^\"\n]+)\"", text
    ):
        path = ROOT / f"{page}.md" if page.isupper() else ROOT / "docs" / page
        if not path.is_file() or f"# {heading}\n" not in path.read_text(encoding="utf-8"):
            yield f'{page}, "{heading}": no such heading'


# --- Python ---------------------------------------------------------------------------------------


def python_names(text: str) -> Iterator[str]:
    """`st.x.y` and `spmdtrain.x.y`: the package has such names."""
    for dotted in dict.fromkeys(
        re.findall(r"(?<![\w.])(?:st|spmdtrain|pallas_kernels)((?:\.[A-Za-z_]\w*)+)", text)
    ):
        if not any(_resolves(package + dotted) for package in ("spmdtrain", "pallas_kernels")):
            yield f"st{dotted}: no such name"


def _resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return part in getattr(found, "__annotations__", {})
            found = getattr(found, part)
        return True
    return False
