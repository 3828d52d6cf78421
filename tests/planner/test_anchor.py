"""Anchored estimates: a measured run sets the scale, a damaged one is refused."""

import json

import pytest

from spmdtrain.cli import main
from spmdtrain.config import load, resolved
from spmdtrain.parallel.mesh import AXES
from spmdtrain.planner import deviceless, report
from spmdtrain.processes import xla_flags


@pytest.fixture
def measured(config, tmp_path):
    """The directory of a run whose steps took 9, 3 and 5 seconds; the first one compiled."""
    metrics = [
        {"step": step, "step_seconds": seconds} for step, seconds in enumerate((9, 3, 5), start=1)
    ]
    started = {"event": "started", "step": 0, "mesh": dict.fromkeys(AXES, 1)}
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(resolved(load(config))))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (run / "events.jsonl").write_text(json.dumps(started) + "\n")
    return run


def test_a_measured_run_anchors_the_estimate(config, measured, capsys):
    command = ["estimate", config, "--hardware", "h100", "--anchor", str(measured), "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(4)


@pytest.mark.seconds
def test_what_a_compiled_step_hides_moves_the_estimate_but_not_an_anchored_one(
    config, measured, capsys, monkeypatch
):
    traffic = [{"kind": "all-reduce", "axis": "data", "sent": 1.0, "sent_beside_work": 1.0}]
    monkeypatch.setattr(xla_flags, "set_xla_flags", lambda **_: ())  # jax has started already
    monkeypatch.setattr(deviceless, "compile_step", lambda *_: {"traffic": traffic})
    monkeypatch.setattr(report, "compiled_text", lambda *_: "")

    def seconds(*options: str) -> float:
        command = ["estimate", config, "--hardware", "h100", "--devices", "8", "--json", *options]
        assert main([*command, "--set", "mesh.data=8"]) == 0
        return json.loads(capsys.readouterr().out)["step_seconds"]

    assert seconds("--compile") < seconds()
    anchored = ("--anchor", str(measured))
    assert seconds("--compile", *anchored) == seconds(*anchored)


DAMAGED = {
    "config.json": ["[1]", "5", "{", "{}"],
    "metrics.jsonl": [
        "",
        "[1]",
        "5",
        "{",
        '{"step_seconds": 1}',
        '{"step": 9, "step_seconds": []}',
    ],
    "events.jsonl": ["", "[1]", "5", "{", '{"step": 0, "mesh": {}}', '{"step": 0, "mesh": 3}'],
}


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("damaged", "text"), [(name, text) for name, texts in DAMAGED.items() for text in texts]
)
def test_an_anchor_that_is_no_run_is_refused(config, measured, capsys, damaged, text):
    (measured / damaged).write_text(text)
    assert main(["estimate", config, "--hardware", "h100", "--anchor", str(measured)]) == 4
    error = capsys.readouterr().err
    assert error.startswith("spmdtrain: ")
    assert error.count("\n") == 1
