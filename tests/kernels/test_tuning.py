"""The tuner: it takes the fastest right implementation, and survives each fault of a GPU."""

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.fake_gpu import FAULTS, THIRD

from pallas_kernels import gpus
from pallas_kernels.calls import (
    AttentionCall,
    ChunksCall,
    GroupedCall,
    InverseCall,
    LossCall,
    NormCall,
    from_json,
    to_json,
)
from pallas_kernels.chosen import using
from pallas_kernels.loss import api as loss_api
from pallas_kernels.loss import linear_cross_entropy
from pallas_kernels.tuning import Table
from pallas_kernels.tuning.decide import LEAST_GAIN, decide
from pallas_kernels.tuning.measure import WORKER, Limits, Process, measure
from pallas_kernels.tuning.on_jax import OnJax
from pallas_kernels.tuning.right import complaint
from pallas_kernels.tuning.table import SHIPPED
from pallas_kernels.tuning.tune import tune
from pallas_kernels.tuning.work import share_of_sheet

ROOT = Path(__file__).parents[2]
CALL = AttentionCall(
    dtype="float32",
    batch=1,
    queries=32,
    keys=32,
    heads=2,
    kv_heads=1,
    head_dim=16,
    value_dim=16,
    left=None,
    right=0,
    softcap=None,
    scale=0.25,
    segments=True,
    positions=False,
    bias=False,
    lse=False,
)
NORM = NormCall(
    op="rmsnorm", rows=5, width=24, dtype="float32", scale="float32", bias=None, residual="float32"
)
GROUPED = GroupedCall(rows=64, tile=16, width=16, experts=3, out_width=32, dtype="float32")
CHUNKS = ChunksCall(
    chunks=2,
    tokens=16,
    heads=2,
    key_dim=16,
    value_dim=24,
    dtype="float32",
    corrects=True,
    by_channel=True,
)
LOSS = LossCall(batch=2, time=16, width=8, rows=24, dtype="float32", weight="float32")


def faulty(number):
    """The call for which the fake GPU has fault `number`."""
    return replace(CALL, batch=number, dtype="bfloat16")


def fake(folder):
    command = (sys.executable, str(ROOT / "tests" / "kernels" / "fake_gpu.py"), str(folder))
    return Process(command, {"PYTHONPATH": str(ROOT)}, Limits(step=2.0))


@pytest.fixture(scope="module")
def survived(tmp_path_factory):
    """fault -> (what was found, the lines that were said), of one session with all faults."""
    said = []
    found = {}
    calls = [faulty(number) for number in range(len(FAULTS))]
    for _, finding in measure(calls, said.append, fake(tmp_path_factory.mktemp("gpu"))):
        name = FAULTS[finding.call.batch]
        found[name] = finding, [*said]
        said.clear()
    found["the end"] = None, said
    return found


@pytest.mark.parametrize(
    ("fault", "taken", "line"),
    [
        ("nothing", "second", ""),
        ("crashes at compile", "first", "second is not used: crashed (SIGABRT) while compiling"),
        ("crashes at run", "first", "second is not used: crashed (SIGSEGV) while running"),
        ("hangs", "first", "second is not used: no answer for 2 s while running"),
        ("runs out of memory", "first", "second is not used: out of memory: RESOURCE_EXHAUSTED"),
        ("gives NaN", "first", "second is not used: out is not finite"),
        ("is wrong", "first", "second is not used: out is wrong by 1.0e-02 in a tile"),
        ("is wrong in a tile", "first", "second is not used: dk is wrong by 1.0e-02 in a tile"),
        ("is late", "first", ""),
        ("is as fast", "first", ""),
        ("is unsteady", "first", "times of second vary too much"),
    ],
)
@pytest.mark.seconds
def test_each_fault_costs_a_line_and_a_right_one_is_taken(fault, taken, line, survived):
    finding, said = survived[fault]
    assert finding.chosen == taken
    assert len(said) == (1 if line else 0), said
    assert line in "".join(said)
    assert all("\n" not in each for each in said)
    if "is not used" in line:
        assert [*finding.faults] == ["second"]
    assert set(finding.times) == {"first", "second", THIRD} - set(finding.faults)


def test_a_tiling_that_this_gpu_has_no_room_for_is_left_out_without_a_line(survived):
    finding, said = survived["is too large"]
    assert said == [] and finding.faults == {} and "Shared memory" in finding.refused[THIRD]
    assert finding.chosen == "second" and set(finding.times) == {"first", "second"}


def test_where_the_default_is_wrong_the_next_right_one_is_taken(survived):
    finding, said = survived["kills the default"]
    assert finding.chosen == THIRD and [*finding.faults] == ["first", "second"]
    assert len(said) == 2


def test_a_gpu_that_disappears_ends_the_measuring_with_a_line(survived):
    assert "disappears" not in survived
    _, said = survived["the end"]
    assert "second is not used: crashed (SIGKILL)" in said[0]
    assert said[1:] == ["kernels: the GPU cannot be measured: ended with code 1"]


@pytest.mark.seconds
def test_a_slow_one_is_left_out_when_the_time_is_over_and_is_no_fault(tmp_path):
    said = []
    limits = Limits(step=100.0, call=1.5)
    slow = faulty(FAULTS.index("hangs"))
    process = replace(fake(tmp_path), limits=limits)
    (_, finding), (_, after) = measure([slow, faulty(0)], said.append, process)
    assert finding.chosen == "first" and finding.faults == {}
    assert after.chosen == "second" and after.faults == {}, "by another worker"
    assert said == [f"kernels: {slow.name}: no time left for second (running)"]


@pytest.mark.seconds
def test_what_was_compiled_in_time_is_timed_and_no_other_is_begun(tmp_path):
    said = []
    process = replace(fake(tmp_path), limits=Limits(step=100.0, call=1.6))
    slow = faulty(FAULTS.index("compiles slowly"))
    ((_, finding),) = measure([slow], said.append, process)
    assert finding.chosen == "second" and set(finding.times) == {"first", "second"}
    assert said == [f"kernels: {slow.name}: no time left for {THIRD}"]


STEADY = [1.0, 1.02, 0.99, 1.01, 1.0, 0.98]


@pytest.mark.parametrize(
    ("times", "faults", "taken"),
    [
        ({"a": STEADY, "b": [2 * each for each in STEADY]}, {}, "a"),
        ({"a": STEADY, "b": [0.98 * each for each in STEADY]}, {}, "a"),
        ({"a": STEADY, "b": [0.9 * each for each in STEADY]}, {}, "b"),
        ({"a": STEADY, "b": [0.9] * 6, "c": [0.8] * 6}, {}, "c"),
        ({"a": STEADY, "b": [0.5] * 3}, {}, "a"),  # too few rounds
        ({"b": [0.5] * 6}, {"a": "wrong"}, "b"),
        ({}, {"a": "wrong"}, "b"),
        ({}, {"a": "wrong", "b": "wrong", "c": "wrong"}, None),
    ],
)
def test_the_default_stays_unless_another_one_is_surely_faster(times, faults, taken):
    assert decide(["a", "b", "c"], faults, times)[0] == taken


def test_a_single_wrong_tile_of_a_large_array_is_found():
    random = np.random.default_rng(0)
    want = {"dq": random.standard_normal((2, 4, 1024, 64)).astype(np.float32)}
    rounded = {"dq": want["dq"] * (1 + 2e-3 * random.standard_normal(want["dq"].shape))}
    assert complaint(rounded, want, "bfloat16") == ""
    rounded["dq"][1, 3, 960:] += 1e-2 * np.sign(want["dq"][1, 3, 960:])
    assert "dq is wrong by 1.0e-02" in complaint(rounded, want, "bfloat16")
    hidden = {"lse": np.array([[[-np.inf], [1.0]]])}
    assert complaint({"lse": np.array([[[0.0], [1.0]]])}, hidden, "float32").startswith(
        "lse is fin"
    )
    assert complaint({"lse": np.array([[[-np.inf], [1.0]]])}, hidden, "float32") == ""


# The table


@pytest.mark.seconds
def test_what_is_known_is_not_measured_again(tmp_path):
    (tmp_path / "gpu").mkdir()
    table = Table(tmp_path)
    said = []
    calls = [faulty(0), faulty(1)]
    process = fake(tmp_path / "gpu")
    assert len(tune(calls, table, said.append, program="abc", process=process)) == 2
    assert table.chosen("Fake GPU") == {calls[0].name: "second", calls[1].name: "first"}
    nothing = Process((sys.executable, "-c", "raise SystemExit(9)"))
    known = Table(tmp_path)
    assert tune(calls, known, said.append, gpu="Fake GPU", process=nothing) == []
    assert known.program("abc") == {"gpu": "Fake GPU", "calls": sorted(each.name for each in calls)}
    entry = known.entry("Fake GPU", calls[1].name)
    assert entry["faults"]["second"].startswith("crashed (SIGABRT)")
    assert from_json(entry["call"]) == calls[1]
    assert len(said) == 1
    tune(calls, known, said.append, gpu="Fake GPU", again=True, process=nothing)
    assert "cannot be measured: ended with code 9" in said[-1]


def test_a_program_whose_calls_ship_with_the_package_is_known(tmp_path):
    table = Table(tmp_path)
    calls = sorted(table.chosen("NVIDIA H200"))
    table.add("NVIDIA H200", {}, {"abc": calls, "def": [*calls, "a call that nobody knows"]})
    assert table.program("abc") == {"gpu": "NVIDIA H200", "calls": calls}
    assert table.program("def") is None


def test_a_damaged_table_is_ignored_with_a_line_and_replaced(tmp_path):
    table = Table(tmp_path)
    entry = {"implementation": "xla"}
    table.add("G", {"one": entry})
    other = Table(tmp_path)
    table.add("G", {"two": entry})
    other.add("G", {"three": entry})  # keeps what was added meanwhile
    assert Table(tmp_path).chosen("G") == dict.fromkeys(("one", "two", "three"), "xla")
    whole = table.path.read_text(encoding="utf-8")
    for damage in (whole[:-20], "[]", '{"gpus": {"G": {"one": {}}}, "programs": {}}', "\x00"):
        table.path.write_text(damage, encoding="utf-8")
        damaged = Table(tmp_path)
        assert damaged.chosen("G") == {}
        assert damaged.remarks == [f"kernels: {table.path} is damaged and ignored"]
    damaged.add("G", {"one": entry})
    assert json.loads(table.path.read_text(encoding="utf-8"))["machine"] == table.machine
    assert Table(tmp_path).remarks == []
    assert [
        path.suffix for path in tmp_path.iterdir() if path.suffix not in (".json", ".lock")
    ] == []


def test_a_table_of_another_driver_or_version_does_not_count(tmp_path, monkeypatch):
    Table(tmp_path).add("G", {"one": {"implementation": "xla"}})
    monkeypatch.setattr("pallas_kernels.tuning.table.sources", lambda: "newer")
    assert Table(tmp_path).chosen("G") == {}


@pytest.mark.seconds
def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path):
    (tmp_path / "gpu").mkdir()
    (tmp_path / "file").touch()
    said = []
    table = Table(tmp_path / "file")
    tune([faulty(0)], table, said.append, process=fake(tmp_path / "gpu"))
    assert "cannot be written" in said[0] and len(said) == 1


def test_shipped_entries_count_where_nothing_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("pallas_kernels.tuning.table.SHIPPED", tmp_path / "shipped")
    shipped = Table(tmp_path / "shipped")
    shipped.add("G", {"one": {"implementation": "a"}, "two": {"implementation": "a"}})
    table = Table(tmp_path)
    table.add("G", {"one": {"implementation": "b"}})
    assert table.chosen("G") == {"one": "b", "two": "a"}
    assert table.entry("G", "two") == {"implementation": "a"} and table.entry("H", "two") is None


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda p: p.stem)
def test_a_shipped_entry_is_of_the_call_that_it_names_and_takes_the_fastest(path):
    """A program that asks for the call by another name would not find it."""
    for entries in json.loads(path.read_text(encoding="utf-8"))["gpus"].values():
        for name, entry in entries.items():
            assert from_json(entry["call"]).name == name
            taken = entry["milliseconds"][entry["implementation"]]
            assert (1 - LEAST_GAIN) * taken <= min(entry["milliseconds"].values())


# The real path, on this CPU


@pytest.mark.long
def test_real_calls_are_tried_with_xla_and_interpreted_kernels():
    said = []
    process = Process((*WORKER, "--interpreted"), limits=Limits(step=200.0, call=400.0))
    found = [finding for _, finding in measure([CALL, NORM], said.append, process)]
    assert said == []
    for call, finding in zip((CALL, NORM), found, strict=True):
        assert finding.right == ["xla", "triton:interpret", "triton/narrow:interpret"], call
        assert finding.chosen in finding.right
        assert [len(times) for times in finding.times.values()] == [12, 12, 12]
        assert "needs an NVIDIA GPU" in finding.refused["triton"]
        assert from_json(json.loads(json.dumps(to_json(call)))) == call


@pytest.mark.seconds
def test_a_grouped_matmul_is_drawn_run_and_compared():
    """Without times: a call this small takes none that can be believed."""
    machine = OnJax(interpreted=True)
    names, refused = machine.candidates(GROUPED)
    assert names == ["xla", "triton:interpret", "triton/narrow:interpret"]
    assert "needs an NVIDIA GPU" in refused["triton"]
    wanted = machine.wanted(GROUPED)
    assert set(wanted) == {"out", "dx", "dw"}
    for name in names:
        values = machine.values(GROUPED, machine.prepare(GROUPED, name))
        assert complaint(values, wanted, GROUPED.dtype) == ""
        wrong = values | {"dw": values["dw"] * 1.001}
        assert complaint(wrong, wanted, GROUPED.dtype).startswith("dw is wrong by")
    assert from_json(json.loads(json.dumps(to_json(GROUPED)))) == GROUPED
    listed = share_of_sheet("NVIDIA H100 80GB HBM3", replace(GROUPED, dtype="bfloat16"), 1e-6)
    assert listed == pytest.approx(6 * 64 * 16 * 32 / 1e-6 / gpus.GPUS["h100"].bfloat16)


@pytest.mark.seconds
def test_a_scan_over_chunks_is_drawn_run_and_compared():
    machine = OnJax(interpreted=True)
    names, refused = machine.candidates(CHUNKS)
    assert names == ["xla", "triton:interpret", "triton/narrow:interpret"]
    assert set(refused) == {"mosaic", "triton", "triton/narrow", "triton/wide"}
    wanted = machine.wanted(CHUNKS)
    assert {"out", "last", "ddecay", "dwrite", "dnew", "derase", "dstate"} < set(wanted)
    for name in names[:2]:
        values = machine.values(CHUNKS, machine.prepare(CHUNKS, name))
        assert complaint(values, wanted, CHUNKS.dtype) == ""
        wrong = values | {"derase": values["derase"] * 1.01}
        assert complaint(wrong, wanted, CHUNKS.dtype).startswith("derase is wrong by")
    assert from_json(json.loads(json.dumps(to_json(CHUNKS)))) == CHUNKS
    listed = share_of_sheet("NVIDIA H100 80GB HBM3", replace(CHUNKS, dtype="bfloat16"), 1e-6)
    flops = 3 * 2 * 2 * 2 * 16 * 24 * (3 * 16 + 16)
    assert listed == pytest.approx(flops / 1e-6 / gpus.GPUS["h100"].bfloat16)


@pytest.mark.seconds
def test_an_inverse_is_drawn_run_and_compared():
    call = InverseCall(matrices=2, size=16, dtype="float32")
    machine = OnJax(interpreted=True)
    names, refused = machine.candidates(call)
    assert names == ["xla", "triton:interpret"] and set(refused) == {"triton"}
    wanted = machine.wanted(call)
    assert set(wanted) == {"out", "dlower"}
    for name in names:
        values = machine.values(call, machine.prepare(call, name))
        assert complaint(values, wanted, call.dtype) == ""
        wrong = values | {"dlower": values["dlower"] * 1.01}
        assert complaint(wrong, wanted, call.dtype).startswith("dlower is wrong by")
    assert from_json(json.loads(json.dumps(to_json(call)))) == call
    listed = share_of_sheet("NVIDIA H100 80GB HBM3", call, 1e-6)
    moved = 5 * 4 * 2 * 16 * 16
    assert listed == pytest.approx(moved / 1e-6 / gpus.GPUS["h100"].memory_bandwidth)


@pytest.mark.seconds
def test_the_chunks_of_a_loss_are_drawn_run_and_compared(monkeypatch):
    monkeypatch.setattr(loss_api, "CHUNK_LOGITS", 2 * 16 * 24 // 2)
    machine = OnJax(interpreted=True)
    names, refused = machine.candidates(LOSS)
    sizes = ["", "/half", "/quarter", "/double", "/fourfold", "/eightfold"]
    interpreted = ["triton:interpret", "triton/double:interpret"]
    assert names == [*(f"xla{size}" for size in sizes), *interpreted]
    assert set(refused) == {f"triton{size}" for size in sizes}
    wanted = machine.wanted(LOSS)
    assert set(wanted) == {"out", "dx", "dweight"}
    for name in names:
        values = machine.values(LOSS, machine.prepare(LOSS, name))
        assert complaint(values, wanted, LOSS.dtype) == ""
        wrong = values | {"dx": values["dx"] * 1.001}
        assert complaint(wrong, wanted, LOSS.dtype).startswith("dx is wrong by")
    assert from_json(json.loads(json.dumps(to_json(LOSS)))) == LOSS
    listed = share_of_sheet("NVIDIA H100 80GB HBM3", replace(LOSS, dtype="bfloat16"), 1e-6)
    assert listed == pytest.approx(6 * 32 * 8 * 24 / 1e-6 / gpus.GPUS["h100"].bfloat16)


def test_a_loss_takes_the_chunks_that_were_measured(monkeypatch):
    x, weight = jnp.ones((2, 16, 8)), jnp.ones((24, 8))
    targets = jnp.zeros((2, 16), int)

    def chunks(decided):
        with using(decided) as decisions:  # a lambda each time: jax remembers what it has traced
            loss = partial(linear_cross_entropy, targets=targets, is_local=True)
            traced = jax.make_jaxpr(lambda x: loss(x, weight))(x)
        after_the_first = re.findall(r"length=(\d+)", str(traced))
        return 1 + sum(map(int, after_the_first)), decisions.taken

    assert chunks({}) == (1, {}), "all logits are one chunk: nothing is to be chosen"
    monkeypatch.setattr(loss_api, "CHUNK_LOGITS", 2 * 16 * 24 // 2)
    assert chunks({}) == (2, {LOSS.name: "xla"})
    assert chunks({LOSS.name: "xla/quarter"}) == (8, {LOSS.name: "xla/quarter"})
