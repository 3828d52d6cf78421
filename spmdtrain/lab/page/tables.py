"""Writes the tables of the page: settings with their origins, checkpoints, and the environment."""

import json
import shlex
from pathlib import Path
from typing import Any

from spmdtrain.config.run_files import DERIVED
from spmdtrain.lab.page.formats import safe, seconds, size
from spmdtrain.lab.page.read import RunRead

DEFAULT = "default"
MOST_CHECKPOINTS = 15
LONGEST_VALUE = 120


def settings(runs: list[RunRead]) -> str:
    """Returns tables of the settings that differ between runs, of chosen ones, and of all."""
    flat = [_flat(run) for run in runs]
    names = list(dict.fromkeys(name for of_run in flat for name in of_run))
    if not names:
        return ""
    differ = [
        n for n in names if len({json.dumps(of_run.get(n), sort_keys=True) for of_run in flat}) > 1
    ]
    chosen = [n for n in names if any(_is_chosen(run.origin.get(n)) for run in runs)]
    tables = ""
    if len(runs) > 1:
        nothing = "<p>Nothing: all settings are alike.</p>"
        tables += f"<h3>What differs</h3>{_table(runs, flat, differ) if differ else nothing}"
    if chosen:
        tables += f"<h3>What somebody chose</h3>{_table(runs, flat, chosen)}"
    every = _table(runs, flat, names)
    return f"{tables}<details><summary>all {len(names)} settings</summary>{every}</details>"


def _is_chosen(origin: Any) -> bool:
    """Returns True if someone set this: it is neither a default nor derived from others."""
    return origin not in (None, DEFAULT, DERIVED)


def _flat(run: RunRead) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, table in run.config.items()
        if isinstance(table, dict)
        for name, value in table.items()
    }


def _table(runs: list[RunRead], flat: list[dict[str, Any]], names: list[str]) -> str:
    def row(name: str) -> str:
        values = "".join(f"<td>{_value(of_run.get(name))}</td>" for of_run in flat)
        origin = runs[0].origin.get(name, "")
        chosen_in = "" if origin == DEFAULT else safe(origin)
        return f"<tr><th scope=row>{safe(name)}</th>{values}<td class=dim>{chosen_in}</td></tr>"

    heads = "".join(
        f'<th><i class="swatch c{at}"></i>{safe(run.name)}</th>' for at, run in enumerate(runs)
    )
    head = heads if len(runs) > 1 else "<th>value</th>"
    return (
        f"<div class=scroll><table class=settings><thead><tr><th>setting</th>{head}"
        f"<th>chosen in</th></tr></thead><tbody>{''.join(map(row, names))}</tbody></table></div>"
    )


def _value(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return safe(text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "…")


def checkpoints(run: RunRead) -> str:
    """Returns a table of the last saves: when they were complete, their cost and their loss."""
    saved = run.of("saved")
    if not saved:
        return ""
    steps, losses = run.evaluations["step"], run.evaluations["eval_loss"]
    losses_at = dict(zip(steps.tolist(), losses.tolist(), strict=True))
    begin = run.events[0]["time"]
    rows = "".join(
        f"<tr><th scope=row>{event['step']:,}</th>"
        f"<td class=num>{seconds(max(event['time'] - begin, 0.0))}</td>"
        f"<td class=num>{seconds(event.get('seconds'))}</td>"
        f"<td class=num>{size(event.get('bytes'))}</td>"
        f"<td class=num>{_loss(losses_at.get(event['step']))}</td></tr>"
        for event in saved[-MOST_CHECKPOINTS:]
    )
    more = len(saved) - MOST_CHECKPOINTS
    note = f"<p class=dim>{more:,} earlier saves are left out.</p>" if more > 0 else ""
    return (
        "<div class=scroll><table class=checkpoints><thead><tr><th>step</th>"
        "<th class=num>complete after</th><th class=num>held up the run</th>"
        "<th class=num>arrays</th>"
        f"<th class=num>held-out loss</th></tr></thead><tbody>{rows}</tbody></table></div>{note}"
    )


def _loss(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:.4f}"


def _command(argv: Any) -> str | None:
    """Returns the command line of the run, quoted for a shell; None if it was not recorded."""
    if not isinstance(argv, list) or not argv:
        return None
    first, *rest = map(str, argv)
    is_module = Path(first).parts[-2:] == ("spmdtrain", "__main__.py")
    typed = "python -m spmdtrain" if is_module else ""
    return " ".join(filter(None, (typed or shlex.quote(first), shlex.join(rest))))


def environment(run: RunRead) -> str:
    """Returns the environment of the newest attempt."""
    launches = run.of("launched")
    if not launches:
        return ""
    last = launches[-1]
    versions, devices = last.get("versions"), last.get("devices")
    facts = {
        "command": _command(last.get("argv")),
        "host": last.get("host"),
        "processes": last.get("processes"),
        "devices": (
            f"{devices.get('count')} × {devices.get('kind')}" if isinstance(devices, dict) else None
        ),
        **(versions if isinstance(versions, dict) else {}),
        "XLA_FLAGS": last.get("xla_flags") or None,
        "attempts": len(launches),
    }
    rows = "".join(
        f"<tr><th scope=row>{safe(name)}</th><td>{safe(value)}</td></tr>"
        for name, value in facts.items()
        if value is not None
    )
    return f"<div class=scroll><table class=environment><tbody>{rows}</tbody></table></div>"
