"""One run through `loop.run`, as a user would get it, and everything that it leaves behind.

What the files do not tell is seen by standing in for three names of the run: parameters where
they are born, states where they are saved, and the place where a step has just been dispatched, at
which a run is stopped.
"""

import contextlib
import io
import json
import math
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

from fuzz import programs, schedule_files
from fuzz.draw import settings_of
from fuzz.kinds import kind_of, without_numbers
from fuzz.settings import BASE_FILE, Values, overrides
from spmdtrain.config import UserError, load
from spmdtrain.config.errors import DivergedError
from spmdtrain.running import loop
from spmdtrain.running.report.metrics import OneLate
from spmdtrain.running.start import begin, init_from
from spmdtrain.train import fresh
from spmdtrain.train.compared.in_order import plain_arrays
from spmdtrain.train.setup import Setup

STEP = ("loss", "grad_norm", "learning_rate", "tokens")
State = dict[str, np.ndarray]  # path -> value


class Killed(BaseException):
    """Ends a run at once, from inside."""


@dataclass(frozen=True)
class Stop:
    """At which step, and how: kill, or term (a SIGTERM)."""

    step: int
    by: str


@dataclass
class Seen:
    """What stood-in names saw: parameters in the order of the layers, and whole states as they
    rest.
    """

    born: State = field(default_factory=dict)
    params: dict[int, State] = field(default_factory=dict)
    saved: dict[int, State] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """`end`: finished | preempted | nothing to do | killed | refused | diverged | broken.
    `said`: the error, if it was one; `kind` names it without its numbers.
    """

    end: str
    said: str
    kind: str
    directory: Path
    steps: dict[int, dict[str, float]]
    evals: dict[int, float]
    seen: Seen

    @property
    def went_through(self) -> bool:
        return self.end == "finished"


def run(
    numbers: Values,
    layout: Values,
    directory: Path,
    stop: Stop | None = None,
    nudge: Callable[[State], State] | None = None,
) -> Run:
    """Trains; `nudge` changes the parameters that it starts from."""
    values, count = settings_of(numbers, layout)
    schedule_files.write(values.get("pipeline.schedule", ""))
    seen = Seen()
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(_quiet())
        stack.enter_context(programs.shared())
        stack.enter_context(_watched(seen, stop, nudge))
        try:
            config = load(BASE_FILE, overrides(values))
            outcome = loop.run(config, directory, devices=jax.devices()[:count])
            end, what, kind = outcome.status, "", ""
        except Killed:
            end, what, kind = "killed", "", ""
        except DivergedError as error:
            end, what, kind = "diverged", str(error), "DivergedError"
        except UserError as error:
            end, what, kind = (
                "refused",
                str(error),
                f"{type(error).__name__}: {without_numbers(str(error))}",
            )
        except Exception as error:  # what a user would see as a traceback: a finding
            end, what, kind = "broken", traceback.format_exc(), kind_of(error)
    del said
    steps, evals = read_metrics(directory)
    return Run(end, what, kind, directory, steps, evals, seen)


@contextlib.contextmanager
def _quiet() -> Iterator[io.StringIO]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield said


@contextlib.contextmanager
def _watched(seen: Seen, stop: Stop | None, nudge) -> Iterator[None]:
    push, init, checkpoints = OneLate.push, fresh.init_state, begin.Checkpoints

    def pushed(self, step, metrics):
        if stop and step == stop.step:
            if stop.by == "kill":
                raise Killed
            signal.raise_signal(signal.SIGTERM)
        push(self, step, metrics)

    def born(setup):
        state = init(setup)
        if not seen.born:  # else it begins with another run's weights
            seen.born = in_order(setup, state.params)
        return replace(state, params=_nudged(state.params, nudge))

    class Watching(checkpoints):
        def restore(self, *asked):
            state, meta = super().restore(*asked)
            seen.born = in_order(self._setup, state.params)
            return replace(state, params=_nudged(state.params, nudge)), meta

        def restore_params(self, *asked):
            params, meta = super().restore_params(*asked)
            seen.born = in_order(self._setup, params)
            return _nudged(params, nudge), meta

        def save(self, step, state, *rest):
            super().save(step, state, *rest)
            seen.params[step] = in_order(self._setup, state.params)
            seen.saved[step] = as_it_rests(state)

    with (
        patch.object(OneLate, "push", pushed),
        patch.object(fresh, "init_state", born),
        patch.object(init_from, "Checkpoints", Watching),
        patch.object(begin, "Checkpoints", Watching),
    ):
        yield


def _nudged(params: dict[str, jax.Array], nudge) -> dict[str, jax.Array]:
    if not nudge:
        return params
    moved = nudge({path: np.asarray(x) for path, x in params.items()})
    return {path: jax.device_put(x, params[path].sharding) for path, x in moved.items()}


def in_order(setup: Setup, params: dict[str, jax.Array]) -> State:
    """Weights whatever the mesh, in float32."""
    return {path: x.astype(np.float32) for path, x in plain_arrays(setup, params).items()}


def as_it_rests(state) -> State:
    leaves = jax.tree_util.tree_leaves_with_path((state.params, state.opt_state, state.items))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def read_metrics(directory: Path) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    """(what each step reported, evaluation losses); null becomes NaN."""
    steps: dict[int, dict[str, float]] = {}
    evals: dict[int, float] = {}
    for line in lines_of(directory / "metrics.jsonl"):
        if "eval_loss" in line:
            evals[line["step"]] = _number(line["eval_loss"])
        else:
            steps[line["step"]] = {name: _number(line[name]) for name in STEP}
    return steps, evals


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _number(value: float | None) -> float:
    return math.nan if value is None else value
