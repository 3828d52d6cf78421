"""`show --svg`: which devices hold which part, against what a person works out on paper."""

from pathlib import Path
from xml.etree import ElementTree

import jax
import pytest
from helpers import mesh_of, tiny

from spmdtrain.cli import main
from spmdtrain.config import ConfigError, StorageError
from spmdtrain.show.sharding_svg import Panel, draw_panel, svg
from spmdtrain.train.shard import shard

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def texts_of(picture: str) -> list[str]:
    """Every text of the picture, in the order in which it is drawn."""
    root = ElementTree.fromstring(picture)
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def drawn(*overrides: str) -> list[str]:
    setup = shard(tiny(*overrides), devices=jax.devices()[: mesh_of(overrides)])
    return texts_of(svg(setup))


def contains(texts: list[str], *wanted: str) -> bool:
    """Whether `wanted` follow each other somewhere in `texts`."""
    ends = range(len(wanted), len(texts) + 1)
    return any(texts[end - len(wanted) : end] == list(wanted) for end in ends)


@pytest.mark.core
def test_a_mesh_a_batch_and_weights_split_over_three_axes():
    texts = drawn("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    assert contains(texts, "the mesh", "data 2 x fsdp 2 x tensor 2", "tensor 0", "tensor 1")
    assert contains(texts, "data 0, fsdp 1", "2", "3", "data 1, fsdp 0", "4", "5")
    assert contains(texts, "sequence 0..3", "0 1", "sequence 4..7", "2 3", "sequence 8..11", "4 5")
    of_up = ["layer 2 x embed 32 x ffn 128", "ffn 0..63", "ffn 64..127"]
    assert contains(texts, "mlp.up_ef and 1 like it", *of_up, "embed 0..15", "0 4", "1 5")
    assert contains(texts, "embed 16..31", "2 6", "3 7")
    assert contains(texts, "layer 2 x norm 32, whole on every device", "", "", "0..7")


def test_stages_of_a_pipeline_hold_their_own_layers():
    texts = drawn("mesh.pipeline=2", "mesh.data=2", "train.microbatch=2")
    assert contains(texts, "microbatch 4 x sequence 4 x token 16", "", "sequence 0..1", "0 2")
    assert contains(texts, "stage 0", "0 1", "stage 1", "2 3")


def test_one_device_holds_everything():
    texts = drawn()
    assert contains(texts, "the mesh", "one device", "", "", "0")
    assert contains(texts, "sequence 16 x token 16, whole on every device", "", "", "0")


def test_a_table_beyond_16_rows_and_8_columns_is_cut_and_says_so():
    rows = [f"row {at}" for at in range(20)]
    columns = [f"column {at}" for at in range(9)]
    panel = Panel("title", "subtitle", rows, columns, [["x"] * 9] * 20, "#ffffff")
    texts = texts_of(
        f'<svg xmlns="http://www.w3.org/2000/svg">{"".join(draw_panel(panel, 0, 0))}</svg>'
    )
    assert "row 15" in texts and "row 16" not in texts
    assert "column 7" in texts and "column 8" not in texts
    assert texts.count("x") == 16 * 8
    assert texts[-1] == "and 4 more rows and 1 more columns"


def test_the_command_writes_the_file_and_says_where(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["show", str(QUICKSTART), "--simulate-devices", "8", "--svg", "mesh.svg"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.endswith(
        "mesh.svg: the mesh, a batch and the parameters, drawn\n"
    )
    assert "gpt, 120,576 parameters, on 8 devices" in (tmp_path / "mesh.svg").read_text()
    assert main([*arguments, "--set", "model.heads=3"]) == ConfigError.exit_code


def test_a_file_that_cannot_be_written_costs_one_line(tmp_path, capsys):
    path = tmp_path / "missing" / "mesh.svg"
    arguments = ["show", str(QUICKSTART), "--simulate-devices", "8", "--svg", str(path)]
    assert main(arguments) == StorageError.exit_code
    assert capsys.readouterr().err == f"spmdtrain: cannot write {path}: No such file or directory\n"
