"""Schedules drawn: what the pictures show is what the table says."""

import re
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.pipeline.draw import draw, svg
from spmdtrain.pipeline.schedule import (
    SCHEDULE_KINDS,
    build,
    interleaved,
    one_f_one_b,
    zero_bubble,
)
from spmdtrain.pipeline.timing import Times

FEWER = settings(max_examples=60)

SVG = "{http://www.w3.org/2000/svg}"


def test_a_small_schedule_drawn():
    assert draw(interleaved(2, 2, 2)) == (
        "interleaved: 2 stages, 2 chunks, 2 microbatches, 8 ticks, bubble 20.0%, stash 4\n"
        "\n"
        "tick       0  1  2  3  4  5  6  7\n"
        "stage 0 F 0a 1a 0b 1b  ·  ·  ·  ·\n"
        "        B  ·  ·  ·  · 0b 1b 0a 1a\n"
        "stage 1 F  · 0a 1a 0b 1b  ·  ·  ·\n"
        "        B  ·  ·  · 0b 1b 0a 1a  ·"
    )


def test_weight_gradients_have_their_row_only_where_there_are_some():
    assert "        W" in draw(zero_bubble(2, 4))
    assert "        W" not in draw(one_f_one_b(2, 4))


@FEWER
@given(kind=st.sampled_from(SCHEDULE_KINDS), stages=st.integers(1, 4), width=st.integers(40, 120))
def test_lines_stay_within_the_width_and_lose_nothing(kind, stages, width):
    table = build(kind, stages, 4 * stages, 2 if kind == "interleaved" else 1)
    drawn = draw(table, width=width).splitlines()[1:]
    assert max(map(len, drawn)) <= width
    ticks = [int(tick) for line in drawn if line.startswith("tick") for tick in line.split()[1:]]
    assert ticks == list(range(table.ticks))
    rows = [line for line in drawn if line and not line.startswith("tick")]
    work = 3 if table.split else 2
    units = [
        cell
        for line in rows
        for cell in re.split(r" [FBW] ", line, maxsplit=1)[1].split()
        if cell != "·"
    ]
    assert len(units) == work * stages * table.microbatches * table.chunks


def test_colours_only_if_asked():
    table = zero_bubble(2, 4)
    assert "\x1b[" not in draw(table)
    assert re.sub(r"\x1b\[\d+m", "", draw(table, colour=True)) == draw(table)


@FEWER
@given(kind=st.sampled_from(SCHEDULE_KINDS), stages=st.integers(1, 4), hop=st.floats(0, 1))
def test_the_picture_has_a_box_per_unit_and_boxes_of_a_stage_do_not_overlap(kind, stages, hop):
    table = build(kind, stages, 2 * stages, 2 if kind == "interleaved" else 1)
    picture = ElementTree.fromstring(svg(table, Times(1.0, 2.0, 0.5, hop)))
    width, height = float(picture.get("width")), float(picture.get("height"))
    boxes = [box for box in picture.iter(f"{SVG}rect") if box.get("stroke")]
    assert len(boxes) == (3 if table.split else 2) * stages * table.microbatches * table.chunks
    rows = {}
    for box in boxes:
        left, wide = float(box.get("x")), float(box.get("width"))
        assert wide > 15 and left + wide <= width and float(box.get("y")) < height
        rows.setdefault(box.get("y"), []).append((left, left + wide))
    assert len(rows) == stages
    for row in rows.values():
        row.sort()
        assert all(one[1] <= other[0] + 0.2 for one, other in zip(row, row[1:], strict=False))
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert texts[0].startswith(f"{kind}: {stages} stages") and "bubble" in texts[0]
    assert {"forward", "idle"} <= set(texts) and ("weight gradient" in texts) == table.split


def test_the_picture_needs_nothing_from_elsewhere():
    assert not re.search(r"href|url\(|<script|@import", svg(interleaved(2, 4, 2)))
