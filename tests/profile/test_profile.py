"""A step in words: the seconds of a trace by sort of work and by part; a run that got slower."""

import contextlib
import json
import math
import shutil
from pathlib import Path
from unittest.mock import patch

import jax
import pytest
from fuzz import programs
from helpers import compiled_step, mesh_of, prepared, tiny
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain.cli import main
from spmdtrain.cli.record.profile import describe
from spmdtrain.compiled.operations import COPY, NETWORK, SORTS, KindOfWork, operations
from spmdtrain.compiled.step_parts import OTHER, PARTS
from spmdtrain.config import CheckpointError
from spmdtrain.config.errors import DONE
from spmdtrain.lab.page.cost.alarm import WINDOW, alarm
from spmdtrain.lab.page.cost.waterfall import by_bound, farthest_bound, waterfall
from spmdtrain.lab.page.heading import remarks
from spmdtrain.lab.page.read import RunReader
from spmdtrain.lab.profile.seconds import IDLE, StepProfile, profile_of, sum_up, traced_steps
from spmdtrain.lab.profile.trace import Executed, shared_time
from spmdtrain.running import loop
from spmdtrain.running.compile_step import lower_step

SETTINGS = (
    *("model.layers=1", "model.embed=16", "train.steps=5", "log.profile=3"),
    *("mesh.data=2", "mesh.fsdp=2", "train.microbatch=4"),
)
MESH = SETTINGS[:2] + SETTINGS[4:]


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Path:
    """A run whose third step was traced."""
    directory = tmp_path_factory.mktemp("traced") / "run"
    devices = jax.devices()[: mesh_of(SETTINGS)]
    with programs.shared():
        loop.run(tiny(*SETTINGS), directory, devices=devices)
        yield directory


@pytest.mark.long
def test_the_seconds_of_a_traced_step_add_up_and_have_their_parts(traced, capsys):
    assert main(["profile", str(traced), "--json"]) == DONE
    (found,) = json.loads(capsys.readouterr().out)["steps"]
    assert (found["step"], found["devices"]) == (3, 4)
    for table, names in (("sorts", SORTS), ("parts", (*PARTS, OTHER))):
        assert sum(found[table].values()) == pytest.approx(found["seconds"], rel=1e-6)
        assert found[table].keys() <= {*names, IDLE}
    assert {"gather", "attention", "mlp", "head", "optimizer"} <= found["parts"].keys()
    assert found["sorts"][NETWORK] > 0 and found["sorts"]["matmul"] > 0
    longest = [each["seconds"] for each in found["longest"]]
    assert longest == sorted(longest, reverse=True)
    assert sum(longest) <= found["seconds"]
    assert all(each["path"] for each in found["longest"] if each["part"] != OTHER)
    assert main(["profile", str(traced)]) == DONE
    said = capsys.readouterr().out
    assert said.startswith("step 3: ") and "longest instructions" in said
    assert "Traced in step 3, the mean over 4 devices." in waterfall(RunReader(traced).read())


def test_a_program_of_an_older_version_has_no_names_and_a_line_says_so():
    def said(**parts: float) -> str:
        return "\n".join(describe(StepProfile(3, 4, 1.0, {"matmul": 1.0}, parts, ())))

    assert "no instruction names its part" in said(other=0.75, idle=0.25)
    assert "no instruction names its part" not in said(other=0.5, mlp=0.5)


@pytest.mark.long
def test_steps_of_a_run_without_a_trace_are_taken_again_and_traced(traced, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(traced, bare, ignore=shutil.ignore_patterns("profile"))
    with pytest.raises(CheckpointError, match=r"has no traced step; try --steps 3"):
        _profiled(bare)
    before = (bare / "metrics.jsonl").read_bytes()
    assert main(["profile", str(bare), "--steps", "2"]) == DONE
    assert traced_steps(bare) == [3, 4], "after two warm ones"
    assert "of 2 traced steps, the one of middle length" in capsys.readouterr().out
    assert (bare / "metrics.jsonl").read_bytes() == before


def _profiled(run: Path) -> None:
    from spmdtrain.cli.parser import make_parser

    parsed = make_parser().parse_args(["profile", str(run)])
    parsed.command(parsed)


@pytest.mark.long
def test_a_program_is_the_same_with_and_without_the_names_of_its_parts():
    named = lower_step(prepared(*MESH))
    with patch.object(jax, "named_scope", lambda _: contextlib.nullcontext()):
        plain = lower_step(prepared(*MESH))
    assert "mlp/" in named.as_text(debug_info=True)
    assert "mlp/" not in plain.as_text(debug_info=True)
    assert plain.as_text() == named.as_text()
    found = operations(compiled_step(*MESH).as_text())
    assert {each.part for each in found.values()} == {*PARTS, OTHER}


TEXT = """HloModule jit_step

%fused (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  ROOT %d = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (c: f32[4,4]) -> f32[4,4] {
  %c = f32[4,4]{1,0} parameter(0)
  ROOT %r = f32[4,4]{1,0} all-reduce(%c), to_apply=%add, metadata={op_name="jit(step)/psum"}
}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %f = f32[4,4]{1,0} fusion(%x), calls=%fused, metadata={op_name="jit(step)/jvp(mlp)/norm/dot"}
  %w = f32[4,4]{1,0} while(%f), body=%body, metadata={op_name="while"}
  %k = f32[4,4]{1,0} custom-call(%w), custom_call_target="triton_kernel_call"
  %g = f32[4,4]{1,0} custom-call(%k), custom_call_target="__cublas$gemm"
  %s = f32[4,4]{1,0} copy(%g), metadata={op_name="jit(step)/optimizer/copy"}
  ROOT %e = f32[4,4]{1,0} add(%s, %s)
}
"""


def test_an_instruction_has_a_sort_of_work_and_the_outermost_part():
    found = {name: each[:2] for name, each in operations(TEXT).items()}
    assert found["f"] == ("matmul", "mlp")
    assert found["r"] == (NETWORK, OTHER)
    assert found["k"] == ("kernel", OTHER)
    assert found["g"] == ("matmul", OTHER)
    assert found["s"] == (COPY, "optimizer")
    assert found["e"] == ("elementwise", OTHER)
    assert "w" not in found, "its time is that of its body"


spans = st.lists(
    st.builds(
        lambda name, begin, length: Executed(name, float(begin), float(begin + length)),
        st.sampled_from("abc"),
        st.integers(0, 50),
        st.integers(1, 20),
    ),
    max_size=12,
)


@pytest.mark.core
@given(spans)
def test_shared_time_adds_up_to_the_time_in_which_anything_ran(ran):
    covered = {at for each in ran for at in range(int(each.begin), int(each.end))}
    took = shared_time(ran)
    assert math.isclose(sum(took.values()), len(covered), abs_tol=1e-9)
    for name in took:
        alone = sum(each.end - each.begin for each in ran if each.name == name)
        assert took[name] <= alone + 1e-9


def test_a_device_that_waits_is_idle_and_callers_do_not_count():
    known = {"m": KindOfWork("matmul", "mlp", "x"), "a": KindOfWork(NETWORK, "head", "y")}
    devices = {
        "0": [Executed("m", 0.0, 4e9), Executed("loop", 0.0, 8e9), Executed("a", 6e9, 8e9)],
        "1": [Executed("m", 2e9, 4e9)],
    }
    found = sum_up(7, devices, known)
    assert (found.seconds, found.devices) == (8.0, 2)
    assert found.sorts == {"matmul": 3.0, NETWORK: 1.0, IDLE: 4.0}
    assert found.parts == {"mlp": 3.0, "head": 1.0, IDLE: 4.0}
    assert [(each.name, each.seconds, each.times) for each in found.longest] == [
        ("m", 3.0, 1.0),
        ("a", 1.0, 0.5),
    ]
    nameless = sum_up(7, {"0": [Executed("m", 0.0, 1e9)]}, {})
    assert nameless.parts == {OTHER: 1.0, IDLE: 0.0}


def run_of(directory: Path, *, slow: float = 0.0, wait: float = 0.0, **documents) -> Path:
    """A run of ten windows around a second a step, the newest one slower."""
    directory.mkdir()
    lines = []
    for step in range(1, 10 * WINDOW + 2):
        is_new = step > 9 * WINDOW + 1
        took = 1.0 + 0.05 * (step % 3) + (slow if is_new else 0.0)
        waits = wait if is_new else 0.0
        lines.append({"step": step, "grad_norm": 1.0, "step_seconds": took, "input_seconds": waits})
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    for name, document in documents.items():
        (directory / f"{name}.json").write_text(json.dumps(document))
    return directory


@pytest.mark.parametrize(
    ("slow", "wait", "component"),
    [(0.0, 0.0, None), (0.08, 0.0, None), (0.5, 0.0, "step"), (0.5, 0.4, "input")],
)
def test_a_run_whose_newest_steps_leave_the_band_names_the_component(
    tmp_path, slow, wait, component
):
    run = RunReader(run_of(tmp_path / "run", slow=slow, wait=wait)).read()
    found = alarm(run)
    assert (found and found.component) == component
    said = " ".join(remarks(run))
    assert ("the run is slower" in said) == (component is not None)
    if found:
        assert found.first == 9 * WINDOW + 2
        assert found.ratio - found.usual == pytest.approx(0.5, abs=0.06)


def test_with_a_prediction_and_a_trace_the_component_is_what_exceeds_it_most(tmp_path):
    predicted = {
        "step_seconds": 0.5,
        "breakdown_seconds": {"matmul": 0.3, "data_reduction": 0.1, "outside_the_device": 0.1},
        "bound_by": {
            "matmul": "compute",
            "data_reduction": "network",
            "outside_the_device": "host",
        },
    }
    directory = run_of(tmp_path / "run", slow=0.5, predicted=predicted)
    folder = directory / "profile" / "step9"
    folder.mkdir(parents=True)
    sorts = {"matmul": 0.35, "communication": 0.6, "idle": 0.2}
    (folder / "seconds.json").write_text(json.dumps({"step": 9, "devices": 4, "sorts": sorts}))
    run = RunReader(directory).read()
    assert by_bound(run) == {
        "compute": (0.3, 0.35),
        "network": (0.1, 0.6),
        "idle": (0.1, 0.2),
    }
    assert farthest_bound(run) == "network"
    assert "network 600 ms, predicted 100 ms" in waterfall(run)
    assert alarm(run).ratio == pytest.approx(2 * 1.55, abs=0.11)


def test_a_folder_without_a_trace_is_refused(tmp_path):
    (tmp_path / "profile" / "step3").mkdir(parents=True)
    assert traced_steps(tmp_path) == [3]
    with pytest.raises(CheckpointError, match="holds no trace of a step"):
        profile_of(tmp_path, 3)
