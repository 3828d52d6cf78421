"""Renders a comparison: tables for the terminal and in Markdown, and values for programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spmdtrain.lab.strategies.predicted import PredictedStrategy
from spmdtrain.lab.strategies.trained import TrainedStrategy
from spmdtrain.parallel.mesh import mesh_in_words
from spmdtrain.planner.offers.offer_tables import offers_values
from spmdtrain.running.report.json_lines import numbers

TRAINED = (
    "strategy",
    "mesh",
    "step",
    "vs first",
    "arguments",
    "temp",
    "bytes sent",
    "loss",
    "loss diff",
    "equal",
)
PREDICTED = ("strategy", "mesh", "step", "tokens/s", "mfu", "memory", "bytes sent", "days")


@dataclass(frozen=True)
class StrategyTable:
    """A titled table: rows (the first is the heading), and strategies left out with the reason."""

    title: str
    rows: Sequence[tuple[str, ...]]
    refused: Sequence[tuple[str, str]] = ()


def table_trained(strategies: Sequence[TrainedStrategy], title: str) -> StrategyTable:
    """Returns the table of the strategies that ran on this machine."""
    running = [strategy for strategy in strategies if not strategy.refused]
    rows = [TRAINED, *(_cells_trained(strategy, running[0]) for strategy in running)]
    refused = [(strategy.name, strategy.refused) for strategy in strategies if strategy.refused]
    return StrategyTable(title, rows, refused)


def _cells_trained(strategy: TrainedStrategy, first: TrainedStrategy) -> tuple[str, ...]:
    assert strategy.memory is not None, "it has run"
    loss = strategy.figures[-1].get("loss")
    sent = "unknown" if strategy.sent is None else _size(sum(strategy.sent.values()))
    return (
        strategy.name,
        mesh_in_words(strategy.mesh),
        f"{1e3 * strategy.median:.1f} ms",
        f"{strategy.median / first.median:.2f}",
        _size(strategy.memory.argument_bytes),
        _size(strategy.memory.temp_bytes),
        sent,
        "none" if loss is None else f"{loss:.5f}",
        "none" if strategy.off is None else f"{strategy.off:.1e}",
        "the first" if strategy is first else _verdict(strategy),
    )


def _verdict(strategy: TrainedStrategy) -> str:
    return "within rounding" if strategy.is_same else f"no: {strategy.limits:.3g} x rounding error"


def _size(count: float) -> str:
    """Returns bytes as text with a unit."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def table_predicted(predictions: Sequence[PredictedStrategy], title: str) -> StrategyTable:
    """Returns the table of the predictions."""
    rows: list[tuple[str, ...]] = [PREDICTED]
    refused = []
    for prediction in predictions:
        best = prediction.offer.best
        if best is None:
            refused.append((prediction.name, prediction.offer.refusal))
            continue
        time = best.estimate.time
        mark = "" if best.fits else ", does not fit"
        tokens = time.tokens_per_second_per_device * prediction.offer.devices
        rows.append(
            (
                prediction.name,
                mesh_in_words(best.workload.mesh.sizes),
                f"{best.seconds:.4g} s",
                f"{tokens:,.0f}",
                f"{time.mfu:.1%}",
                f"{_size(best.memory.total)}{mark}",
                _size(sum(prediction.sent.values())),
                f"{prediction.offer.days:.3g}",
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


def values_trained(strategy: TrainedStrategy) -> dict[str, Any]:
    """Returns the JSON object of a strategy on this machine."""
    if strategy.refused:
        return {"strategy": strategy.name, "devices": strategy.devices, "problem": strategy.refused}
    assert strategy.memory is not None, "it has run"
    values = {
        "strategy": strategy.name,
        "devices": strategy.devices,
        "mesh": strategy.mesh,
        "step_seconds": strategy.median,
        "rounds": strategy.seconds,
        "memory": asdict(strategy.memory),
        "sent_bytes": strategy.sent,
        "losses": [figures.get("loss") for figures in strategy.figures],
        "off": strategy.off,
        "limits": strategy.limits,
        "same": strategy.is_same,
    }
    return numbers(values)


def values_predicted(predictions: Sequence[PredictedStrategy]) -> list[dict[str, Any]]:
    """Returns the JSON objects of predictions: those of `plan`, with the name of the strategy."""
    values = offers_values([prediction.offer for prediction in predictions])
    objects = []
    for prediction, offer in zip(predictions, values, strict=True):
        sent = {"sent_bytes": prediction.sent} if prediction.offer.best else {}
        objects.append({"strategy": prediction.name} | offer | sent)
    return objects
