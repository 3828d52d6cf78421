"""`make fleet`: its layouts are runs that a person could start, an abort is a row, and quick ones
compile in CI.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from compiled_estimates import compiled_estimate

from spmdtrain.cli import main

ROOT = Path(__file__).parents[1]
plugin = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs jax's CUDA plugin"
)


def _fleet():
    spec = importlib.util.spec_from_file_location("fleet", ROOT / "benchmarks" / "fleet.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["fleet"] = module
    spec.loader.exec_module(module)
    return module


fleet = _fleet()
# Narrow: seconds instead of minutes.
NARROW = (
    "model.layers=4",
    "model.embed=512",
    "model.heads=8",
    "model.ffn=1024",
    "model.vocab=4096",
    "train.sequence_length=512",
)


def estimated(layout, *settings: str) -> dict:
    """The compiled estimate of the layout, made narrow."""
    return compiled_estimate(layout.command[1:], (*NARROW, *settings))


def named(name: str):
    (layout,) = (each for each in fleet.LAYOUTS if each.name == name)
    return layout


@plugin
def test_a_pipeline_compiles_for_512():
    found = estimated(
        named("llama3_70b 512 as configured"), "model.layers=20", "train.global_batch=64"
    )
    assert found["devices"] == 512
    assert {"pipeline", "data", "tensor"} <= {each["axis"] for each in found["compiled"]["traffic"]}


def test_every_layout_is_there_once_and_every_flagship_is_compiled_as_configured():
    assert len({fleet.kept_file(layout) for layout in fleet.LAYOUTS}) == len(fleet.LAYOUTS)
    as_configured = {layout.config for layout in fleet.LAYOUTS if not layout.mesh}
    assert as_configured >= {
        "llama3_8b",
        "llama3_70b",
        "llama3_405b",
        "gpt3_175b",
        "gpt_530b",
        "gpt_1t",
        "mixtral_8x7b",
        "qwen3_30b_a3b",
        "deepseek_v3",
        "qwen3_5_27b",
        "gemma4_31b",
        "nemotron3_nano_30b_a3b",
    }


@pytest.mark.seconds
@pytest.mark.parametrize("layout", fleet.LAYOUTS, ids=lambda layout: layout.name)
def test_a_run_would_take_the_layout(layout, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = [part for part in layout.command if part != "--compile"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == layout.devices
    assert found["fits"]


def test_what_does_not_compile_is_a_row():
    layout = fleet.Layout("no_such_config", "h100", 8)
    result = fleet.compile_layout(layout)
    assert result["refused"].startswith(
        "spmdtrain: there is no config file configs/no_such_config.toml"
    )
    row = f"| no_such_config on 8 h100, as configured | **no**: {result['refused']} |"
    assert any(line.startswith(row) for line in fleet.page([(layout, result)]).splitlines())


def test_the_line_that_tells_why_xla_ended_the_process():
    errors = (
        'a remark\nloc("f.66"): error:  size mismatch\n'
        "F1122 09:06:38 error_handler.cc:44] *** Begin stack trace"
    )
    assert fleet._reason(errors) == 'loc("f.66"): error:  size mismatch'
    assert fleet._reason("") == "ended without a word"


def test_the_page_compares_bytes_with_theory():
    sent = {
        "kind": "all-gather",
        "axis": "fsdp",
        "inside_loop": True,
        "bytes": 4e9,
        "sent": 3e9,
        "sent_beside_work": 1.5e9,
    }
    result = {
        "seconds": 9.0,
        "made": "today, jax 1",
        "step_seconds": 1.25,
        "memory_bytes_per_device": {"total": 4e9},
        "needed_traffic": {"fsdp": 2e9},
        "compiled": {
            "compile_seconds": 8.0,
            "memory": {
                "argument_bytes": 3e9,
                "output_bytes": 2e9,
                "alias_bytes": 2e9,
                "temp_bytes": 2e9,
            },
            "traffic": [sent, sent | {"axis": "tensor", "sent_beside_work": 0.6e9}],
        },
        "layout": dict.fromkeys(fleet.AXES, 1)
        | {"fsdp": 2, "tensor": 8, "collective_matmul": False},
    }
    layout = fleet.Layout("llama3_8b", "h100", 8, "fsdp=8", published=(2.5, "a paper"))
    lines = fleet.page([(layout, result)]).splitlines()
    title = "llama3_8b on 8 h100, fsdp&nbsp;8"
    assert f"| {title} | yes | 8 | 5.0 | 4.0 | 1.25 | 35% | 1.25 | 2.5 | today, jax 1 |" in lines
    assert f"| {title} | fsdp | 4 + 0 |  |  |  |  | 3 | 2 | 50% |" in lines
    assert f"- {title}: 2.5 s. a paper" in lines
    hidden = " ".join(lines[lines.index("## Bytes") - 3 : lines.index("## Bytes")])
    assert "50% of those over axes that cross hosts and 20% of those" in hidden
    assert "| h100 | 20.0% |  |  |  | 50.0% |  |  |  |" in lines


def test_a_layout_that_is_not_compiled_again_keeps_its_row():
    before = (ROOT / "docs" / "fleet.md").read_text()
    assert fleet.page([], before) == before
    layout = next(each for each in fleet.LAYOUTS if fleet._title(each) in fleet.rows_on(before))
    refused = {"refused": "a reason", "seconds": 3.0, "made": "today, jax 1"}
    after = fleet.page([(layout, refused)], before)
    title = fleet._title(layout)
    rows, changed = fleet.rows_on(before), fleet.rows_on(after)
    assert changed.pop(title).overview.endswith("| today, jax 1 |")
    del rows[title]
    assert changed == rows


def test_the_planner_takes_the_mean_over_layouts():
    def result(hidden: float, sent: float, collective_matmul: bool = False) -> dict:
        traffic = {"kind": "all-gather", "axis": "tensor", "sent": sent}
        return {
            "layout": {"pipeline": 1, "collective_matmul": collective_matmul},
            "compiled": {"traffic": [traffic | {"sent_beside_work": hidden * sent}]},
        }

    h100 = fleet.Layout("llama3_8b", "h100", 8)
    a100 = fleet.Layout("gpt_1t", "a100-80", 8)
    found = [
        (h100, result(0.5, 1.0)),
        (h100, result(0.25, 9.0)),
        (h100, result(1.0, 1.0, collective_matmul=True)),
        (a100, result(0.125, 1.0)),
        (a100, {"refused": "a reason"}),
    ]
    assert fleet.overlap_of_fleet(found) == {
        "a100": {"tensor": 0.125},
        "h100": {"collective_matmul": 1.0, "tensor": 0.375},
    }


def test_the_page_and_the_planner_have_the_same_shares():
    lines = (ROOT / "docs" / "fleet.md").read_text().splitlines()
    table = fleet.overlap_table(json.loads(fleet.SHARES.read_text()))
    start = lines.index(table[0])
    assert lines[start : start + len(table)] == table
