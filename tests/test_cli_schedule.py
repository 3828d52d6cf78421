"""`spmdtrain schedule`: what it prints, draws and writes is what the table and the simulator
say.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from spmdtrain.cli import main
from spmdtrain.pipeline.draw import draw, svg
from spmdtrain.pipeline.file import read, to_json
from spmdtrain.pipeline.schedule import SCHEDULE_KINDS, build
from spmdtrain.pipeline.timing import (
    Idle,
    Times,
    lockstep_idle,
    megatron_orders,
    order_idle,
    zb_h1_orders,
)

TIMES = Times(forward=1, backward=2, weight=0.5, hop=0.1)
PRICED = ["--forward", "1", "--backward", "2", "--weight", "0.5", "--hop", "0.1"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)


def schedule(capsys, kind: str, *arguments: str, chunks: int = 1) -> str:
    sizes = ["--stages", "4", "--microbatches", "8", "--chunks", str(chunks)]
    assert main(["schedule", "--kind", kind, *sizes, *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "chunks", "orders", "whose"),
    [
        ("gpipe", 1, None, None),
        ("1f1b", 1, megatron_orders(4, 8), "Megatron-LM's order"),
        ("interleaved", 2, megatron_orders(4, 8, 2), "Megatron-LM's order"),
        ("zero_bubble", 1, zb_h1_orders(4, 8), "ZB-H1's order"),
        ("zero_bubble", 2, None, None),
    ],
)
@pytest.mark.parametrize("priced", [[], PRICED], ids=["equal times", "given times"])
def test_the_drawing_and_the_bubbles_are_those_of_the_simulator(
    capsys, kind, chunks, orders, whose, priced
):
    table, times = build(kind, 4, 8, chunks), TIMES if priced else Times()
    drawing, _, last = (
        schedule(capsys, kind, *priced, chunks=chunks).rstrip("\n").rpartition("\n\n")
    )
    assert drawing == draw(table, times, width=60)

    def shares(idle: Idle) -> str:
        return f"{idle.bubble:.1%}" + (f" and hops {idle.hops:.1%}" if priced else "")

    idle = lockstep_idle(table, times)
    assert f"{table.ticks} ticks, bubble {idle.bubble:.1%}, " in drawing.splitlines()[0]
    also = f", {shares(order_idle(orders, times))} in {whose}" if orders else ""
    costs = "F 1, B 2, W 0.5, hop 0.1" if priced else "F 1, B 1, W 1, hop 0"
    assert last == f"bubble {shares(idle)} in lockstep{also} ({costs})"


def test_the_kind_is_1f1b_if_none_is_named(capsys):
    assert main(["schedule", "--stages", "2", "--microbatches", "3"]) == 0
    assert capsys.readouterr().out.startswith("1f1b: 2 stages, 3 microbatches, ")


def test_json_reads_back_as_an_equal_table_and_draws_alike(capsys):
    table = build("interleaved", 4, 8, 2)
    printed = schedule(capsys, "interleaved", *PRICED, "--json", "--svg", "picture.svg", chunks=2)
    assert json.loads(printed) == to_json(table, TIMES)
    Path("table.json").write_text(printed)
    assert read("table.json") == table
    assert schedule(capsys, "table.json", chunks=2).startswith(draw(table, width=60))
    assert main(["schedule", "--kind", "table.json"]) == 0


def test_svg_is_the_picture_of_these_times_and_one_line_says_where(capsys):
    printed = schedule(capsys, "zero_bubble", *PRICED, "--svg", "picture.svg")
    assert [line for line in printed.splitlines() if "picture.svg" in line] == [
        "picture.svg: the same, drawn to scale"
    ]
    written = Path("picture.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(written).tag.endswith("svg")
    assert written == svg(build("zero_bubble", 4, 8), TIMES)


def test_colour_on_a_terminal_only_and_not_with_no_color(capsys, monkeypatch):
    assert "\x1b[" not in schedule(capsys, "1f1b")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[" in schedule(capsys, "1f1b")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in schedule(capsys, "1f1b")


def test_help_names_every_kind(capsys):
    with pytest.raises(SystemExit):
        main(["schedule", "--help"])
    printed = capsys.readouterr().out
    assert set(SCHEDULE_KINDS) <= set(printed.split())


def test_jax_is_not_imported():
    program = (
        "import sys; sys.modules['jax'] = None; "
        "from spmdtrain.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [
        sys.executable,
        "-c",
        program,
        "schedule",
        "--stages",
        "2",
        "--microbatches",
        "2",
        "--svg",
        "picture.svg",
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1f1b: 2 stages")


@pytest.mark.seconds
@pytest.mark.parametrize(
    "microbatches", ["2", "400"], ids=["all in the buffer", "more than the buffer"]
)
def test_a_reader_that_leaves_ends_it_quietly_and_a_full_disk_in_one_line(microbatches):
    program = "import sys; from spmdtrain.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["schedule", "--stages", "2", "--microbatches", microbatches, "--json"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}

    def run(stdout) -> tuple[int, str]:
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(
            command, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120
        )
        return done.returncode, done.stderr

    reader, pipe = os.pipe()
    os.close(reader)
    assert run(pipe) == (141, "")
    os.close(pipe)
    with open("/dev/full", "w") as full:
        assert run(full) == (
            10,
            "spmdtrain: cannot write to standard output: No space left on device\n",
        )
