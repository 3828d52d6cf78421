"""A run imports the files of the features that its settings ask for, and of no others; a first run
calls few files at all.
"""

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
HOUSES = tuple(f"{ROOT / house}{os.sep}" for house in ("spmdtrain", "pallas_kernels"))
# A program that trains, and prints what it has imported, and the files of which it has called a
# function: not while it imported them.
PROGRAM = f"""
import sys
import threading

called = set()

def note(frame, event, _):
    code = frame.f_code
    if event != "call" or code.co_name == "<module>" or code.co_filename in called:
        return
    if not code.co_filename.startswith({HOUSES}):
        return
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return
        frame = frame.f_back
    called.add(code.co_filename)

sys.setprofile(note)
threading.setprofile(note)
from spmdtrain.cli import main
assert main(sys.argv[1:]) == 0
sys.setprofile(None)
print("imported", *(name for name in sys.modules if name.split(".")[0] == "spmdtrain"))
print("called", *called)
"""
MOST_CALLED = 200  # files of which a quickstart run calls a function
# Of a quickstart run: it is guarded and recorded, and writes its page.
ON = {"guards", "page", "record", "stages"}
# What is no feature of the bill, and no quickstart run needs either.
ROOMS_OFF = (
    *("spmdtrain.lab.certify", "spmdtrain.inference", "spmdtrain.interop", "spmdtrain.launch"),
    *("spmdtrain.planner", "spmdtrain.show", "spmdtrain.config.published"),
    *("spmdtrain.cli.data", "spmdtrain.cli.planning", "spmdtrain.cli.published"),
    *("spmdtrain.cli.machine",),
    *("spmdtrain.data.mixtures", "spmdtrain.data.prepare", "spmdtrain.data.texts"),
    *("spmdtrain.lab.diff", "spmdtrain.lab.replay", "spmdtrain.lab.strategies"),
    *("spmdtrain.pipeline.executor", "spmdtrain.pipeline.draw"),
    *("spmdtrain.running.distillation", "spmdtrain.running.published"),
    *("spmdtrain.running.guards.other_devices", "spmdtrain.running.guards.replicas"),
    *("spmdtrain.running.report.profile", "spmdtrain.running.report.tensorboard_sink"),
    *("spmdtrain.running.report.wandb_sink", "spmdtrain.running.start.init_from"),
    *("spmdtrain.running.guards.stragglers", "spmdtrain.data.cut_samples"),
    *("spmdtrain.pipeline.schedule", "spmdtrain.pipeline.find_table"),
    *("spmdtrain.parallel.wide_sums", "spmdtrain.train.updates.host_updates"),
)


def used(folder: Path, *settings: str) -> dict[str, set[str]]:
    """What a run of one step on one device has imported, and called."""
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
    lines = [line.split() for line in ended.stdout.splitlines()]
    return {line[0]: set(line[1:]) for line in lines if line and line[0] in ("imported", "called")}


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
def by_a_quickstart(tmp_path_factory) -> dict[str, set[str]]:
    return used(tmp_path_factory.mktemp("quickstart"))


@pytest.fixture
def of_a_quickstart(by_a_quickstart) -> set[str]:
    return by_a_quickstart["imported"]


def test_a_program_in_another_folder_imports_the_tree_of_its_test(tmp_path):
    """Also where the tests were started with a relative path, or with none."""
    program = "import spmdtrain; print(spmdtrain.__file__)"
    said = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=tmp_path)
    assert Path(said.strip()) == ROOT / "spmdtrain" / "__init__.py"


def test_a_quickstart_run_is_read_in_few_files(by_a_quickstart):
    assert str(ROOT / "spmdtrain" / "train" / "step.py") in by_a_quickstart["called"]
    assert len(by_a_quickstart["called"]) < MOST_CALLED


def test_a_quickstart_run_imports_no_file_of_a_feature_that_is_off(of_a_quickstart):
    files = {name: inside(of_a_quickstart, homes_of(name)) for name in sorted(FEATURES.keys() - ON)}
    assert {name: modules for name, modules in files.items() if modules} == {}


def test_a_quickstart_run_imports_no_room_that_it_has_no_use_for(of_a_quickstart):
    assert inside(of_a_quickstart, ROOMS_OFF) == []
    assert inside(of_a_quickstart, ("spmdtrain.running.loop", "spmdtrain.lab.page"))


def test_a_rider_that_is_off_is_not_imported_and_one_that_is_on_is(tmp_path):
    settings = ("log.record=none", "log.report=never", "guard.replica_check=1")
    modules = used(tmp_path, *settings)["imported"]
    off = ("step_record", "bundle", "token_hash")
    assert inside(modules, tuple(f"spmdtrain.running.record.{name}" for name in off)) == []
    assert inside(modules, ("spmdtrain.lab.page",)) == []
    assert inside(modules, ("spmdtrain.running.guards.replicas",))
