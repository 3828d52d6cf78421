"""README and docs are true: their commands run, their pictures are what commands draw, their files
exist.

A `bash` or `python` block runs, unless a comment just before it says why not. The comments are

    <!-- needs GPUs --> <!-- not run: a reason --> <!-- test: until step 2 -->    to spare time:
    UNTIL is appended to each `spmdtrain` command of the block <!-- test: exit code 4 -->     that
    of the block's last command

A `text` block right behind a block that runs is what its last command prints.
"""

import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import named
import pytest

from spmdtrain.cli import main
from spmdtrain.config import RunConfig
from spmdtrain.config.errors import DONE, PREEMPTED, REFUSED, UNEQUAL, UserError

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted(DOCS.glob("*.md")),
]
UNTIL = "--set train.steps={} --set optimizer.warmup=0 --set eval.every=0"
FIRST_RUN = "spmdtrain train configs/quickstart.toml --simulate-devices 8"

FENCE = re.compile(
    r"(?:^<!-- *(?P<comment>[^\n]*?) *-->\n)?^```(?P<language>[^\n]*)\n(?P<body>.*?)^```$",
    re.M | re.S,
)
COMMENT = re.compile(r"needs GPUs|not run: .+|test: until step \d+|test: exit code \d+")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: `output` is the text block right behind it, if there is one."""

    page: Path
    line: int
    language: str
    comment: str
    body: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "python") and not self.comment.startswith(
            ("needs", "not run")
        )

    def after(self, words: str) -> str:
        """What the comment says behind `words`; empty where it says something else."""
        return self.comment.removeprefix(words) if self.comment.startswith(words) else ""


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    matches = list(FENCE.finditer(text))
    found = []
    for match, following in zip(matches, [*matches[1:], None], strict=False):
        directly = following is not None and not text[match.end() : following.start()].strip()
        output = following["body"] if directly and following["language"] == "text" else None
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(
            Block(page, line, match["language"], match["comment"] or "", match["body"], output)
        )
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def hook(name: str) -> ModuleType:
    """One of the scripts that write pages and pictures for `make pages`."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "made" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES_MADE = hook("pages")


# --- commands -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder as a reader has it: the checkout's configs and examples, some books, and the first
    run, as a reader compiles it: what the flags of the tests compile takes longer for 300 steps.
    """
    folder = tmp_path_factory.mktemp("docs")
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("one", "two"):
        book = folder / "books" / f"{name}.txt"
        book.parent.mkdir(exist_ok=True)
        book.write_text(f"Chapter {name}. The quick brown fox jumps over the lazy dog.\n" * 100)
    command = [sys.executable, "-m", "spmdtrain.cli", *shlex.split(FIRST_RUN)[1:]]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return folder


def run_command(command: str) -> tuple[int, str]:
    """(exit code, what it printed). `spmdtrain` runs in this process, which has its eight devices
    already.
    """
    words = shlex.split(command, comments=True)
    if words[0] == "spmdtrain" and not set(words) & {"|", ">", "&", "&&", ";"}:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = main(words[1:])
        return code, printed.getvalue()
    if words[0] == "spmdtrain":
        assert words[-2] == ">", f"{command}: only `> FILE` is known here"
        code, printed = run_command(shlex.join(words[:-2]))
        Path(words[-1]).write_text(printed)
        return code, ""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def run_bash(block: Block) -> None:
    commands = [line for line in block.body.replace("\\\n", " ").splitlines() if line.strip()]
    last_step = block.after("test: until step ")
    added = UNTIL.format(last_step) if last_step else ""
    printed = ""
    for number, command in enumerate(commands, 1):
        own = command.startswith("spmdtrain")
        code, printed = run_command(f"{command} {added}" if own else command)
        expected = int(block.after("test: exit code ") or 0) if number == len(commands) else 0
        assert code == expected, f"{block}: {command} ended with {code}:\n{printed}"
    if block.output is not None:
        assert printed.strip() == block.output.strip(), f"{block} prints something else"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.runs for b in blocks_of(page))], ids=lambda p: p.stem
)
def test_the_blocks_of_a_page_run(page, workplace, monkeypatch):
    """In their order; Python blocks of a page share their names, as the cells of a notebook do."""
    monkeypatch.chdir(workplace)
    # A drawing fits itself into the terminal that the tests run in.
    monkeypatch.setenv("COLUMNS", "200")
    names = {"__name__": "__main__"}
    for block in blocks_of(page):
        if not block.runs:
            continue
        if block.language == "bash":
            run_bash(block)
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block.body, str(block), "exec"), names)


def test_the_first_run_learns_what_the_readme_says(workplace):
    """From the loss of a guess among 256 bytes to well below, in 300 steps."""
    lines = map(json.loads, (workplace / "runs/quickstart/metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line][:300]
    assert len(losses) == 300
    assert losses[0] == pytest.approx(5.41, abs=0.1)
    # It learns the source of Python's own library, which is another text in each version.
    measured = {(3, 11): 2.19, (3, 12): 2.39}
    reached = sum(losses[-20:]) / 20
    version = sys.version_info[:2]
    if version in measured:
        assert reached == pytest.approx(measured[version], abs=0.15)
    else:
        assert reached < 3


def test_readme_and_first_page_show_the_first_run():
    for page in (ROOT / "README.md", DOCS / "first_run.md"):
        assert any(FIRST_RUN in block.body.splitlines() for block in blocks_of(page) if block.runs)


def test_every_block_is_of_a_kind_that_is_checked_and_every_comment_is_known():
    for block in BLOCKS:
        titled = PAGES_MADE.TITLED.match(f"```{block.language}\n{block.body}```")
        assert block.language in ("bash", "python", "toml", "text") or titled, str(block)
        assert not block.comment or COMMENT.fullmatch(block.comment), f"{block}: {block.comment}"
        if block.language == "toml":
            tomllib.loads(block.body)


def test_what_pages_take_from_elsewhere_is_as_it_is_there():
    """If not: make pages."""
    for path, text in PAGES_MADE.texts():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)}: make pages"


def test_examples_in_pages_are_examples_that_tests_run():
    for page in PAGES:
        for match in PAGES_MADE.TITLED.finditer(page.read_text()):
            assert match["path"].startswith("examples/"), f"{page.name}: {match['path']}"


def test_every_page_can_be_read_in_a_checkout():
    """Nothing is left for a build to fill in: no included text, no picture that is not there."""
    for page in PAGES:
        text = page.read_text()
        assert "--8<--" not in text, page.name
        assert not [wrong for wrong in named.links(text, page.parent)], page.name
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in re.findall(r": (\w+\.md)$", nav, re.M):
        assert (DOCS / page).is_file(), page


@pytest.mark.parametrize(
    ("text", "runs", "output"),
    [
        ("```bash\nls\n```\n", True, None),
        ("<!-- needs GPUs -->\n```bash\nls\n```\n", False, None),
        ("<!-- needs GPUs -->\n\n```bash\nls\n```\n", True, None),  # not just before it
        ("```bash\nls\n```\n\n```text\na\n```\n", True, "a\n"),
        ("```bash\nls\n```\n\nbut\n\n```text\na\n```\n", True, None),
    ],
)
def test_a_block_is_left_out_by_a_comment_just_before_it_only(tmp_path, text, runs, output):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert (blocks_of(page)[0].runs, blocks_of(page)[0].output) == (runs, output)


@pytest.mark.parametrize(
    "body", ["false\n", "true\nfalse\n", "false\ntrue\n", "spmdtrain show missing.toml\n"]
)
def test_a_command_that_fails_is_found(body, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="ended with"):
        run_bash(Block(Path("page.md"), 1, "bash", "", body, None))


# --- words ----------------------------------------------------------------------------------------


def test_the_readme_is_short():
    shown = re.sub("<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.S)
    assert len(shown.split()) < 1000


TEXTS = [
    *PAGES,
    ROOT / "benchmarks" / "planner" / "README.md",
    *sorted((ROOT / "configs").glob("*.toml")),
    *sorted((ROOT / "examples").rglob("*.toml")),
    *sorted((ROOT / "examples").rglob("*.py")),
]


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_text_names_is_there(page):
    """Files, headings, commands with their flags, settings, make targets, Python names."""
    beside = page.parent if page.suffix == ".md" else ROOT
    assert named.wrong_in(page.read_text(encoding="utf-8"), beside) == []


WRONG = {
    "see `docs/nothing.md`": "no such file",
    "see `nothing.py`": "no such file",
    "see spmdtrain/running/nothing.py": "no such file",
    "[x](first_run.md#nothing)": "no such heading",
    "[x](nothing.md)": "no such file",
    "![x](pictures/nothing.svg)": "no such file",
    'README, "Your own text"': "no such heading",
    "`spmdtrain trian`": "no command trian",
    "`spmdtrain train c.toml --stpes 3`": "has no --stpes",
    "`spmdtrain data prepare FILE`": "--out",
    "spmdtrain launch train c.toml --trian": "has no --trian",
    "try --simulated-devices": "no command has it",
    "`--set train.stpes=3`": "no such setting",
    "set `optimizer.nesterov` first": "no such setting",
    "`make nothing`": "no such target",
    "`st.nothing`": "no such name",
    "`st.load.x.y`": "no such name",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_name_of_nothing_is_found(text):
    assert any(WRONG[text] in wrong for wrong in named.wrong_in(text, DOCS)), text


RIGHT = [
    "`docs/first_run.md`, `toml_file.py`, [x](first_run.md#one-command), `make test`, `st.load`",
    "`spmdtrain data prepare FILE --out NAME`, or `spmdtrain plan`",
    "`spmdtrain schedule --kind 1f1b --stages 4 --microbatches 6 --svg pipeline.svg`.",
    "`--set mesh.data=8 --set optimizer.beta1=0.9`, `rules.parameters.embed`, `model.extra.width`",
    "RUN/config.json, `metrics.jsonl`, `train.py:Model`",
]


@pytest.mark.parametrize("text", RIGHT)
def test_a_name_of_something_is_let_be(text):
    assert named.wrong_in(text, DOCS) == []


def constants_of(path: str, name: str):
    """How many values a list or tuple of a module has, without importing it."""
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return len(node.value.elts)
    raise AssertionError(f"{path} has no {name}")


COUNTS = {  # words -> how many there are; "#" is the number
    "README.md": {
        "on # layouts against one device": ("tests/train/test_layouts.py", "CORE", "OTHERS"),
        "# flagship layouts": ("benchmarks/fleet.py", "LAYOUTS"),
    },
    "docs/how_it_works.md": {
        "one device: # layouts": ("tests/train/test_layouts.py", "CORE", "OTHERS"),
    },
    "docs/first_run.md": {
        "project trains # layouts": ("tests/train/test_layouts.py", "CORE", "OTHERS"),
    },
    "docs/fleet.md": {"of its # layouts": ("benchmarks/fleet.py", "LAYOUTS")},
}


@pytest.mark.parametrize("page", COUNTS)
def test_counts_are_those_of_the_code(page):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    for words, (path, *names) in COUNTS[page].items():
        found = re.search(re.escape(words).replace(r"\#", r"(\d+)"), text)
        assert found, f"{page}: {words}"
        there = sum(constants_of(path, name) for name in names)
        assert int(found[1]) == there, f"{page}: {words}"


def test_every_list_of_rooms_has_all_of_them():
    """A paragraph or table that names most folders of the package names each."""
    rooms = {path.parent.name for path in (ROOT / "spmdtrain").glob("*/__init__.py")}
    lists = 0
    for path in (*PAGES, ROOT / "spmdtrain" / "__init__.py"):
        for paragraph in re.split(r"\n *\n", path.read_text(encoding="utf-8")):
            there = set(re.findall(r"`(?:spmdtrain/)?(\w+)/?`", paragraph)) & rooms
            if len(there) > len(rooms) - 4:
                assert there == rooms, f"{path.name} lacks {rooms - there}"
                lists += 1
    assert lists >= 3


def test_the_readme_names_every_optimizer():
    row = re.search(r"^\| Optimizers \|(.*)\|$", (ROOT / "README.md").read_text(), re.M)[1]
    said = re.sub(r"[^a-z]", "", row.lower())
    for kind in hook("settings_page").classes_of(RunConfig.model_fields["optimizer"].annotation):
        assert kind.model_fields["name"].default.replace("_", "") in said


def test_every_exit_code_is_explained():
    rows = re.findall(r"^\| ([\d, ]+) \|", (DOCS / "exit_codes.md").read_text(), re.M)
    explained = {int(code) for row in rows for code in row.split(",")}
    ours = {kind.exit_code for kind in UserError.__subclasses__()}
    of_signals = {128 + number for number in (1, 2, 10, 12, 13, 15)}
    assert explained == ours | {DONE, PREEMPTED, REFUSED, UNEQUAL} | of_signals


def test_the_glossary_has_each_word_once():
    text = (DOCS / "glossary.md").read_text()
    rows = re.findall(r"^\| (?!word )(.+?) \|", text, re.M)
    words = [word for names in rows for word in names.split(", ")]
    assert len(rows) >= 45 and len(set(words)) == len(words)


def test_the_guide_for_agents_is_short():
    assert 20 <= len((ROOT / "AGENTS.md").read_text().splitlines()) <= 60


def test_the_page_of_settings_has_every_setting():
    settings = hook("settings_page")
    page = settings.page()
    for section, field in RunConfig.model_fields.items():
        text = page.partition(f"## `[{section}]`\n")[2].partition("\n## ")[0]
        for each in settings.classes_of(field.annotation):
            for name in each.model_fields:
                row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
                assert row.split(" | ")[1] != "value", (
                    f"{section}.{name} is of a kind the page cannot name"
                )


# --- pictures -------------------------------------------------------------------------------------

PICTURES = hook("pictures")


def test_no_other_picture_is_committed():
    made = {*PICTURES.COMMITTED, PICTURES.LOSS, hook("walk").PICTURE, *hook("figures").FIGURES}
    assert {path.name for path in (DOCS / "pictures").iterdir()} == made


def test_the_committed_curve_is_of_all_steps_and_falls():
    points = re.search(r'points="([^"]*)"', (DOCS / "pictures" / PICTURES.LOSS).read_text())[1]
    y = [float(point.split(",")[1]) for point in points.split()]
    assert len(y) == PICTURES.LOSS_STEPS
    assert sum(y[-10:]) > sum(y[:10])  # downwards, y grows


def test_a_loss_curve_falls_where_losses_fall():
    curve = PICTURES.loss_curve([5.5, 4.0, 2.5])
    points = re.search(r'points="([^"]*)"', curve)[1].split()
    x, y = zip(*(map(float, point.split(",")) for point in points), strict=True)
    assert sorted(x) == list(x) and sorted(y) == list(y) and len(x) == 3  # downwards, y grows


def test_the_walk_names_files_that_exist_and_that_the_page_explains():
    page = (DOCS / "how_it_works.md").read_text()
    for _, file, _ in hook("walk").STATIONS:
        assert (ROOT / file).is_file()
        assert file in page
