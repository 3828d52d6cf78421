"""`make gpu-hour`: parts in their order, and what was measured is kept whatever happens."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmdtrain.cli.parser import make_parser

ROOT = Path(__file__).parent.parent
HOUR = ROOT / "benchmarks" / "gpu_hour"
sys.path.append(str(HOUR))
import planned  # noqa: E402 - a folder of scripts
from hour import Part, run_parts  # noqa: E402
from parts_of_hour import PARTS  # noqa: E402


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


def test_the_parts_of_the_hour_can_be_typed():
    names = [part.name for part in PARTS]
    assert names[:3] == ["machine", "same_bits", "tune_gpt2"] and len({*names}) == len(names)
    assert sum(part.least for part in PARTS) < 60 and all(part.least < part.most for part in PARTS)
    for each in PARTS:
        words = [word for word in each.command if word != sys.executable]
        if words[:2] == ["-m", "spmdtrain.cli"]:
            make_parser().parse_args(words[2:])
        elif words[0].endswith(".py"):
            assert (ROOT / words[0]).is_file()
        for word in words:
            if word.startswith(("configs/", "tests/")):
                assert (ROOT / word).is_file()


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
