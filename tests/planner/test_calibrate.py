"""Measuring this machine: what is written can be read, and says what was measured."""

from pathlib import Path

import pytest

from spmdtrain.cli import main
from spmdtrain.planner import calibrate
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.planner.cost.software import LINK_SHARE, MEMORY_SHARE


@pytest.mark.seconds
def test_calibrate_writes_a_file_that_estimate_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "LONGEST", 1e-9)  # the smallest sizes alone
    path = str(tmp_path / "mine.toml")
    assert main(["calibrate", "--out", path]) == 0
    mine = hardware(path)
    assert mine.per_host == 8
    assert mine.peak("bfloat16") > 1e8
    assert mine.sources["link_bandwidth"].startswith("measured")
    assert mine.sources["network_bandwidth"].startswith("not measured")
    command = ["estimate", "configs/quickstart.toml", "--hardware", path, "--devices", "8"]
    assert main(command) == 0
    assert "x mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("out", "code", "words"),
    [
        ("none/mine.toml", 10, "cannot write none/mine.toml: No such file"),
        ("folder.toml", 10, "cannot write folder.toml: Is a directory"),
        ("mine", 4, "--out mine: --hardware reads .toml files; try --out mine.toml"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path, monkeypatch, capsys, out, code, words
):
    monkeypatch.chdir(tmp_path)
    Path("folder.toml").mkdir()
    monkeypatch.setattr(calibrate, "calibrate", lambda: pytest.fail("measured"))
    assert main(["calibrate", "--out", out]) == code
    assert words in capsys.readouterr().err


def test_an_interrupted_calibrate_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("old.toml").write_text("before")

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "calibrate", interrupted)
    assert [main(["calibrate", "--out", name]) for name in ("old.toml", "new.toml")] == [130, 130]
    files = [(path.name, path.read_text()) for path in tmp_path.iterdir()]
    assert files == [("old.toml", "before")]


def test_figures_times_their_shares_are_the_measured_rates(monkeypatch):
    rates = {"bfloat16": 4e12, "float32": 1e12}
    monkeypatch.setattr(calibrate, "matmul_rate", rates.__getitem__)
    monkeypatch.setattr(calibrate, "copy_rate", lambda: 1e10)
    monkeypatch.setattr(calibrate, "ring", lambda: (5e9, 1e-5))
    found = calibrate.calibrate()
    assert found["bfloat16"] * found["matmul"] == 4e12
    assert found["memory_bandwidth"] * MEMORY_SHARE == 1e10
    assert found["link_bandwidth"] * LINK_SHARE == 5e9
