"""Shows a person the progress of a run: permanent lines, and on a terminal a live one below."""

import sys
from shutil import get_terminal_size
from typing import Any

from spmdtrain.processes import closed_outputs
from spmdtrain.running.report import stages
from spmdtrain.train.evaluation import NOTHING

WIDE = 120  # columns of a terminal wide enough for a bar and the figures


class Progress:
    """The display of a run's progress. Use it as a context; call `update` after each step.

    `every`: steps between permanent lines; `quiet`: say nothing at all. The first step shown is
    assumed to be slower than the rest, so the time left is not estimated from it.
    """

    def __init__(self, total: int, done: int, every: int, *, quiet: bool = False):
        self._total = total
        self._every = every
        self._quiet = quiet
        self._seconds: float | None = None  # smoothed step time, for the time left
        self._is_first = True
        self._bar = _bar(total, done) if sys.stdout.isatty() and not quiet else None

    def __enter__(self) -> "Progress":
        stages.end()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar:
            with closed_outputs.tolerated():
                self._bar.stop()

    def say(self, text: str) -> None:
        if self._quiet:
            return
        if self._bar:
            with closed_outputs.tolerated():
                self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            tell(text)

    def update(self, step: int, figures: dict[str, Any], due: bool = False) -> None:
        """Shows the figures of `step`. `due` asks for a permanent line out of turn."""
        pace, remaining = self._pace(step, figures["step_seconds"])
        text = _line(figures)
        if self._bar:
            shown = "  ".join([*remaining, text])
            with closed_outputs.tolerated():
                self._bar.update(self._bar.task_ids[0], completed=step, figures=shown)
        if due or step % self._every == 0:
            self.say("  ".join([f"step {step}/{self._total}", text, pace, *remaining]))

    def _pace(self, step: int, seconds: float) -> tuple[str, list[str]]:
        """Returns (the time of `step`, the time left if known) in words."""
        if self._is_first:  # buffers are allocated and kernels loaded
            self._is_first = False
            return f"{seconds:.3g} s for the first step", []
        before = seconds if self._seconds is None else self._seconds
        self._seconds = 0.9 * before + 0.1 * seconds
        remaining = duration(self._seconds * (self._total - step))
        return f"{seconds:.3g} s/step", [f"eta {remaining}"]


def _line(figures: dict[str, Any]) -> str:
    """Returns the figures of a step that a person follows, without those that are unknown."""
    parts = [
        f"loss {figures['loss']:.4f}" if "loss" in figures else NOTHING,
        f"lr {figures['learning_rate']:.2e}",
        f"norm {figures['grad_norm']:.3g}",
        f"{quantity(figures['tokens_per_second'])} tokens/s",
    ]
    if figures["mfu"] is not None:
        parts.append(f"mfu {figures['mfu']:.1%}")
    if figures.get("memory_bytes") is not None:
        parts.append(f"{figures['memory_bytes'] / 1e9:.1f} GB")
    return "  ".join(parts)


def tell(text: str) -> None:
    """Prints a line. A run continues even if nobody reads its output any more."""
    with closed_outputs.tolerated(), stages.aside():
        print(text, flush=True)


def quantity(number: float) -> str:
    """Formats a number: 1234567 -> '1.23M'."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g}{letter}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Formats seconds: 3723 -> '1:02:03'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _bar(total: int, done: int):
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = [TextColumn("step"), MofNCompleteColumn(), TextColumn("{task.fields[figures]}")]
    if get_terminal_size().columns >= WIDE:
        columns.insert(2, BarColumn(bar_width=20))
    bar = RichProgress(*columns)
    bar.add_task("train", total=total, completed=done, figures="the first step")
    return bar
