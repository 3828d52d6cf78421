"""The command line from text files to text: prepare, show, train, sample; and what it does before
jax starts.
"""

import argparse
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from helpers import prepared, trained

from spmdtrain.cli import main
from spmdtrain.cli.parser import make_parser
from spmdtrain.train.state import bytes_per_device

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 60
CONFIG = """
[model]
layers = 2
embed = 32
heads = 4
max_length = 48

[mesh]
data = 2
fsdp = 2
tensor = 2

[train]
steps = 100
global_batch = 8
sequence_length = 16

[optimizer]
learning_rate = 1e-2

[data]
corpus = "tokens"
path = "fox.bin"
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with a prepared text, a config and a run that was trained by the command line on
    eight devices.
    """
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "fox.txt").write_text(TEXT)
    (folder / "fox.toml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert (
            main(
                [
                    "data",
                    "prepare",
                    "fox.txt",
                    "--out",
                    "fox",
                    "--tokenizer",
                    "characters",
                    "--end-of-text",
                    "none",
                ]
            )
            == 0
        )
        assert main(["train", "fox.toml"]) == 0
    return folder


@pytest.fixture
def here(workplace, monkeypatch) -> Path:
    monkeypatch.chdir(workplace)
    return workplace


@pytest.mark.core
@pytest.mark.seconds
def test_train_writes_to_runs_slash_the_name_of_the_config(here):
    assert (here / "runs" / "fox" / "checkpoints" / "100").is_dir()


@pytest.mark.core
@pytest.mark.usefixtures("here")
@pytest.mark.seconds
def test_sample_says_what_was_learned_alike_on_one_device_and_on_a_mesh(capsys):
    arguments = ["sample", "runs/fox", "--prompt", "The qu", "--length", "12", "--temperature", "0"]
    texts = []
    for mesh in (
        [],
        ["--set", "mesh.tensor=2"],
        ["--set", "mesh.tensor=2", "--set", "mesh.fsdp=2"],
    ):
        assert main([*arguments, *mesh]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == "The quick brown fox\n"[: len("The qu") + 12] + "\n"
    assert texts[1:] == texts[:1] * 2


@pytest.mark.usefixtures("here")
@pytest.mark.seconds
def test_sample_draws_another_text_for_another_seed_and_the_same_for_the_same(capsys):
    def sample(seed: str) -> str:
        assert (
            main(
                [
                    "sample",
                    "runs/fox",
                    "--prompt",
                    "T",
                    "--seed",
                    seed,
                    "--temperature",
                    "5",
                    "--top-k",
                    "20",
                ]
            )
            == 0
        )
        return capsys.readouterr().out

    first = sample("0")
    assert len(first) == 48 + 1, "as many as the model has positions for"
    assert sample("0") == first != sample("1")


@pytest.mark.seconds
def test_a_run_of_a_kernel_that_is_not_here_is_sampled_with_one_that_is(here, capsys):
    run = here / "elsewhere"
    shutil.copytree(here / "runs" / "fox", run)
    saved = json.loads((run / "config.json").read_text())
    saved["config"]["model"]["attention"], saved["origin"]["model.attention"] = "mosaic", "--set"
    (run / "config.json").write_text(json.dumps(saved))
    arguments = ["sample", str(run), "--prompt", "The qu", "--length", "12", "--temperature", "0"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == "The quick brown fox\n"[: len("The qu") + 12] + "\n"
    assert main([*arguments, "--set", "model.attention=mosaic"]) == 4
    assert "mosaic" in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_show_describes_every_parameter_and_its_bytes_per_device(capsys):
    assert main(["show", "fox.toml", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    rows = {row["path"]: row for row in shown["parameters"]}
    assert shown["mesh"]["tensor"] == 2 and shown["origin"]["mesh.tensor"] == "fox.toml"
    assert rows["tokens.table_ve"]["logical_axes"] == ["vocab", "embed"]
    assert rows["tokens.table_ve"]["mesh_axes"] == [["tensor"], ["fsdp"]]
    assert (
        rows["tokens.table_ve"]["bytes_per_device"]
        == 4 * rows["tokens.table_ve"]["shape"][0] * 32 // 4
    )
    assert shown["totals"]["bytes_per_device"] == sum(
        row["bytes_per_device"] for row in rows.values()
    )
    assert main(["show", "fox.toml"]) == 0
    table = capsys.readouterr().out
    assert all(path in table for path in rows) and "data 2 x fsdp 2 x tensor 2" in table


@pytest.mark.seconds
def test_show_agrees_with_what_really_rests_on_a_device():
    settings = (
        "mesh.data=2",
        "mesh.fsdp=2",
        "mesh.tensor=2",
        "train.zero=1",
        "data.packing=documents",
    )
    state = trained(*settings, steps=1)[1]
    first = jax.devices()[0]

    def held(tree) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(
            shard.data.nbytes
            for leaf in leaves
            for shard in leaf.addressable_shards
            if shard.device == first
        )

    abstract = prepared(*settings).state
    assert bytes_per_device(abstract.params) == held(state.params)
    assert bytes_per_device(abstract.opt_state) == held(state.opt_state)


@pytest.mark.usefixtures("here")
def test_print_config_ends_before_jax_and_names_origins(capsys):
    assert main(["train", "fox.toml", "--set", "train.steps=7", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert (
        "steps = 7  # --set" in printed
        and "embed = 32  # fox.toml" in printed
        and "seed = 0  # default" in printed
    )
    assert "#   --xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false\n" in printed
    assert tomllib.loads(printed)["train"]["steps"] == 7


def test_compiled_programs_are_kept_between_runs(here, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        main(["show", "fox.toml", "--json"])
        assert jax.config.jax_compilation_cache_dir == str(
            here / "cache" / "spmdtrain" / "compiled"
        )
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """(words of a command, the module of what it runs), of every command."""
    groups = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    for group in groups:
        for name, each in group.choices.items():
            yield from commands(each, (*words, name))
    if not groups:
        yield words, parser.get_default("command").__module__


def test_each_command_is_a_file_of_its_name_with_its_arguments():
    homes = dict(commands(make_parser()))
    assert ("train",) in homes and ("data", "prepare") in homes
    assert len({*homes.values()}) == len(homes)
    for words, module in homes.items():
        assert {*words} <= {*re.split("[._]", module)}, f"{words} is in {module}"
        here = vars(sys.modules[module]).items()
        adds = [name for name, each in here if name[:4] == "add_" and each.__module__ == module]
        assert len(adds) == 1, f"{module} has the arguments of {adds}"
