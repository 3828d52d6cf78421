"""Computes the figures of an evaluation during a run: losses, and every n-th time tasks of the
harness.
"""

from collections.abc import Callable
from pathlib import Path

import jax

from spmdtrain.config.errors import ConfigError
from spmdtrain.data.source import Data
from spmdtrain.inference.harness import (
    check_tasks,
    harness_model,
    make_programs,
    rehearse,
    results_of,
)
from spmdtrain.inference.trained_run import OpenedRun
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState


def with_tasks(
    losses: Callable[[TrainState], dict[str, float]], setup: Setup, data: Data
) -> Callable[[TrainState], dict[str, float]]:
    """Returns `figures(state)`, those of `losses` and of `eval.tasks`.

    Which evaluations run the tasks depends only on the step, so a resumed run makes the same
    choice. Raises ConfigError if the tasks cannot be run.
    """
    settings = setup.config.eval
    tasks = make_task_figures(setup, data)

    def figures(state: TrainState) -> dict[str, float]:
        step = int(state.step)
        is_last = step == setup.config.train.steps
        is_due = is_last or step % (settings.every * settings.tasks_every) == 0
        return losses(state) | (tasks(state) if is_due else {})

    return figures


def make_task_figures(setup: Setup, data: Data) -> Callable[[TrainState], dict[str, float]]:
    """Returns `figures(state)`: the harness's results with these weights for each of `eval.tasks`.

    A figure is called task/TASK/METRIC. All processes call it, with the same requests. Raises
    UserError if the run cannot answer every request, or if the harness is not installed or does not
    know a task.
    """
    tasks, limit = setup.config.eval.tasks, setup.config.eval.task_examples
    setting = f"eval.tasks={','.join(tasks)}"
    check_tasks(tasks)
    if data.tokenizer is None:
        raise ConfigError(f"{setting} asks in texts, and the data has no tokenizer")
    programs = make_programs(setup, data.end_of_text)

    def opened(step: int, params: dict[str, jax.Array]) -> OpenedRun:
        begin, end = data.begin_of_text, data.end_of_text
        return OpenedRun(Path(), step, setup, params, data.tokenizer, end, begin_of_text=begin)

    def figures(state: TrainState) -> dict[str, float]:
        model = harness_model(opened(int(state.step), state.params), programs)
        results = results_of(model, tasks, limit)
        return {
            f"task/{task}/{metric.removesuffix(',none')}": float(value)
            for task, metrics in results.items()
            for metric, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }

    rehearse(opened(0, {}), tasks, limit)
    return figures
