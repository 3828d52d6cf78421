"""The chapters of the documentation, as the first page lists them.

`docs/index.md` is the one place where a page gets its chapter, its group and its line. The list for
language models (`docs/llms.txt`) and the navigation of the site (`mkdocs.yml`) are written from it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TITLES = ("Start", "Do", "Look up", "Notebook")

HEADING = re.compile(r"(?P<level>##+) (?P<title>.+)")
ENTRY = re.compile(r"- \[(?P<title>[^\]]+)\]\((?P<file>\w+\.md)\): (?P<line>.+)")
NAVIGATION = re.compile(r"^nav:\n(?: .*\n)+", re.M)


@dataclass(frozen=True)
class Page:
    """A page as the first page shows it: `line` says what it is about."""

    title: str
    file: str
    line: str


@dataclass(frozen=True)
class Chapter:
    """A chapter with its groups, in order: (title, pages). The title is empty where a chapter is
    not divided.
    """

    title: str
    groups: list[tuple[str, list[Page]]] = field(default_factory=list)

    @property
    def pages(self) -> list[Page]:
        return [page for _, pages in self.groups for page in pages]


def chapters() -> list[Chapter]:
    """Reads the chapters from the first page."""
    return list(read((DOCS / "index.md").read_text(encoding="utf-8")))


def read(text: str) -> Iterator[Chapter]:
    """Yields the chapters of a text: level 2 headings of `TITLES`, groups at level 3, entries."""
    chapter = None
    for line in text.splitlines():
        if heading := HEADING.fullmatch(line):
            if heading["level"] == "###" and chapter is not None:
                chapter.groups.append((heading["title"], []))
                continue
            if chapter is not None:
                yield chapter
            chapter = Chapter(heading["title"]) if heading["title"] in TITLES else None
        elif (entry := ENTRY.fullmatch(line)) and chapter is not None:
            if not chapter.groups:
                chapter.groups.append(("", []))
            chapter.groups[-1][1].append(Page(**entry.groupdict()))
    if chapter is not None:
        yield chapter


def with_list(text: str) -> str:
    """Returns the list for language models with its chapters as they are now."""
    introduction = text.partition("\n## ")[0].rstrip("\n")
    blocks = [introduction]
    for chapter in chapters():
        for group, pages in chapter.groups:
            title = f"{chapter.title}: {group}" if group else chapter.title
            entries = [f"- [{page.title}]({page.file}): {page.line}" for page in pages]
            blocks.append("\n".join([f"## {title}", "", *entries]))
    return "\n\n".join(blocks) + "\n"


def with_navigation(text: str) -> str:
    """Returns mkdocs.yml with the navigation of the chapters as they are now."""
    lines = ["nav:", "  - Home: index.md"]
    for chapter in chapters():
        lines.append(f"  - {chapter.title}:")
        for group, pages in chapter.groups:
            if group:
                lines.append(f"      - {group}:")
            indent = " " * (10 if group else 6)
            lines += [f'{indent}- "{page.title}": {page.file}' for page in pages]
    return NAVIGATION.sub("\n".join(lines) + "\n", text)
