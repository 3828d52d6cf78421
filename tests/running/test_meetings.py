"""What a meeting of islands consists of: who meets when about what, the mean of changes, and files.

The oracle: islands that meet after every SGD step and average are one run with all their sequences.
"""

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, tiny
from hypothesis import given
from hypothesis import strategies as draw

import spmdtrain as st
from spmdtrain.config import ConfigError
from spmdtrain.config.schema import IslandsConfig
from spmdtrain.data.source import open_data
from spmdtrain.running.device_batches import batches
from spmdtrain.running.islands.folder import Folder, left_in, overlapping
from spmdtrain.running.islands.island import Island
from spmdtrain.running.islands.meetings import Meetings, parts_of
from spmdtrain.train.islands.changes import mean_of
from spmdtrain.train.islands.fragment_rows import BLOCK, Held, PlacesInRow, Row
from spmdtrain.train.islands.meeting_times import Timetable, deal
from spmdtrain.train.state import TrainState

SGD = (
    "model.embed=16",
    "model.vocab=32",
    "model.layers=1",
    "train.sequence_length=8",
    "optimizer.name=sgd",
    "optimizer.momentum=0.0",
    "optimizer.weight_decay=0.0",
    "optimizer.warmup=0",
    "optimizer.schedule=constant",
    "train.clip=none",
)
STEPS = 3


# --- who meets when -------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (6, 1), (6, 2), (6, 3)])
def test_the_timetable_agrees_with_itself(after, every, fragments):
    table = Timetable(after, every // fragments, fragments, 0)
    steps = range(1, 60)
    met = [step for step in steps if table.meets(step)]
    assert met[:after] == list(range(1, after + 1))
    regular = met[after:]
    assert {b - a for a, b in zip(regular, regular[1:], strict=False)} == {every // fragments}
    assert [table.ordinal(step) for step in met] == list(range(1, len(met) + 1))
    for before, step in zip([0, *met], met, strict=False):
        assert table.before(step) == before
        assert table.following(before) == step
    turns = [table.fragment(step) for step in regular]
    assert turns[: 2 * fragments] == [*range(fragments)] * 2


def test_fragments_have_every_weight_once_and_much_the_same_size():
    sizes = {f"w{i}": size for i, size in enumerate((64, 64, 30, 20, 10, 4, 4, 4))}
    dealt = deal(sizes, 3)
    assert sorted(path for paths in dealt for path in paths) == sorted(sizes)
    totals = [sum(sizes[path] for path in paths) for paths in dealt]
    assert max(totals) - min(totals) <= 8
    assert deal(dict(reversed(sizes.items())), 3) == dealt, "all islands deal alike"


@pytest.mark.parametrize("islands", [1, 2, 3, 5])
def test_parts_are_whole_blocks_and_the_whole_row(islands):
    parts = parts_of((2 * BLOCK, 9 * BLOCK), islands)
    assert [first for first, _ in parts[1:]] == [end for _, end in parts[:-1]]
    assert (parts[0][0], parts[-1][1]) == (2 * BLOCK, 9 * BLOCK)
    assert all(first % BLOCK == 0 for first, _ in parts)


SIZES = draw.lists(draw.integers(1, 9 * BLOCK), min_size=1, max_size=4)


@given(sizes=SIZES, owners=draw.lists(draw.integers(0, 2), min_size=1, max_size=8), cuts=SIZES)
def test_processes_have_each_number_of_a_row_once_and_find_it_again(sizes, owners, cuts):
    places = PlacesInRow.of({f"w{number}": (size,) for number, size in enumerate(sizes)})
    mesh: Any = SimpleNamespace(
        devices=np.array([SimpleNamespace(process_index=i) for i in owners])
    )
    written = [places.ranges(mesh, process) for process in range(3)]
    inside = sorted(each for ranges in written for each in ranges)
    assert inside[0][0] == 0 and inside[-1][1] == places.length
    assert all(before[1] == after[0] for before, after in pairwise(inside))
    files = [
        np.concatenate([np.r_[slice(*each)] for each in [(0, 0), *ranges]]) for ranges in written
    ]
    ends = sorted({0, places.length, *(cut % places.length for cut in cuts)})
    for first, end in pairwise(ends):
        there = overlapping(left_in([Path("here")], [written]), first, end)
        found = [files[each.process][each.offset :][: each.size] for each in there]
        assert np.array_equal(np.concatenate(found), np.arange(first, end))


# --- the mean of changes --------------------------------------------------------------------------


def wide(values: np.ndarray) -> Row:
    return Row(values.astype(np.float32), np.zeros(0, np.float32))


def whole(values: np.ndarray) -> Held:
    return Held([(0, values.size)], wide(values))


def test_the_mean_is_weighted_and_who_weighs_nothing_may_hold_nan():
    a, b = np.full(BLOCK, 1.0), np.full(BLOCK, 4.0)
    lost = np.full(BLOCK, np.nan)
    found = mean_of(IslandsConfig(), [wide(a), wide(lost), wide(b)], [2.0, 0.0, 1.0])
    np.testing.assert_allclose(found.numbers_n, 2.0)
    nothing = mean_of(IslandsConfig(), [wide(lost)], [0.0])
    assert not nothing.numbers_n.any()


# --- files ----------------------------------------------------------------------------------------


def test_what_is_decided_stays_so_and_a_late_change_has_no_say(tmp_path):
    first, late = (Meetings(tmp_path, index, patience=0.0) for index in range(2))
    first.send(4, whole(np.zeros(BLOCK)), 8)
    assert first.decide(4, {0, 1}) == {0: 8}
    late.send(4, whole(np.ones(BLOCK)), 8)
    assert late.decide(4, {0, 1}) == {0: 8}
    assert first.newest() == 4
    assert first.members(8) is None


def test_old_meetings_are_forgotten_once_newer_weights_are_left(tmp_path):
    meetings = Meetings(tmp_path, 0, patience=0.0)
    for step in (2, 4, 6, 8):
        meetings.send(step, whole(np.zeros(BLOCK)), 1)
        meetings.decide(step, {0})
        meetings.promise(step)
        if step in (4, 8):
            meetings.leave_outer(step, {"outer": whole(np.full(BLOCK, step))})
    kept = [step for step in (2, 4, 6, 8) if meetings.members(step) is not None]
    assert kept == [4, 6, 8], "from the weights before the newest on"
    assert meetings.newest_outer() == 8
    assert set(meetings.outer(8, "outer", [(0, BLOCK)]).row.numbers_n) == {8}
    assert meetings.promised(2) == set()
    assert meetings.promised(8) == {0}


def test_islands_that_differ_are_refused_by_the_setting(tmp_path):
    Meetings(tmp_path, 0, patience=0.0).agree({"islands.every": 20, "train.seed": 0})
    other = Meetings(tmp_path, 1, patience=0.0)
    with pytest.raises(ConfigError, match=r"islands.every=10; found 20 .* --set islands.every=20"):
        other.agree({"islands.every": 10, "train.seed": 0})
    other.agree({"islands.every": 20, "train.seed": 0})
    other.be_island(FIRST, {"train.global_batch": 4})
    with pytest.raises(ConfigError, match=r"train.global_batch=8; found 4 "):
        other.be_island(FIRST, {"train.global_batch": 8})


FIRST = {"host": "a", "pid": 7, "time": 1.5e9}
OTHERS = [FIRST | {"host": "b"}, FIRST | {"pid": 8}, FIRST | {"time": 1.5e9 + 1}]


@pytest.mark.parametrize("other", OTHERS)
def test_an_index_belongs_to_one_run_that_may_come_again(tmp_path, other):
    for _ in range(2):
        Meetings(tmp_path, 0, patience=0.0).be_island(FIRST, {})
    with pytest.raises(ConfigError, match=r"islands.index=0 is taken: another run is this island"):
        Meetings(tmp_path, 0, patience=0.0).be_island(other, {})
    Meetings(tmp_path, 1, patience=0.0).be_island(other, {})


def test_an_island_waits_for_all_to_come_once_before_it_trains(tmp_path):
    """Else one whose folder is not the others' would train alone, and find out never."""
    first = Meetings(tmp_path, 0, patience=0.0)
    first.be_island(FIRST, {})
    Meetings(tmp_path / "not shared", 1, patience=0.0).be_island(OTHERS[0], {})
    with pytest.raises(ConfigError, match=r"islands 1, 2 of islands.count=3 did not come"):
        first.call_roll(3)
    for index, run in enumerate(OTHERS[:2], 1):
        Meetings(tmp_path, index, patience=0.0).be_island(run, {})
    first.call_roll(3)
    shutil.rmtree(tmp_path / "agreed-2")
    waiting = Meetings(tmp_path, 0, 600.0, lambda: late.be_island(FIRST, {}))
    late = Meetings(tmp_path, 2, patience=0.0)
    waiting.call_roll(3)


def test_a_process_that_does_not_see_the_folder_is_refused(tmp_path, monkeypatch):
    meetings = Meetings(tmp_path, 0, patience=0.0)
    monkeypatch.setattr(Folder, "has", lambda *_: False)
    with pytest.raises(ConfigError, match="does not see what process 0 leaves"):
        meetings.be_island(FIRST, {})


# --- settings -------------------------------------------------------------------------------------

TWO = ("islands.count=2", "islands.index=0", "islands.directory=meetings", "islands.every=4")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("islands.count=2",), "islands.index"),
        (("islands.index=2",), "islands.count=3"),
        ((*TWO, "islands.outer=average", "islands.rate=0.5"), "belongs to nesterov"),
        ((*TWO, "islands.fragments=3"), "islands.every=3"),
        ((*TWO, "islands.delay=4"), "islands.delay=3"),
        ((*TWO, "train.steps=22"), "train.steps=20"),
        ((*TWO, "islands.after=20"), "train.steps=24"),
        ((*TWO, "optimizer.ema=0.9"), "optimizer.ema='none'"),
        ((*TWO, "guard.policy=rollback"), "guard.policy='skip'"),
    ],
)
def test_what_islands_cannot_do_is_refused_by_name(settings, said):
    with pytest.raises(ConfigError, match=said):
        tiny(*settings)


# --- the oracle -----------------------------------------------------------------------------------


def trained_alone(batch: int) -> TrainState:
    config, data = open_data(tiny(*SGD, f"train.global_batch={batch}"))
    setup = st.shard(config, devices=jax.devices()[:1])
    step, state = st.make_step(setup), st.init_state(setup)
    with batches(setup, data, 0, 0) as ahead:
        for _ in range(STEPS):
            state, _ = step(state, next(ahead))
    return state


def trained_as_islands(folder: Path, shares: tuple[int, ...], *more: str) -> list[TrainState]:
    """All islands in turns on one device: each leaves its change, then each takes the mean."""
    found = []
    for index, batch in enumerate(shares):
        own = (f"islands.index={index}", f"islands.directory={folder}", "islands.patience=0.0")
        counts = (f"islands.count={len(shares)}", "islands.every=1", f"train.global_batch={batch}")
        config, data = open_data(tiny(*SGD, *own, *counts, *more))
        setup = st.shard(config, devices=jax.devices()[:1])
        island = Island(setup, Meetings(folder, index, patience=0.0), {"pid": index})
        found.append((island, st.make_step(setup), batches(setup, data, 0, 0)))
    states = [st.init_state(setup)] * len(shares)
    states = [jax.tree.map(jnp.copy, state) for state in states]
    for number in range(1, STEPS + 1):
        for at, (island, step, ahead) in enumerate(found):
            states[at], _ = step(states[at], next(ahead))
            island.send(number, states[at])
        for at, (island, *_) in enumerate(found):
            states[at], *_ = island.take(number, states[at], number)
    for *_, ahead in found:
        ahead.close()
    return states


@pytest.mark.long
def test_islands_that_average_after_each_step_of_sgd_are_one_run(tmp_path):
    one = trained_alone(8)
    islands = trained_as_islands(tmp_path, (4, 4), "islands.outer=average")
    assert_same_bits(islands[0].params, islands[1].params)
    for path, want in one.params.items():
        np.testing.assert_allclose(islands[0].params[path], want, rtol=2e-5, atol=2e-6)


# --- what a meeting makes of the weights, which are moved by hand here ----------------------------


class Group:
    """Islands that do not train: `moves` adds numbers drawn for each to its weights."""

    def __init__(self, folder: Path, shares: tuple[int, ...], *settings: str):
        self.islands, self.states = [], []
        for index, batch in enumerate(shares):
            own = (f"islands.index={index}", f"islands.directory={folder}")
            counts = (f"islands.count={len(shares)}", f"train.global_batch={batch}")
            setup = st.shard(tiny(*SGD, *own, *counts, *settings), devices=jax.devices()[:1])
            self.islands.append(
                Island(setup, Meetings(folder, index, patience=0.0), {"pid": index})
            )
        self.states = [st.init_state(setup)] * len(shares)
        self.states = [jax.tree.map(jnp.copy, state) for state in self.states]
        self._draw = np.random.default_rng(0)

    def move(self) -> list[dict[str, np.ndarray]]:
        """Returns the weights of each island after a move."""
        for at, state in enumerate(self.states):
            moved = {
                path: x + 0.1 * self._draw.standard_normal(x.shape).astype(np.float32)
                for path, x in state.params.items()
            }
            self.states[at] = replace(state, params=moved)
        return [jax.device_get(state.params) for state in self.states]

    def send(self, step: int) -> None:
        for island, state in zip(self.islands, self.states, strict=True):
            island.send(step, state)

    def take(self, step: int, at: int) -> list[dict[str, np.ndarray]]:
        """Returns the weights of each island after the meeting."""
        for index, island in enumerate(self.islands):
            self.states[index], *_ = island.take(step, self.states[index], at)
        return [jax.device_get(state.params) for state in self.states]


@pytest.mark.long
def test_the_outer_step_is_nesterov_on_the_weighted_mean_change(tmp_path):
    group = Group(tmp_path, (6, 2), "islands.every=1")
    outer = jax.device_get(group.states[0].params)
    momentum = {path: np.zeros_like(x) for path, x in outer.items()}
    for step in (1, 2):
        apart = group.move()
        group.send(step)
        found = group.take(step, step)
        for path in outer:
            change = outer[path] - (0.75 * apart[0][path] + 0.25 * apart[1][path])
            momentum[path] = 0.9 * momentum[path] + change
            outer[path] = outer[path] - 0.7 * (0.9 * momentum[path] + change)
            np.testing.assert_allclose(found[0][path], outer[path], rtol=1e-5, atol=1e-6)
            assert np.array_equal(found[0][path], found[1][path])


@pytest.mark.long
def test_a_fragment_moves_its_weights_alone_and_a_late_one_half_the_way(tmp_path):
    settings = ("islands.every=4", "islands.fragments=2", "islands.delay=1", "train.steps=4")
    group = Group(tmp_path, (4, 4), *settings, "islands.outer=average")
    (first, *_) = group.islands
    assert [first.takes(step) for step in range(1, 5)] == [0, 0, 2, 4]
    at_2 = group.move()
    group.send(2)
    at_3 = group.move()
    found = group.take(2, 3)
    moved = [path for path in found[0] if not np.array_equal(found[0][path], at_3[0][path])]
    assert 0 < len(moved) < len(found[0])
    for path in moved:
        half = (at_2[0][path] + at_2[1][path]) / 2
        for own, after in zip(at_3, found, strict=True):
            np.testing.assert_allclose(after[path], (own[path] + half) / 2, rtol=1e-5, atol=1e-6)
    group.send(4)
    at_end = group.take(4, 4)
    for path in at_end[0]:
        assert np.array_equal(at_end[0][path], at_end[1][path]), (
            "the run ends with the same weights"
        )


@pytest.mark.long
@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_changes_below_the_spacing_of_bfloat16_add_up_over_meetings(tmp_path, outer):
    """One of four islands moves by a spacing, as rounding at random would let it."""
    settings = ("precision.params=bfloat16", "islands.every=1", f"islands.outer={outer}")
    group = Group(tmp_path, (2,) * 4, *settings)
    path = "norm.scale_e"
    spacing, momentum, want = 2**-7, 0.0, 1.0
    for step in range(1, 9):
        params = group.states[0].params
        up = params | {path: params[path] + jnp.bfloat16(spacing)}
        group.states[0] = replace(group.states[0], params=up)
        group.send(step)
        group.take(step, step)
        momentum = 0.9 * momentum + spacing / 4
        want += spacing / 4 if outer == "average" else 0.7 * (0.9 * momentum + spacing / 4)
    for state in group.states:
        np.testing.assert_allclose(state.items["outer"][path], want, rtol=1e-6)
        assert np.all(state.params[path] == jnp.bfloat16(want))


def test_places_are_in_blocks_and_in_the_order_of_paths():
    places = PlacesInRow.of({"b": (3, 5), "a": (BLOCK + 1,)})
    assert (places.starts, places.length) == ({"a": 0, "b": 2 * BLOCK}, 3 * BLOCK)
