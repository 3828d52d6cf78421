"""Code in a table of a page does what it says when it is copied from the site.

The site shows code as it stands between backticks, so a backslash before a bar is copied with it.
"""

import argparse
import html
import re
import shlex
from pathlib import Path

import pytest

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.cli.parser import make_parser
from spmdtrain.config import ConfigError
from spmdtrain.data.token_files.tokens import open_tokens

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"``(.+?)``|`([^`]+)`|<code>(.+?)</code>")
PLACE = re.compile(r"(?<![\w-])[A-Z][A-Z_]*(?![\w-])")  # of something that a reader fills in
QUICKSTART = str(ROOT / "configs/quickstart.toml")


def codes(page: Path) -> list[str]:
    """The code in the tables of a page, as a reader copies it from the site."""
    found = []
    for line in re.sub("^```.*?^```", "", page.read_text(), flags=re.M | re.S).splitlines():
        if line.startswith("|"):
            spans = CODE.finditer(line)
            found += [html.unescape(each[3]) if each[3] else each[1] or each[2] for each in spans]
    return found


def parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parsers of all commands."""
    subs = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    inner = [each for sub in subs for command in sub.choices.values() for each in parsers(command)]
    return inner or [parser]


PARSERS = parsers(make_parser())
CODES = sorted({code for page in PAGES for code in codes(page) if "..." not in code})


def parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace | None:
    """What a command makes of words, with what else it needs; None if it refuses them."""
    needed = []
    for action in parser._actions:
        if action.required and not any(word in action.option_strings for word in words):
            value = (action.choices or ["1"])[0]
            needed += [*action.option_strings[-1:], value] if action.nargs != 0 else []
    try:
        return parser.parse_args([*needed, *words])
    except ConfigError:
        return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_in_a_table_is_copied_without_a_backslash(page):
    assert [code for code in codes(page) if r"\|" in code] == []


def test_code_is_found_as_the_site_shows_it():
    markdown = pytest.importorskip("markdown")
    for page in PAGES:
        text = re.sub("^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        cells = re.findall(
            "<t[dh].*?</t[dh]>", markdown.markdown(text, extensions=["tables"]), re.S
        )
        shown = [code for cell in cells for code in re.findall("<code>(.*?)</code>", cell, re.S)]
        assert set(map(html.unescape, shown)) <= set(codes(page)), page.name


@pytest.mark.parametrize("code", [each for each in CODES if each.startswith("--")])
def test_options_in_a_table_are_those_of_a_command(code):
    words = shlex.split(PLACE.sub("1", code))
    taken = [parsed(parser, words) for parser in PARSERS]
    taken = [each for each in taken if each is not None]
    assert taken
    for setting in getattr(taken[0], "set", ()):
        st.load(QUICKSTART, [setting])


@pytest.mark.parametrize("code", [each for each in CODES if each.startswith("spmdtrain ")])
def test_a_command_in_a_table_is_one(code):
    words = shlex.split(PLACE.sub("1", code.partition("|")[0]))[1:]
    names = {name for parser in PARSERS for name in [parser.prog.removeprefix("spmdtrain ")]}
    assert any(" ".join(words).startswith(name) for name in names)
    if len(words) > 2:
        make_parser().parse_args(words)


def test_the_separator_of_the_page_separates(tmp_path, monkeypatch, capsys):
    """Pasted with backslashes it made one document of twenty, and nothing was said."""
    (code,) = (code for code in codes(ROOT / "docs/own_data.md") if "--split-on" in code)
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("<|endoftext|>".join(f"text {at}" for at in range(20)))
    command = ["data", "prepare", "a.txt", "--out"]
    assert main([*command, "copied", *shlex.split(code)]) == 0
    assert len(open_tokens("copied").document_starts) == 20
    assert "--split-on" not in capsys.readouterr().out
    assert main([*command, "escaped", *shlex.split(code.replace("|", r"\|"))]) == 0
    said = r"--split-on '<\\|endoftext\\|>' is nowhere in 1 text file, which is one document"
    assert said in capsys.readouterr().out
    Path("a.jsonl").write_text('{"text": "one"}\n')
    assert main(["data", "prepare", "a.jsonl", "--out", "rows", "--split-on", "x"]) == 0
    assert "--split-on 'x' is for text files, and none of these is" in capsys.readouterr().out
