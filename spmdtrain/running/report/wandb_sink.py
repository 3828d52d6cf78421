"""The sink of Weights & Biases."""

import json
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.config.load import resolved
from spmdtrain.config.run_files import METRICS
from spmdtrain.config.schema import RunConfig
from spmdtrain.running.report.json_lines import writing
from spmdtrain.running.report.sinks import Figures

MOST_KEPT = 200  # characters of a file that is kept for W&B


class WandbSink:
    """A run of Weights & Biases, its files in RUN/wandb. Needs wandb, the extra `wandb`.

    The W&B run has the name of the run's directory, and its id is stored there, so that a resumed
    run continues it. The project is WANDB_PROJECT, or `spmdtrain`. Without a key, or with
    WANDB_MODE=offline, the run is written for a later upload by `wandb sync`: the user is never
    prompted.

    W&B drops a step that is not larger than the last one, so figures are held back until a
    checkpoint makes them final; those of the newest step are in the run's summary, e.g. as
    latest/loss. If W&B already has steps that are taken again, as after a run that diverged, a new
    W&B run starts with the steps that count.
    """

    def __init__(self, directory: Path, config: RunConfig, step: int):
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "log.sinks names 'wandb', but wandb is not installed",
                fix="pip install 'spmdtrain[wandb]'",
            ) from None
        self._wandb = wandb
        self._held: dict[int, dict[str, Any]] = {}  # figures by step, in order
        self._holds_back = config.checkpoint.every != 0
        self._sent = directory / "wandb" / "last_step"
        is_ahead = int(_kept(self._sent, "[0-9]{1,18}") or 0) > step
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "spmdtrain"),
            name=directory.resolve().name,
            id=_wandb_id(directory / "wandb" / "id", is_new=is_ahead),
            resume="allow",
            dir=directory,
            config=resolved(config)["config"],
            mode=_wandb_mode(),
            settings=wandb.Settings(silent=True),
        )
        if is_ahead:
            self._held = _written(directory / METRICS)
            self._send(step)

    def metrics(self, step: int, figures: Figures) -> None:
        self._forget(step)
        known = {name: value for name, value in figures.items() if value is not None}
        held = self._held.setdefault(step, {})
        held |= {**known, "_timestamp": time.time()}
        latest = {"step": step, **known}
        self._run.summary.update({f"latest/{name}": value for name, value in latest.items()})
        if not self._holds_back:
            self._send(step)

    def event(self, event: str, step: int, values: Figures) -> None:
        """Keeps the step of the newest event of each kind in the run's summary."""
        if event == "saved":
            self._send(step)
        elif event == "rolled_back":
            self._forget(values["to_step"])
        self._run.summary[f"event/{event}"] = step

    def close(self) -> None:
        if self._held:
            self._send(max(self._held))
        self._run.finish()
        # Its service writes the last records a moment later. Waiting for it ends all other runs of
        # this process, too.
        if self._wandb.run is None:
            self._wandb.teardown()

    def _forget(self, last: int) -> None:
        """Discards the held figures of the steps after `last`, which are taken again."""
        while self._held and next(reversed(self._held)) > last:
            self._held.popitem()

    def _send(self, last: int) -> None:
        """Sends the figures of the steps up to `last`."""
        final = [step for step in self._held if step <= last]
        for step in final:
            self._run.log(self._held.pop(step), step=step)
        if final:
            with writing(self._sent):
                self._sent.write_text(str(final[-1]), encoding="utf-8")


def _written(path: Path) -> dict[int, dict[str, Any]]:
    """Returns the figures of metrics.jsonl by step, in order; the last ones if a step repeats."""
    if not path.exists():
        return {}
    by_step: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        values.pop("time", None)  # older versions wrote none
        figures = by_step.setdefault(values.pop("step"), {})
        figures |= {name: value for name, value in values.items() if value is not None}
    return dict(sorted(by_step.items()))


def _wandb_id(path: Path, is_new: bool) -> str:
    """Returns the id of the run, stored in a file from its first start on."""
    if not is_new and (known := _kept(path, "[A-Za-z0-9_-]{1,64}")):
        return known
    fresh = secrets.token_hex(4)
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        path.write_text(fresh, encoding="utf-8")
    return fresh


def _kept(path: Path, pattern: str) -> str:
    """Returns what an earlier start wrote into a file; "" if nothing, or if a kill interrupted it.

    Raises CheckpointError if it does not match the pattern.
    """
    if not path.exists():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(MOST_KEPT).strip()
    if text and not re.fullmatch(pattern, text):
        raise CheckpointError(f"{path} has been changed", found=f"{text!r:.60}", fix="removing it")
    return text


def _wandb_mode() -> Any:
    """Returns WANDB_MODE as it is, since wandb checks it; offline if there is no key."""
    return os.environ.get("WANDB_MODE") or (None if _has_wandb_key() else "offline")


def _has_wandb_key() -> bool:
    netrc = Path(os.path.expanduser("~/.netrc"))  # without a home, "~" is a folder like any other
    in_netrc = os.access(netrc, os.R_OK) and "api.wandb.ai" in netrc.read_text(
        encoding="utf-8", errors="replace"
    )
    return in_netrc or "WANDB_API_KEY" in os.environ
