"""The hash of a compiled program: the same for the same program, another for any other."""

import random
import re
from collections import Counter

import pytest
from helpers import compiled_step

from spmdtrain.compiled.canonical import program, program_hash
from spmdtrain.compiled.hlo import computations

SETTINGS = ("mesh.data=2", "mesh.tensor=2")


@pytest.fixture(scope="module")
def text() -> str:
    return compiled_step(*SETTINGS).as_text()


@pytest.mark.seconds
def test_names_files_lines_and_channels_do_not_count(text):
    moved = text.replace("/spmdtrain/", "/elsewhere/").replace("HloModule jit_step", "HloModule x")
    moved = re.sub(r"%([a-z][\w-]*)\.(\d+)", lambda m: f"%{m[1]}.{int(m[2]) + 7}", moved)
    moved = re.sub(r"channel_id=(\d+)", lambda m: f"channel_id={int(m[1]) + 3}", moved)
    moved = re.sub(r"stack_frame_id=(\d+)", lambda m: f"stack_frame_id={int(m[1]) + 1}", moved)
    assert moved != text
    assert program_hash(moved) == program_hash(text)


def test_any_changed_instruction_gives_another_hash(text):
    draw = random.Random(0)
    whole = program_hash(text)
    places = [found for found in re.finditer(r" (add|multiply|subtract|maximum)\(%", text)]
    for found in draw.sample(places, 12):
        changed = f"{text[: found.start()]} divide(%{text[found.end() :]}"
        assert program_hash(changed) != whole
    constants = [found for found in re.finditer(r"constant\((\d+)\)", text)]
    for found in draw.sample(constants, 12):
        changed = f"{text[: found.start()]}constant(77){text[found.end() :]}"
        assert program_hash(changed) != whole


def test_the_program_counts_its_opcodes(text):
    found = program(text)
    named, _ = computations(text)
    assert found["opcodes"] == Counter(each.opcode for listed in named.values() for each in listed)
    assert program("HloModule nothing") is None
