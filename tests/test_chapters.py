"""Every page of docs/ has a place in one of four chapters, and can be found from the first page."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def made(name: str) -> ModuleType:
    """One of the scripts that write pages."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "made" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = made("chapters")
CHAPTERS = MADE.chapters()
PICTURE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<path>[^)]+)\)")


def test_the_first_page_has_the_four_chapters():
    assert [chapter.title for chapter in CHAPTERS] == ["Start", "Do", "Look up", "Notebook"]
    assert all(chapter.pages for chapter in CHAPTERS)


def test_the_first_page_lists_every_other_page_once():
    listed = [page.file for chapter in CHAPTERS for page in chapter.pages]
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md") if path.stem != "index")


def test_a_page_is_listed_by_its_own_title():
    for chapter in CHAPTERS:
        for page in chapter.pages:
            first = (DOCS / page.file).read_text(encoding="utf-8").partition("\n")[0]
            assert first == f"# {page.title}", page.file


def test_the_readme_leads_to_the_first_page_of_the_site():
    assert "](docs/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "written"),
    [("docs/llms.txt", MADE.with_list), ("mkdocs.yml", MADE.with_navigation)],
)
def test_what_is_written_from_the_chapters_is_up_to_date(path, written):
    """If not: make pages."""
    text = (ROOT / path).read_text(encoding="utf-8")
    assert written(text) == text


def test_pages_that_are_divided_are_in_groups():
    for chapter in CHAPTERS:
        assert len(chapter.pages) <= 9 or len(chapter.groups) > 2, chapter.title
        assert all(3 <= len(pages) <= 9 for _, pages in chapter.groups), chapter.title


def test_a_list_of_chapters_is_read():
    text = (
        "# First\n\n## Before\n\n- [No](no.md): line\n\n## Start\n\n- [A](a.md): one\n\n"
        "## Do\n\n### One\n\n- [B](b.md): two\n\n### Two\n\n- [C](c.md): three\n\n"
        "## After\n\n- [No](no.md): line\n"
    )
    start, do = MADE.read(text)
    assert (start.title, [(title, [p.file for p in pages]) for title, pages in start.groups]) == (
        "Start",
        [("", ["a.md"])],
    )
    assert [(title, [p.file for p in pages]) for title, pages in do.groups] == [
        ("One", ["b.md"]),
        ("Two", ["c.md"]),
    ]


def pictures_of(page: Path) -> list[tuple[str, Path]]:
    """(what it shows, in words; the file) of each picture of a page."""
    text = page.read_text(encoding="utf-8")
    return [(match["alt"], page.parent / match["path"]) for match in PICTURE.finditer(text)]


PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def test_a_third_of_the_pages_to_do_have_a_picture():
    pages = CHAPTERS[1].pages
    with_picture = [page for page in pages if pictures_of(DOCS / page.file)]
    assert len(with_picture) * 3 >= len(pages)


def test_every_picture_is_said_in_words_and_can_be_read_on_a_dark_page():
    """It has a white ground of its own, and text that is dark on it."""
    shown = set()
    for page in PAGES:
        for alt, path in pictures_of(page):
            assert len(alt.split()) >= 3, (
                f"{page.name}: {path.name} has no words for who cannot see"
            )
            shown.add(path.resolve())
            first = re.search(r"<rect ([^>]*)/>", path.read_text(encoding="utf-8"))[1]
            assert 'fill="#ffffff"' in first, path.name
            width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', path.read_text()).groups()
            assert f'width="{width}"' in first and f'height="{height}"' in first, path.name
    assert shown == {path.resolve() for path in (DOCS / "pictures").iterdir()}


def test_no_command_is_cut():
    """A line that a page shows in full; on a narrow screen the site wraps it."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S):
            long = [line for line in block.splitlines() if len(line.partition("  #")[0]) > 120]
            assert not long, (
                f"{page.name}: break {long[0][:60]!r} before an option, with a backslash"
            )


def test_the_site_wraps_commands():
    """The rule of the style sheet is about the class that the site gives to a command."""
    pytest.importorskip("mkdocs")
    import markdown
    from mkdocs.config import load_config

    site = load_config(str(ROOT / "mkdocs.yml"))
    page = markdown.markdown(
        "```bash\nls\n```",
        extensions=site["markdown_extensions"],
        extension_configs=site["mdx_configs"],
    )
    (sheet,) = site["extra_css"]
    rules = re.findall(r"([^{}]+)\{([^}]*)\}", (DOCS / sheet).read_text(encoding="utf-8"))
    (selector,) = [selector for selector, rule in rules if "white-space: pre-wrap" in rule]
    (of_commands,) = re.findall(r"\.(language-\w+) pre > code", selector)
    assert re.search(rf'<div class="[^"]*\b{of_commands}\b[^"]*"><pre>.*<code>', page), page
