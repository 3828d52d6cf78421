"""Takes part in the meetings of a run for one island.

The results of meetings stay in the folder. If an island resumes, it repeats its steps up to where
it was, and each meeting has the same result. If the others have met without it, because it was away
or slow, it leaps: it takes the outer weights of the newest meeting, and continues from there with
its own optimizer state.

An island may have several processes, which take each step and each turn of a meeting together.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.checkpoints.identity import settings_of
from spmdtrain.config.errors import ConfigError
from spmdtrain.data.tokenizers.tokenizer import tokenizer_fingerprint
from spmdtrain.processes.processes import this_process
from spmdtrain.running.islands.meetings import Meetings, parts_of
from spmdtrain.train.islands.changes import Copying, Meet, make_copying, make_meet, mean_of
from spmdtrain.train.islands.fragment_rows import Held, PlacesInRow, to_devices, to_host
from spmdtrain.train.islands.meeting_times import Timetable, deal
from spmdtrain.train.islands.outer_step import MOMENTUM, OUTER, UNMET
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState

MIX = 0.5  # the part of its own weights that an island keeps if the others' arrive late
ALONE = (
    *("islands.index", "islands.directory", "islands.patience", "islands.keep"),
    *("model.attention", "model.context_attention", "data.read_ahead"),
)
IN_COMMON = ("islands.", "model.", "optimizer.", "train.seed", "train.sequence_length")
TOKENIZER = "the tokenizer of the data"
SHOWN = 16  # hex digits of its hash
# If they differ, a run that starts over would receive what an earlier one has learned.
OWN = ("data.", "train.global_batch", "train.init_from")


class Island:
    """The part of an island in the meetings of a run. Its state has the items of outer.py."""

    def __init__(
        self,
        setup: Setup,
        meetings: Meetings,
        run: Mapping[str, Any],
        tokenizer: dict[str, Any] | None = None,
    ):
        """Takes the place of the island for `run`: see `Meetings.be_island`.

        `tokenizer`: the spec of the tokenizer of its data, None if they are ids.
        """
        config = setup.config
        self._setup = setup
        self._settings = config.islands
        self._meetings = meetings
        self._timetable = Timetable.of(config.islands)
        sizes = {
            path: int(np.prod(setup.padding.of_model[path])) for path in setup.state.items["outer"]
        }
        if len(sizes) < config.islands.fragments:
            raise ConfigError(
                f"islands.fragments={config.islands.fragments}: the model trains {len(sizes)} "
                "weights, and each fragment needs one",
                fix=f"--set islands.fragments={len(sizes)}",
            )
        dealt = {None: sorted(sizes)} | dict(enumerate(deal(sizes, config.islands.fragments)))
        shapes = setup.padding.of_model
        self._places = {
            key: PlacesInRow.of({path: shapes[path] for path in paths})
            for key, paths in dealt.items()
        }
        process, _ = this_process()
        self._ranges = {
            key: places.ranges(setup.mesh, process) for key, places in self._places.items()
        }
        self._meets: dict[tuple[int | None, bool, float], Meet] = {}
        meetings.agree(_settings(setup, IN_COMMON))
        meetings.agree_on_data({TOKENIZER: tokenizer_fingerprint(tokenizer)[:SHOWN]})
        meetings.be_island(run, _settings(setup, OWN))

    def sends(self, step: int) -> bool:
        """Returns True if this island leaves its change after this step."""
        return self._timetable.meets(step)

    def takes(self, step: int) -> int:
        """Returns the step of the meeting whose result is taken after `step`; 0: of none."""
        table, last = self._timetable, self._setup.config.train.steps
        for met in (step, step - self._settings.delay):
            if met > 0 and table.meets(met) and met + table.late(met, last) == step:
                return met
        return 0

    def send(self, step: int, state: TrainState) -> None:
        """Leaves what this island has learned, unless the others have met without it."""
        if self._meetings.members(step) is not None:
            return
        fragment = self._timetable.fragment(step)
        paths = self._places[fragment].starts
        outer = {path: state.items[OUTER.name][path] for path in paths}
        params = {path: state.params[path] for path in paths}
        change, finite = self._meet(step, 0.0).change(outer, params)
        weight = self._setup.config.train.global_batch if finite else 0
        held = to_host(self._places[fragment], change, self._ranges[fragment])
        self._meetings.send(step, held, weight)

    def take(
        self, step: int, state: TrainState, at: int
    ) -> tuple[TrainState, dict[str, float], list[int]]:
        """Returns the state after the meeting of `step`, who took part, and who was missing.

        `at` is the number of steps that this island has taken.
        """
        expected = self._expected(step)
        members = self._meetings.decide(step, expected)
        if self._settings.index not in members:
            self.promise(step)
        mean = self._mean(step, list(members))
        mix = MIX if at > step else 0.0
        state = self._taken(step, state, mean, mix)
        if at == self._setup.config.train.steps:
            state = self._at_outer(state)
        if self._timetable.ordinal(step) % self._settings.keep == 0:
            self._leave_outer(step, state)
        weights = {str(index): weight for index, weight in members.items()}
        return state, weights, sorted(expected - members.keys())

    def unmet(self, state: TrainState) -> int:
        """Returns the step of the meeting that a signal has cut short, 0 if none has."""
        return int(state.items[UNMET.name])

    def with_unmet(self, step: int, state: TrainState) -> TrainState:
        """Returns the state with a note that the result of this meeting is still to be taken."""
        note = self._as_step(step)
        return replace(state, items=state.items | {UNMET.name: note})

    def is_kept(self, step: int) -> bool:
        """Returns True if the result of this meeting can be taken: the folder still has it."""
        meetings = self._meetings
        return meetings.members(step) is not None or meetings.has_left(step)

    def leap(self, step: int, state: TrainState) -> tuple[TrainState, int]:
        """Returns (state, step) after meetings that the others have held without this island."""
        meetings, table = self._meetings, self._timetable
        members = meetings.members(table.following(step))
        newest = meetings.newest()
        if newest <= step or (members is not None and self._settings.index in members):
            return state, step
        reached = step
        if members is None or self.unmet(state):
            newest_left = meetings.newest_outer()
            if newest_left > step:
                state, reached = self._from_outer(newest_left, state), newest_left
        while (met := table.following(reached)) <= newest:
            present = meetings.members(met)
            if present is None:
                break
            state = self._taken(met, state, self._mean(met, list(present)), 0.0)
            reached = met
        if reached == step:
            return state, step
        state = self.with_unmet(0, self._at_outer(state))
        state = replace(state, step=self._as_step(reached))
        self.promise(reached)
        return state, reached

    def promise(self, step: int) -> None:
        """Tells the others to wait for this island at the first meeting after this step."""
        if step < self._setup.config.train.steps:
            self._meetings.promise(self._timetable.following(step))

    def _expected(self, step: int) -> set[int]:
        """Returns whom the meeting waits for: those at the one before, and who has promised."""
        before = self._meetings.members(self._timetable.before(step))
        present = set(range(self._settings.count)) if before is None else set(before)
        return present | self._meetings.promised(step)

    def _mean(self, step: int, members: list[int]) -> Held:
        """Averages the part that is this island's, and returns the mean change.

        Each process averages its part of the island's part.
        """
        fragment = self._timetable.fragment(step)
        parts = parts_of((0, self._places[fragment].length), len(members))
        weights = self._meetings.members(step) or {}
        process, processes = this_process()

        def average(part: int) -> None:
            own = parts_of(parts[part], processes)[process]
            rows = [self._meetings.change(step, index, own) for index in members]
            mean = mean_of(self._settings, rows, [weights[index] for index in members])
            self._meetings.leave_mean(step, part, Held([own], mean))

        if self._settings.index in members:
            average(members.index(self._settings.index))
        return self._meetings.mean(step, members, self._ranges[fragment], average)

    def _taken(self, step: int, state: TrainState, mean: Held, mix: float) -> TrainState:
        """Returns the state after the outer step with this mean change."""
        items, setup = state.items, self._setup
        fragment = self._timetable.fragment(step)
        in_blocks = self._settings.codec != "none"
        row = to_devices(self._places[fragment], mean, setup.mesh, in_blocks)
        momentum = items.get(MOMENTUM.name, {})
        trained = {path: state.params[path] for path in items[OUTER.name]}
        outer, momentum, params = self._meet(step, mix).take(
            items[OUTER.name], momentum, trained, row
        )
        after = items | {OUTER.name: outer} | ({MOMENTUM.name: momentum} if momentum else {})
        return replace(state, params=state.params | params, items=after)

    def _meet(self, step: int, mix: float) -> Meet:
        fragment, in_step = self._timetable.fragment(step), self._timetable.is_in_step(step)
        key = fragment, in_step, mix
        if key not in self._meets:
            self._meets[key] = make_meet(self._setup, self._places[fragment], in_step, mix)
        return self._meets[key]

    @cached_property
    def _copy(self) -> Callable[..., Any]:
        """The outer weights as weights of the island, sharded like those."""
        abstract = {path: self._setup.state.params[path] for path in self._places[None].starts}

        def copy(outer):
            return {path: jnp.copy(outer[path]).astype(x.dtype) for path, x in abstract.items()}

        return jax.jit(copy, out_shardings={path: x.sharding for path, x in abstract.items()})

    @cached_property
    def _copying(self) -> Copying:
        return make_copying(self._setup, self._places[None])

    def _at_outer(self, state: TrainState) -> TrainState:
        return replace(state, params=state.params | self._copy(state.items[OUTER.name]))

    def _as_step(self, step: int) -> jax.Array:
        return jax.device_put(np.int32(step), self._setup.state.step.sharding)

    def _leave_outer(self, step: int, state: TrainState) -> None:
        """Leaves the outer weights for islands that are further behind than the meetings kept."""
        places, ranges = self._places[None], self._ranges[None]
        values = {
            name: to_host(places, self._copying.to_row(state.items[name]), ranges)
            for name in (OUTER.name, MOMENTUM.name)
            if name in state.items
        }
        self._meetings.leave_outer(step, values)

    def _from_outer(self, step: int, state: TrainState) -> TrainState:
        """Returns the state with the outer weights and momentum that were left after `step`."""
        places, mesh = self._places[None], self._setup.mesh
        of_outer = {}
        for name in (OUTER.name, MOMENTUM.name):
            if name in state.items:
                held = self._meetings.outer(step, name, self._ranges[None])
                row = to_devices(places, held, mesh, in_blocks=False)
                of_outer[name] = self._copying.from_row(row)
        return replace(state, items=state.items | of_outer)


def _settings(setup: Setup, beginnings: tuple[str, ...]) -> dict[str, Any]:
    """Returns the settings with these beginnings that must stay as they are."""
    settings = settings_of(setup.config)
    names = [
        name for name in settings if name.startswith(beginnings) and not name.startswith(ALONE)
    ]
    return {name: settings[name] for name in names}
