"""Exports every n-th checkpoint of a run while it trains, as RUN/exports/STEP."""

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from spmdtrain.config.errors import StorageError
from spmdtrain.config.run_files import EXPORTS
from spmdtrain.processes.processes import apart
from spmdtrain.running.published.as_target import target_of
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.train.state import TrainState


class Exports:
    """The exports of every `every`-th checkpoint of the run of `reporter`.

    Process 0 reads them from the disk in a thread, so the devices never wait. `wait_for_saves`
    waits until the saves under way are complete and reported. Raises ConfigError if no published
    family computes what the run's model does.
    """

    def __init__(self, reporter: Reporter, every: int, wait_for_saves: Callable[[], None]):
        self._reporter = reporter
        self._every = every if jax.process_index() == 0 else 0
        self._wait_for_saves = wait_for_saves
        self._saved = 0
        self._newest: int | None = None  # step of the newest checkpoint, if it is not exported
        self._under_way: tuple[int, Future] | None = None
        self._thread = ThreadPoolExecutor(1, "export") if self._every else None
        if self._every:
            target_of(reporter.directory, None)

    def hook(self, event: str, step: int, figures: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Begins to export the checkpoint of `step` once it is complete on disk, if due."""
        if event != "saved" or not self._every:
            return
        self._saved += 1
        self._newest = step
        if self._saved % self._every == 0:
            self._begin(step)

    def _begin(self, step: int) -> None:
        self.wait()
        assert self._thread is not None, "it exports"
        self._newest = None
        self._under_way = step, self._thread.submit(_export, self._reporter.directory, step)

    def before_save(self, step: int, state: TrainState, on_disk: bool) -> None:  # noqa: ARG002
        """Waits for the export under way: the next save may remove the checkpoint that it reads."""
        if on_disk:
            self._wait_for_saves()
            self.wait()

    def wait(self) -> None:
        """Waits for the export under way, and reports it.

        Raises UserError if it has failed.
        """
        if self._under_way is None:
            return
        step, future = self._under_way
        self._under_way = None
        lines = future.result()
        self._reporter.event("exported", step, lines[-1], to=f"{EXPORTS}/{step}")

    def finish(self) -> None:
        """Exports the newest checkpoint too, and waits."""
        if self._newest is not None:
            self._begin(self._newest)
        self.wait()


def _export(run: Path, step: int) -> list[str]:
    out = run / EXPORTS / str(step)
    try:
        if out.is_dir():  # of a run that went back, or was resumed before this step
            shutil.rmtree(out)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror}", fix="removing it") from None
    with apart():  # the other processes go on training
        return export_run(run, out, step=step)
