"""Writes what the pages of `docs/` take from elsewhere, so that they can be read in a checkout.

That is the text of each example under its title, the page of settings, the page of contributing,
the chapters of the first page in the site's navigation and in `llms.txt`, and the pictures. `make
pages` runs it; `tests/test_docs.py` holds each page against its source.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(Path(__file__).parent))

import chapters  # noqa: E402  the folder is no package
import pictures  # noqa: E402
import settings_page  # noqa: E402
import walk  # noqa: E402

# A block whose title is a file of the examples has the text of that file.
TITLED = re.compile(
    r'^(?P<fence>```\{\.(?:python|toml)[^\n]*title="(?P<path>[^"\n]+)"[^\n]*\}\n)(?P<body>.*?)^```$',
    re.M | re.S,
)


def with_examples(text: str) -> str:
    """The text of a page with the files of the examples as they are now."""

    def with_file(match: re.Match) -> str:
        return f"{match['fence']}{(ROOT / match['path']).read_text(encoding='utf-8')}```"

    return TITLED.sub(with_file, text)


def texts() -> Iterator[tuple[Path, str]]:
    """Each page or picture that is written, except the curve of a run, with its text."""
    import figures  # imports jax

    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if TITLED.search(text):
            yield page, with_examples(text)
    yield DOCS / settings_page.PAGE, settings_page.page()
    for path, written in {
        DOCS / "llms.txt": chapters.with_list,
        ROOT / "mkdocs.yml": chapters.with_navigation,
    }.items():
        yield path, written(path.read_text(encoding="utf-8"))
    yield DOCS / "contributing.md", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name, command in pictures.COMMITTED.items():
        yield DOCS / "pictures" / name, pictures.drawn(command)
    for name, figure in figures.FIGURES.items():
        yield DOCS / "pictures" / name, figure()
    yield DOCS / "pictures" / walk.PICTURE, walk.picture()


def main() -> None:
    for path, text in texts():
        path.write_text(text, encoding="utf-8")
    curve = pictures.loss_curve(pictures.losses())
    (DOCS / "pictures" / pictures.LOSS).write_text(curve, encoding="utf-8")


if __name__ == "__main__":
    main()
