"""Measuring this machine: what is written can be read, and says what was measured."""

from spmdtrain.cli import main
from spmdtrain.planner import calibrate
from spmdtrain.planner.hardware import hardware
from spmdtrain.planner.stack import LINK, MEMORY


def test_calibrate_writes_a_file_that_estimate_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "LONGEST", 1e-9)  # the smallest sizes alone
    path = str(tmp_path / "mine.toml")
    assert main(["calibrate", "--out", path]) == 0
    mine = hardware(path)
    assert mine.per_host == 8
    assert mine.peak("bfloat16") > 1e8
    assert mine.sources["link_bandwidth"].startswith("measured")
    assert mine.sources["network_bandwidth"].startswith("not measured")
    assert main(["estimate", "configs/quickstart.toml", "--hardware", path, "--devices", "8"]) == 0
    assert "x mine" in capsys.readouterr().out


def test_what_is_written_gives_the_measured_rates_again(monkeypatch):
    monkeypatch.setattr(calibrate, "matmul_rate", lambda dtype: {"bfloat16": 4e12, "float32": 1e12}[dtype])
    monkeypatch.setattr(calibrate, "copy_rate", lambda: 1e10)
    monkeypatch.setattr(calibrate, "ring", lambda: (5e9, 1e-5))
    found = calibrate.calibrate()
    assert found["bfloat16"] * found["matmul"] == 4e12
    assert found["memory_bandwidth"] * MEMORY == 1e10
    assert found["link_bandwidth"] * LINK == 5e9
