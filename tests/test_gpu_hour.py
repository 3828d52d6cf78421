"""`make gpu-hour`: parts in their order, and what was measured is kept whatever happens."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.cli.parser import make_parser
from spmdtrain.lab.profile.trace import Executed

ROOT = Path(__file__).parent.parent
HOUR = ROOT / "benchmarks" / "gpu_hour"
sys.path.append(str(HOUR))
import planned  # noqa: E402 - a folder of scripts
import trained  # noqa: E402
from hour import Part, minutes_of, run_parts  # noqa: E402
from overlap import hidden_and_whole, of_text  # noqa: E402
from parts_of_hour import PARTS, SAME_BITS  # noqa: E402


def part(name, code, least=0.0, most=1.0):
    return Part(name, f"what is {name}?", (sys.executable, "-c", code), least, most)


SLEEPS = "import time; print('begun', flush=True); time.sleep(20)"
FAKE = (
    part("first", "print('one'); print('first | done')"),
    part("fails", "print('why'); raise SystemExit(7)"),
    part("crashes", "import os; print('half', flush=True); os.abort()"),
    part("hangs", SLEEPS, most=0.01),
    part("long", "print('never')", least=1000),
    Part("missing", "is it there?", ("/no/such/program",), 0, 1),
    part("last", "print('last done')"),
)


def summary(folder):
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


@pytest.mark.seconds
def test_parts_run_in_order_and_each_costs_itself_only(tmp_path):
    rows = run_parts(FAKE, tmp_path, 1.0, {"gpus": "Fake GPU"})
    assert [row["name"] for row in rows] == [part.name for part in FAKE]
    assert [row["status"].partition(" after")[0] for row in rows] == [
        "done",
        "failed with code 7",
        "failed with code -6",
        "cut off",
        "left out: it needs 1000 minutes, 1.0 are left",
        "failed: No such file or directory",
        "done",
    ]
    assert rows[0]["headline"] == "first | done" and rows[3]["headline"] == "begun"
    assert summary(tmp_path) == {"machine": {"gpus": "Fake GPU"}, "parts": rows}
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "# A GPU hour on Fake GPU" in page and "| first / done |" in page
    assert "    why\n" in page and page.index("## first") < page.index("## last")


@pytest.mark.seconds
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_what_was_measured_before_the_hour_is_cut_off_is_there(number, tmp_path):
    listed = [vars(each) for each in (FAKE[0], FAKE[1], part("sleeps", SLEEPS), FAKE[-1])]
    parts = tmp_path / "parts.json"
    parts.write_text(json.dumps(listed), encoding="utf-8")
    folder = tmp_path / "results"
    command = [sys.executable, str(HOUR), "--folder", str(folder), "--parts", str(parts)]
    # These tests may be a background job of a shell: it ignores SIGINT, and so would its child.
    heard = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    heard += "os.execv(sys.executable, sys.argv[1:])"
    child = subprocess.Popen(
        [sys.executable, "-c", heard, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = folder / "sleeps.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text(encoding="utf-8")):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(child.pid, number)
    child.wait(30)
    found = [(row["name"], row["status"]) for row in summary(folder)["parts"]]
    assert found[:2] == [("first", "done"), ("fails", "failed with code 7")]
    assert found[2:] == [("sleeps", "begun"), ("last", "not begun")]
    assert "| first / done |" in (folder / "README.md").read_text(encoding="utf-8")


@settings(max_examples=200)
@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 20)), min_size=1), st.floats(0, 60))
def test_no_part_takes_the_minutes_that_a_later_one_was_promised(sizes, hour):
    """Whatever each part takes of what it may: those that fit in their order all run."""
    parts = [part(str(i), "", least, least + more) for i, (least, more) in enumerate(sizes)]
    promised, rest = set(), hour
    for each in parts:
        if each.least <= rest:
            promised.add(each.name)
            rest -= each.least
    left, ran = hour, set()
    for number, each in enumerate(parts):
        own = minutes_of(parts[number:], left)
        if own is not None:
            assert each.least - 1e-9 <= own <= min(each.most, left) + 1e-9
            left -= own - 1e-12  # the slowest: all that it may
            ran.add(each.name)
    assert promised <= ran


@pytest.mark.parametrize(
    ("minutes", "parts"),
    [(10, ["turns", "right", "tune_gpt2"]), (13, ["turns", "right", "tune_gpt2", "times"])],
)
def test_short_hours_have_the_turns_whole_and_then_kernels(minutes, parts):
    """A step of PyTorch and four layers of Llama are among the turns, which take 6 minutes."""
    left, ran = minutes, {}
    for number, each in enumerate(PARTS):
        if (own := minutes_of(PARTS[number:], left)) is not None:
            ran[each.name] = own
            left -= own
    assert list(ran)[: len(parts)] == parts and ran["turns"] >= 6


def test_a_part_is_told_when_to_end_by_itself(tmp_path):
    told = Part("told", "?", (sys.executable, "-c", "print('SECONDS')"), 0.0, 0.5)
    (row,) = run_parts([told], tmp_path, 1.0, {})
    assert row["headline"] == "20"


@pytest.mark.parametrize("seconds", [0.15, 0.5, 0.9])
def test_an_hour_that_ends_at_any_second_keeps_what_was_measured(seconds, tmp_path):
    code = "import sys, time; time.sleep(.1); open(sys.argv[1], 'w').write('{}')"
    parts = []
    for number in range(6):
        command = (sys.executable, "-S", "-c", code, f"FOLDER/{number}.json")
        parts.append(Part(str(number), "?", command, 0.0, 1.0))
    rows = run_parts(parts, tmp_path, seconds / 60, {})
    assert summary(tmp_path)["parts"] == rows and "not begun" not in {row["status"] for row in rows}
    for row in rows:
        is_done = row["status"] == "done"
        assert not is_done or (tmp_path / f"{row['name']}.json").exists()
        assert is_done or row["status"].startswith(("cut off", "left out"))
        assert f"| {row['name']} | ? | {row['status']} |" in (tmp_path / "README.md").read_text()


def test_the_parts_of_the_hour_can_be_typed():
    names = [part.name for part in PARTS]
    assert names[:3] == ["turns", "right", "tune_gpt2"] and len({*names}) == len(names)
    assert sum(part.least for part in PARTS) < 60 and all(part.least < part.most for part in PARTS)
    for each in PARTS:
        for command in (each.command, each.rehearsal):
            words = [word for word in command if word != sys.executable]
            assert words, f"{each.name} has no rehearsal"
            if words[:2] == ["-m", "spmdtrain.cli"]:
                make_parser().parse_args(words[2:])
            elif words[0].startswith("benchmarks/"):
                assert (ROOT / words[0]).exists()
            for word in words:
                if word.startswith(("configs/", "tests/")):
                    assert (ROOT / word).is_file()


def test_the_bits_are_compared_under_the_flags_that_promise_them():
    promised = (ROOT / "docs" / "deterministic.md").read_text(encoding="utf-8")
    assert f"export XLA_FLAGS='{SAME_BITS.removeprefix('XLA_FLAGS=')}'" in promised


def test_what_a_rehearsal_measures_is_said_to_mean_nothing(tmp_path):
    listed = tmp_path / "parts.json"
    given = vars(part("one", "raise SystemExit(1)")) | {
        "rehearsal": (sys.executable, "-c", "import os; print(os.environ['JAX_PLATFORMS'])")
    }
    listed.write_text(json.dumps([given]), encoding="utf-8")
    folder = tmp_path / "results"
    command = [sys.executable, str(HOUR), "--folder", str(folder), "--parts", str(listed)]
    subprocess.run([*command, "--rehearse"], check=True, stdout=subprocess.DEVNULL)
    found = summary(folder)
    assert found["parts"][0]["headline"] == "cpu"
    assert found["machine"]["rehearsal"] == "on the CPU, no measurement"


def test_a_nanosecond_of_communication_is_hidden_where_the_device_works():
    sorts = {
        "send": "communication",
        "also": "communication",
        "dot": "matmul",
        "add": "elementwise",
    }
    ran = [
        Executed("send", 0, 10),
        Executed("also", 8, 12),
        Executed("dot", 2, 6),
        Executed("add", 5, 9),
        Executed("while", 0, 100),  # calls the others
    ]
    assert hidden_and_whole(ran, sorts) == (7, 12)
    assert hidden_and_whole(ran[2:], sorts) == (0, 0)
    listed = [{"sent": 8, "sent_beside_work": 6}, {"sent": 2, "sent_beside_work": 0}]
    assert of_text({"traffic": listed}) == (6, 10) and of_text({}) == (0, 0)


def test_memory_is_held_against_xlas_and_the_planners():
    known = {"measured": 10e9, "compiled": 9e9, "predicted": 11e9}
    unknown = {"measured": None, "compiled": 1.0, "predicted": 1.0}
    said = trained.beside({"memory_bytes": known, "step_seconds": unknown})
    assert said == ["memory_bytes: 10.00 GB measured, compiled -10.0%, predicted +10.0%"]


def test_the_predicted_step_is_held_against_the_measured_one(tmp_path, monkeypatch, capsys):
    seconds = {"h100": 0.03, str(tmp_path / "hardware.toml"): 0.05}
    monkeypatch.setattr(planned, "predicted", seconds.__getitem__)
    monkeypatch.setattr(sys, "argv", ["planned.py", str(tmp_path), "--gpu", "h100"])
    with pytest.raises(SystemExit, match="no step was measured"):
        planned.main()
    (tmp_path / "train_gpt2.json").write_text('{"step_seconds": 0.04}', encoding="utf-8")
    planned.main()
    assert capsys.readouterr().out.endswith("data sheet: predicted -25.0%; calibrated: not known\n")
    (tmp_path / "hardware.toml").touch()
    planned.main()
    assert capsys.readouterr().out.endswith("calibrated: predicted +25.0%\n")


# The script for a rented machine


SCRIPT = HOUR / "rented.sh"
STUB = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
case "$*" in "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;; esac
{more}
"""


def test_the_script_for_a_rented_machine_has_no_shell_errors():
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("driver", "hour", "torch", "cuda"),
    [("580.65.06", 0, 0, "cuda13"), ("550.127", 0, 1, "cuda12"), ("590.1", 3, 0, "cuda13")],
)
def test_the_script_installs_for_this_driver_runs_the_hour_and_packs(
    driver, hour, torch, cuda, tmp_path
):
    """With stubs of nvidia-smi, python3 and make in the place of the real ones."""
    home, bin_folder, log = tmp_path / "home", tmp_path / "bin", tmp_path / "log"
    for folder in (home / "benchmarks" / "gpu_hour", home / "benchmarks" / "results", bin_folder):
        folder.mkdir(parents=True)
    (home / ".venv" / "bin").mkdir(parents=True)
    script = home / "benchmarks" / "gpu_hour" / "rented.sh"
    script.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    stubs = {
        bin_folder / "nvidia-smi": f"printf '{driver}\n{driver}\n'",
        bin_folder / "python3": f'case "$*" in *"install --quiet torch"*) exit {torch} ;; esac',
        bin_folder / "make": f'case "$*" in gpu-hour*) echo "GPU_HOUR=$GPU_HOUR" >> {log}; '
        f"exit {hour} ;; esac",
        home / ".venv" / "bin" / "python": "",
    }
    for path, more in stubs.items():
        path.write_text(STUB.format(log=log, more=more), encoding="utf-8")
        path.chmod(0o755)
    environment = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", script, "7"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == hour, done.stderr
    ran = log.read_text(encoding="utf-8")
    assert f"jax[{cuda}]" in ran and "GPU_HOUR=7" in ran
    assert ("without PyTorch" in done.stdout) == bool(torch)
    assert (home / "build" / "results.tar.gz").exists()
    assert done.stdout.endswith("benchmarks/results/, to be committed\n")
