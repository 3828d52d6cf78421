"""Renders a comparison: tables for the terminal and in Markdown, and values for programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spmdtrain.lab.strategies.predicted import PredictedStrategy
from spmdtrain.lab.strategies.trained import TrainedStrategy
from spmdtrain.parallel.mesh import mesh_in_words
from spmdtrain.planner.offers.words import offers_values
from spmdtrain.running.report.json_lines import numbers

TRAINED = (
    "strategy",
    "mesh",
    "step",
    "to first",
    "arguments",
    "temp",
    "sent",
    "loss",
    "off",
    "same",
)
PREDICTED = ("strategy", "mesh", "step", "tokens/s", "mfu", "memory", "sent", "days")


@dataclass(frozen=True)
class StrategyTable:
    """A table: what it shows, in a line, its rows, the heading among them, and what has no row."""

    title: str
    rows: Sequence[tuple[str, ...]]
    refused: Sequence[tuple[str, str]] = ()


def table_trained(found: Sequence[TrainedStrategy], title: str) -> StrategyTable:
    """Returns the table of what ran here."""
    running = [each for each in found if not each.refused]
    rows = [TRAINED, *(_cells_trained(each, running[0]) for each in running)]
    return StrategyTable(title, rows, [(each.name, each.refused) for each in found if each.refused])


def _cells_trained(each: TrainedStrategy, first: TrainedStrategy) -> tuple[str, ...]:
    assert each.memory is not None, "it has run"
    loss = each.figures[-1].get("loss")
    sent = "unknown" if each.sent is None else _size(sum(each.sent.values()))
    return (
        each.name,
        mesh_in_words(each.mesh),
        f"{1e3 * each.median:.1f} ms",
        f"{each.median / first.median:.2f}",
        _size(each.memory.argument_bytes),
        _size(each.memory.temp_bytes),
        sent,
        "none" if loss is None else f"{loss:.5f}",
        "none" if each.off is None else f"{each.off:.1e}",
        "the first" if each is first else _verdict(each),
    )


def _verdict(each: TrainedStrategy) -> str:
    return "but for rounding" if each.is_same else f"NO: {each.limits:.3g} x what rounding does"


def _size(count: float) -> str:
    """Returns bytes in words."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def table_predicted(found: Sequence[PredictedStrategy], title: str) -> StrategyTable:
    """Returns the table of what is predicted."""
    rows: list[tuple[str, ...]] = [PREDICTED]
    refused = []
    for each in found:
        best = each.offer.best
        if best is None:
            refused.append((each.name, each.offer.refusal))
            continue
        time = best.estimate.time
        mark = "" if best.fits else ", does not fit"
        tokens = time.tokens_per_second_per_device * each.offer.devices
        rows.append(
            (
                each.name,
                mesh_in_words(best.workload.mesh.sizes),
                f"{best.seconds:.4g} s",
                f"{tokens:,.0f}",
                f"{time.mfu:.1%}",
                f"{_size(best.memory.total)}{mark}",
                _size(sum(each.sent.values())),
                f"{each.offer.days:.3g}",
            )
        )
    return StrategyTable(title, rows, refused)


def in_terminal(table: StrategyTable) -> str:
    """Renders a table in columns."""
    widths = [max(map(len, column)) for column in zip(*table.rows, strict=True)]
    lines = [table.title]
    if len(table.rows) > 1:
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table.rows]
    return "\n".join([*lines, *(f"{name}: {why}" for name, why in table.refused)])


def in_markdown(table: StrategyTable) -> str:
    """Renders a table as Markdown."""
    heading, *rows = table.rows
    lines = [f"{table.title}:", ""]
    if rows:
        lines += [_row(heading), "|" + "---|" * len(heading), *map(_row, rows), ""]
    return "\n".join([*lines, *(f"- {name}: {why}" for name, why in table.refused)]).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def values_trained(each: TrainedStrategy) -> dict[str, Any]:
    """Returns the JSON object of a strategy that was to run here."""
    if each.refused:
        return {"strategy": each.name, "devices": each.devices, "problem": each.refused}
    assert each.memory is not None, "it has run"
    found = {
        "strategy": each.name,
        "devices": each.devices,
        "mesh": each.mesh,
        "step_seconds": each.median,
        "rounds": each.seconds,
        "memory": asdict(each.memory),
        "sent_bytes": each.sent,
        "losses": [figures.get("loss") for figures in each.figures],
        "off": each.off,
        "limits": each.limits,
        "same": each.is_same,
    }
    return numbers(found)


def values_predicted(found: Sequence[PredictedStrategy]) -> list[dict[str, Any]]:
    """Returns the JSON objects of predictions: those of `plan`, with the strategy's name."""
    values = offers_values([each.offer for each in found])
    return [
        {"strategy": each.name} | of | ({"sent_bytes": each.sent} if each.offer.best else {})
        for each, of in zip(found, values, strict=True)
    ]
