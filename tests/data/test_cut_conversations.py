"""A run says how many conversations its windows cut, and that is how many are cut."""

import json

import numpy as np
import pytest
from helpers import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import spmdtrain
from spmdtrain.cli import main
from spmdtrain.data.batches import Range
from spmdtrain.data.cut_documents import count_cut


def cut_one_by_one(bounds: list[int], length: int, packing: str) -> int:
    """Documents whose positions, one each for all tokens but the last, are in several windows."""
    count = 0
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        windows = {at // length for at in range(start, stop - 1)}
        count += stop - 1 - start > length if packing == "best_fit" else len(windows) > 1
    return count


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(1, 9), st.integers(0, 5))
@pytest.mark.parametrize("packing", ["best_fit", "documents", "stream"])
def test_documents_that_windows_cut_are_counted(packing, lengths, length, before):
    """Of a range that begins behind other documents."""
    bounds = np.cumsum([0, *lengths])
    starts = np.array([*range(before), *(before + bounds[:-1])])
    span = Range(before, before + int(bounds[-1]))
    whole = sum(size > 1 for size in lengths)
    want = (cut_one_by_one(bounds.tolist(), length, packing), whole)
    assert count_cut(starts, span, length, packing) == want


def test_a_run_says_how_many_are_cut(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    roles = ("user", "assistant")
    rows = [[{"role": role, "content": "x" * 40 * at} for role in roles] for at in range(1, 5)]
    lines = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    texts, others = (json.dumps({"text": letter * 99}) + "\n" for letter in "ab")
    for name, content, more in (
        ("chats", lines, ["--chat"]),
        ("texts", texts * 30, []),
        ("others", others * 30, []),
    ):
        (tmp_path / f"{name}.jsonl").write_text(content)
        command = ["data", "prepare", f"{name}.jsonl", "--out", name, "--tokenizer", "bytes"]
        assert main([*command, *more]) == 0
    common = ("data.corpus=tokens", "model.vocab=none", "data.validation_path=others.bin")
    for packing, length, path, said in (
        ("best_fit", 256, "chats", "2 of 4 conversations are cut at a window (a longer"),
        ("documents", 256, "chats", "3 of 4 conversations are cut at a window (data.packing=best"),
        ("best_fit", 1024, "chats", ""),
        ("best_fit", 16, "texts", ""),
    ):
        shape = (f"train.sequence_length={length}", f"data.packing={packing}")
        own = f"data.path={path}.bin"
        config = tiny(*common, *shape, own, "data.validation_fraction=0")
        config, data = spmdtrain.open_data(config)
        described = data.describe(config)
        assert said in described and bool(said) == ("cut at" in described), described
