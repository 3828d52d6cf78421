"""Schedules from files: what is written is read back, what is wrong is refused."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.config.errors import ConfigError
from spmdtrain.pipeline.file import read, to_json
from spmdtrain.pipeline.schedule import (
    SCHEDULE_KINDS,
    build,
    gpipe,
    interleaved,
    one_f_one_b,
    units_of,
)
from spmdtrain.pipeline.timing import Times

FEWER = settings(max_examples=60)

LETTERS = {"forward": "F", "backward": "B", "weight": "W"}


def csv_of(table) -> str:
    units = {kind: units_of(table, kind).tolist() for kind in LETTERS}
    return "\n".join(
        ",".join(
            " ".join(
                f"{letter}{units[kind][tick][stage][0]}.{units[kind][tick][stage][1]}"
                for kind, letter in LETTERS.items()
                if units[kind][tick][stage][0] >= 0
            )
            for stage in range(table.stages)
        )
        for tick in range(table.ticks)
    )


@FEWER
@given(data=st.data())
def test_what_is_written_is_read_back(data, tmp_path_factory):
    kind, stages = data.draw(st.sampled_from(SCHEDULE_KINDS)), data.draw(st.integers(1, 4))
    chunks = data.draw(st.integers(1, 3)) if kind in ("interleaved", "zero_bubble") else 1
    table = build(kind, stages, stages * data.draw(st.integers(1, 3)), chunks)
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "table.json").write_text(json.dumps(to_json(table)))
    assert read(folder / "table.json") == table
    (folder / f"{kind}.csv").write_text(csv_of(table))
    assert read(folder / f"{kind}.csv") == table


def test_json_has_exactly_the_shape_that_scripts_rely_on():
    written = json.loads(json.dumps(to_json(interleaved(2, 2, 2))))
    assert set(written) == {
        *("stages", "chunks", "microbatches", "kind", "ticks"),
        *("bubble_fraction", "hop_fraction", "bubble_over_ideal", "peak_stash"),
    }
    assert (written["stages"], written["chunks"], written["microbatches"]) == (2, 2, 2)
    assert written["ticks"][0] == [
        {"forward": [0, 0], "backward": None, "weight": None, "stash_slot": 0},
        {"forward": None, "backward": None, "weight": None, "stash_slot": None},
    ]
    assert written["ticks"][3][1] == {
        "forward": [0, 1],
        "backward": [0, 1],
        "weight": None,
        "stash_slot": 2,
    }
    assert written["peak_stash"] == [4, 3]
    assert written["bubble_over_ideal"] == pytest.approx(1 / 4)
    assert written["bubble_fraction"] == pytest.approx(1 / 5)
    slow_hops = to_json(interleaved(2, 2, 2), Times(hop=10))
    assert slow_hops["hop_fraction"] > 0.5 > written["hop_fraction"] == 0
    assert slow_hops["bubble_over_ideal"] == written["bubble_over_ideal"]


def test_a_schedule_written_by_hand_may_wait(tmp_path):
    """Two stages, one microbatch at a time, with idle ticks between hop and use."""
    path = tmp_path / "patient.csv"
    path.write_text("# one at a time\nF0.0,\nF1.0,\n,F0.0\n\n,F1.0 B0.0\n,B1.0\nB0.0,\nB1.0,\n")
    table = read(path)
    assert (table.kind, table.stages, table.chunks, table.microbatches, table.ticks) == (
        "patient",
        2,
        1,
        2,
        7,
    )
    assert table.activations_wait
    assert table.cotangent_slots == 2
    assert table.arrive_forward_slot[:, 1].tolist() == [2, 0, 1, 2, 2, 2, 2]
    assert table.forward_slot[:, 1].tolist() == [2, 2, 0, 1, 2, 2, 2]
    assert table.head_slot[:, 1].tolist() == [2, 2, 0, 1, 2, 2, 2]
    assert table.arrive_backward_slot[:, 0].tolist() == [2, 2, 2, 2, 0, 1, 2]
    assert table.cotangent_slot[:, 0].tolist() == [2, 2, 2, 2, 2, 0, 1]


def test_stash_slots_of_a_file_are_kept_if_they_hold_and_refused_if_not(tmp_path):
    path = tmp_path / "slots.json"
    written = to_json(one_f_one_b(2, 3))
    for row in written["ticks"]:
        for cell in row:
            cell["stash_slot"] = None if cell["stash_slot"] is None else 2 - cell["stash_slot"]
    path.write_text(json.dumps(written))
    table = read(path)
    assert table.forward_slot[:3, 0].tolist() == [2, 1, 0]
    assert table.backward_slot[2:, 0].tolist() == [2, 1, 0]
    for row in written["ticks"]:
        for cell in row:
            cell["stash_slot"] = None if cell["stash_slot"] is None else 0
    path.write_text(json.dumps(written))
    with pytest.raises(
        ConfigError,
        match="a slot is not overwritten while it is live; found tick 1, stage 0, slot 0",
    ):
        read(path)
    written["ticks"][1][0]["stash_slot"] = None
    path.write_text(json.dumps(written))
    with pytest.raises(
        ConfigError,
        match="for all forwards or for none; found none for the forward at tick 1, stage 0",
    ):
        read(path)
    for row in written["ticks"]:
        for cell in row:
            del cell["stash_slot"]
    path.write_text(json.dumps(written))
    assert read(path) == one_f_one_b(2, 3)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "a.csv",
            "F0.0 B0.0\nF1.0 B2.0\n",
            "each unit runs once; found F2.0 at no tick of stage 0",
        ),
        ("a.csv", "F0.0,F0.0\n,B0.0\nB0.0,\n", "F0.0 at tick 0, stage 1, ready at tick 1"),
        (
            "a.csv",
            "F0.0,\n,F0.0 B0.0 F1.0\nB0.0,\n",
            "one unit of a kind at a tick.*'F1.0' at tick 1, stage 1",
        ),
        ("a.csv", "F0,\n", "'F0' at tick 0, stage 0; try F3.0"),
        ("a.csv", "F0.0,\nF0.0\n", "a cell for every stage.*found 1 at tick 1, 2 stages"),
        ("a.csv", "F0.0 B0.0 F999999999.0", "one unit of a kind"),
        ("a.csv", "F0.0 B999999999.0", "F1.0 at no tick of stage 0"),
        ("a.csv", "F9999999999.0", "'F9999999999.0' at tick 0"),
        ("a.csv", "# nothing\n\n", "no rows"),
        ("a.csv", "F0.0,\n,\n,F0.0 B0.0\nB0.0,\n", "every tick has work; found none at tick 1"),
        ("a.json", "{", "the file: Invalid JSON"),
        ("a.json", '{"stages": 2}', "chunks: Field required"),
        (
            "a.json",
            '{"stages": 1, "chunks": 1, "microbatches": 1, "kind": "x", "ticks": []}',
            "no ticks",
        ),
        (
            "a.json",
            '{"stages": 1, "chunks": 1, "microbatches": 1, "kind": "x", '
            '"ticks": [[{"foward": [0, 0]}]]}',
            "ticks.0.0.foward: Extra inputs",
        ),
        ("a.txt", "F0.0", "a .json or .csv file"),
    ],
)
def test_what_is_wrong_in_a_file_is_refused(name, text, says, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        read(tmp_path / name)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "nowhere.json")


def test_json_is_made_of_plain_numbers():
    for table in (gpipe(2, 3), one_f_one_b(2, 3)):
        assert not any(isinstance(number, np.generic) for number in to_json(table)["peak_stash"])
        json.dumps(to_json(table))
