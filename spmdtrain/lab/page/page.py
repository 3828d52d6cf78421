"""Writes the page of one run, or of several in the same charts: a self-contained HTML file."""

from functools import cache
from importlib.resources import files
from pathlib import Path

from spmdtrain.config.writing import replacing, writing
from spmdtrain.lab.page.cost.machine import ledger, memory
from spmdtrain.lab.page.cost.waterfall import waterfall
from spmdtrain.lab.page.curves import curves
from spmdtrain.lab.page.formats import number, safe
from spmdtrain.lab.page.heading import cards, held_out_loss, remarks, sentence, table, training_loss
from spmdtrain.lab.page.layout import layout
from spmdtrain.lab.page.read import RunRead
from spmdtrain.lab.page.spent import spent
from spmdtrain.lab.page.tables import checkpoints, environment, settings

MOST_RUNS = 6  # number of distinguishable colours
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write(path: Path, text: str) -> None:
    """Replaces the page at `path` at once: a browser sees the old one or the new one.

    Raises StorageError if it cannot be written.
    """
    if path.exists() and not path.is_file():  # a pipe, or the terminal
        with writing(path):
            path.write_text(text, encoding="utf-8")
        return
    with replacing(path, path.with_name(f"{path.name}.tmp")) as spare:
        spare.write_text(text, encoding="utf-8")


def page(runs: list[RunRead], reload_seconds: int = 0) -> str:
    """Returns the page. With `reload_seconds` a browser reloads it at that interval."""
    parts = [
        ("remarks", "Worth a look", _by_run(runs, _remarks)),
        ("curves", "Curves", curves(runs)),
        ("time", "Where the time went", _by_run(runs, spent)),
        ("step", "A step by parts", _by_run(runs, waterfall)),
        ("memory", "Memory of a device", _by_run(runs, memory)),
        ("network", "Communication", _by_run(runs, ledger)),
        ("layout", "Layout", _by_run(runs, layout)),
        ("settings", "Settings", settings(runs)),
        ("checkpoints", "Checkpoints", _by_run(runs, checkpoints)),
        ("environment", "Environment", _by_run(runs, environment)),
    ]
    parts = [part for part in parts if part[2]]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in parts)
    sections = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{title}</h2>'
        f"{body}</section>"
        for key, title, body in parts
    )
    names = " and ".join(run.name for run in runs)
    command = " ".join(run.directory for run in runs)
    head = sentence(runs[0]) + cards(runs[0]) if len(runs) == 1 else table(runs)
    return (
        f'<!doctype html><html lang="en"><head>{_meta(runs, reload_seconds)}'
        f"<style>{_file('page.css')}</style></head><body>"
        f'<a class="skip" href="#content">to the content</a>'
        f"<header><p class=crumb>spmdtrain report</p><h1>{safe(names)}</h1>{head}</header>"
        f'<nav aria-label="parts of the page"><div>{links}</div></nav>'
        f'<main id="content">{sections}</main><footer>Written by '
        f"<code>spmdtrain report {safe(command)}</code>. The page loads nothing: it can be mailed, "
        f"printed and kept.</footer><script>{_file('page.js')}</script></body></html>\n"
    )


def _meta(runs: list[RunRead], reload_seconds: int) -> str:
    again = f'<meta http-equiv="refresh" content="{reload_seconds}">' if reload_seconds else ""
    loss = held_out_loss(runs[0])
    loss = loss if loss == loss else training_loss(runs[0])
    return (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">{again}'
        f"<title>{safe(runs[0].name)}: loss {number(loss, 4)}</title>"
    )


def _by_run(runs: list[RunRead], part) -> str:
    """Returns a part of the page for each run, under its name if there are several."""
    bodies = [(at, run, part(run)) for at, run in enumerate(runs)]
    if len(runs) == 1:
        return bodies[0][2]
    return "".join(
        f'<h3><i class="swatch c{at}"></i>{safe(run.name)}</h3>{body}'
        for at, run, body in bodies
        if body
    )


def _remarks(run: RunRead) -> str:
    items = "".join(f"<li>{remark}</li>" for remark in remarks(run))
    return f"<ul class=remarks>{items}</ul>" if items else ""


@cache
def _file(name: str) -> str:
    return (files("spmdtrain.lab.page") / name).read_text(encoding="utf-8")
