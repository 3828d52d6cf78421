"""Hardware: the known devices, files that describe others, and sweeps of one figure."""

from pathlib import Path

import pytest

from spmdtrain.config import ConfigError
from spmdtrain.planner.cost.hardware import DEVICES, hardware, swept

H100 = DEVICES["h100"]


def test_hardware_files(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'extends = "h100"\nnetwork_bandwidth = 25e9\n[sources]\nnetwork_bandwidth = "measured"\n'
    )
    mine = hardware(str(path))
    assert (mine.name, mine.network_bandwidth, mine.memory) == ("mine", 25e9, H100.memory)
    assert mine.sources["network_bandwidth"] == "measured"
    (tmp_path / "inner").mkdir()
    # Beside it, not where we are.
    (tmp_path / "inner" / "other.toml").write_text('extends = "../mine.toml"\n')
    assert hardware(str(tmp_path / "inner" / "other.toml")).network_bandwidth == 25e9
    for text, complaint in (
        ("memory = 1e9\n", "lacks bfloat16"),
        ('extends = "h100"\nmemory = -1\n', "positive"),
        ('extends = "h100"\nmemroy = 1\n', "no such figure"),
        ("memory =\n", "not TOML"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            hardware(str(path))
    with pytest.raises(ConfigError, match="unknown hardware"):
        hardware("h1000")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("name = 3", "name must be a string; found 3"),
        ("sources = 'x'", "sources must be a table of strings; found 'x'"),
        ("sources = { memory = 3 }", "sources must be a table of strings"),
        ("extends = 3", "extends must be a string; found 3"),
        ("extends = ''", "unknown hardware"),
        ("extends = 'mine.toml'", "extends itself; found mine.toml -> mine.toml"),
        ("extends = 'other.toml'", "extends itself; found mine.toml -> other.toml -> mine.toml"),
        ("per_host = 2.5", "per_host must be a whole number of at least 1; found 2.5"),
        ("cores = 0.5", "cores must be a whole number"),
        ("bfloat16 = nan", "bfloat16 must be a positive number"),
        ("bfloat16 = inf", "bfloat16 must be a positive number"),
        ("memory = 1e-320", "memory must be a positive number"),
        (f"cores = 1{400 * '0'}", "cores must be a whole number"),
        ("memory = true", "memory must be a positive number"),
    ],
)
def test_a_wrong_line_of_a_hardware_file_is_named(tmp_path, monkeypatch, line, complaint):
    monkeypatch.chdir(tmp_path)
    Path("other.toml").write_text("extends = 'mine.toml'\n")
    Path("mine.toml").write_text(
        line if line.startswith("extends") else f"extends = 'h100'\n{line}\n"
    )
    with pytest.raises(ConfigError, match=complaint):
        hardware("mine.toml")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("per_host", 0.5),
        ("cores", 0.5),
        ("memory_bandwidth", float("nan")),
        ("cores", float("inf")),
    ],
)
def test_a_figure_that_no_device_has_is_not_swept(key, value):
    with pytest.raises(ConfigError, match=f"hardware.{key} must be a"):
        swept(H100, key, value)


def test_a_swept_figure_has_the_type_of_its_field():
    assert swept(H100, "power", 350.5).power == 350.5
    assert isinstance(swept(H100, "per_host", 4.0).per_host, int)


def test_every_figure_of_every_device_has_a_source():
    for device in DEVICES.values():
        assert {
            "bfloat16",
            "memory",
            "memory_bandwidth",
            "link_bandwidth",
            "network_bandwidth",
        } <= set(device.sources)
