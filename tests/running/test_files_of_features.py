"""A run imports the files of the features that its settings ask for, and of no others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import CHEAP_FLAGS
from test_feature_bill import FEATURES

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
# A program that trains, and prints what it has imported.
PROGRAM = """
import sys
from spmdtrain.cli import main
assert main(sys.argv[1:]) == 0
print("imported", *(name for name in sys.modules if name.split(".")[0] == "spmdtrain"))
"""
# Of a quickstart run: it is guarded and recorded, and writes its page.
ON = {"guards", "page", "record", "stages"}
# What is no feature of the bill, and no quickstart run needs either.
ROOMS_OFF = (
    *("spmdtrain.lab.certify", "spmdtrain.inference", "spmdtrain.interop", "spmdtrain.launch"),
    *("spmdtrain.planner", "spmdtrain.show", "spmdtrain.config.published"),
    *("spmdtrain.cli.data", "spmdtrain.cli.planning", "spmdtrain.cli.published"),
    *("spmdtrain.data.mixtures", "spmdtrain.data.prepare", "spmdtrain.data.texts"),
    *("spmdtrain.lab.diff", "spmdtrain.lab.replay", "spmdtrain.lab.strategies"),
    *("spmdtrain.pipeline.executor", "spmdtrain.pipeline.draw"),
    *("spmdtrain.running.distillation", "spmdtrain.running.published"),
    *("spmdtrain.running.guards.other_devices", "spmdtrain.running.guards.replicas"),
    *("spmdtrain.running.report.profile", "spmdtrain.running.report.tensorboard_sink"),
    *("spmdtrain.running.report.wandb_sink", "spmdtrain.running.start.init_from"),
    *("spmdtrain.running.guards.stragglers", "spmdtrain.data.cut_samples"),
    *("spmdtrain.pipeline.find_table", "spmdtrain.parallel.wide_sums"),
    *("spmdtrain.train.updates.host_updates", "spmdtrain.train.updates.router_load"),
)


def imported(folder: Path, *settings: str) -> set[str]:
    """The modules that a run of one step imports, on one device."""
    alone = ("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "train.steps=1", "eval.every=0")
    small = ("model.layers=1", "model.embed=16", "train.global_batch=2", "train.sequence_length=8")
    sets = [word for each in (*alone, *small, *settings) for word in ("--set", each)]
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            "train",
            str(QUICKSTART),
            "--run",
            str(folder / "run"),
            *sets,
        ],
        env=os.environ | {"XLA_FLAGS": CHEAP_FLAGS, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("imported ")]
    return set(line.split()[1:])


def inside(modules: set[str], places: tuple[str, ...]) -> list[str]:
    """Those of the modules that are one of the places, or in one."""
    return sorted(
        module
        for module in modules
        if any(module == place or module.startswith(f"{place}.") for place in places)
    )


def homes_of(name: str) -> tuple[str, ...]:
    """The modules and packages of a feature, but for its settings: those are read to be refused."""
    homes = (home.removesuffix(".py") for home in FEATURES[name].homes)
    return tuple(
        f"spmdtrain.{home.replace('/', '.')}" for home in homes if "config/schema" not in home
    )


@pytest.fixture(scope="module")
def of_a_quickstart(tmp_path_factory) -> set[str]:
    return imported(tmp_path_factory.mktemp("quickstart"))


def test_a_quickstart_run_imports_no_file_of_a_feature_that_is_off(of_a_quickstart):
    files = {name: inside(of_a_quickstart, homes_of(name)) for name in sorted(FEATURES.keys() - ON)}
    assert {name: modules for name, modules in files.items() if modules} == {}


def test_a_quickstart_run_imports_no_room_that_it_has_no_use_for(of_a_quickstart):
    assert inside(of_a_quickstart, ROOMS_OFF) == []
    assert inside(of_a_quickstart, ("spmdtrain.running.loop", "spmdtrain.lab.page"))


def test_a_rider_that_is_off_is_not_imported_and_one_that_is_on_is(tmp_path):
    settings = ("log.record=none", "log.report=never", "guard.replica_check=1")
    modules = imported(tmp_path, *settings)
    off = ("step_record", "bundle", "token_hash")
    assert inside(modules, tuple(f"spmdtrain.running.record.{name}" for name in off)) == []
    assert inside(modules, ("spmdtrain.lab.page",)) == []
    assert inside(modules, ("spmdtrain.running.guards.replicas",))
