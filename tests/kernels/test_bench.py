"""The table of times: that the script runs from end to end, on no GPU."""

import json
import sys

import pytest

from pallas_kernels import bench


@pytest.mark.seconds
def test_dry_run(monkeypatch, tmp_path, capsys):
    path = tmp_path / "kernels.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--dry", "--first", "1", "--json", str(path)])
    bench.main()
    rows = json.loads(path.read_text())["rows"]
    timed = [(row["op"], row["implementation"]) for row in rows if "forward" in row]
    # The first cases are float32: of attention, of experts and of a scan over chunks.
    refused = ["mosaic", "cudnn", "mosaic", "mosaic"]
    assert timed == [
        (op, name)
        for op, names in bench.IMPLEMENTATIONS.items()
        for name in names
        if name not in refused
    ]
    assert [row["implementation"] for row in rows if "refused" in row] == refused
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 1
