"""What is published: wheel and sdist, built and tried in a fresh environment, and the workflow that
checks them.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
IGNORED = shutil.ignore_patterns(
    ".venv*", ".git", "build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache"
)
PROGRAM = """
import pallas_kernels, spmdtrain as st
assert pallas_kernels.__file__.startswith({prefix!r}) and st.__file__.startswith({prefix!r})
config = st.load("quickstart.toml", ["train.steps=20"])
assert config.train.steps == 20
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What it printed; an error that shows it where the command fails. Nothing of this checkout is
    on its path.
    """
    env = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")
    }
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with wheel and sdist; the wheel is made from the sdist."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "source", ignore=IGNORED)
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", cwd=folder / "source")
    return folder / "dist"


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_package_and_nothing_else(built):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    sources = {
        str(path.relative_to(ROOT))
        for house in ("spmdtrain", "pallas_kernels")
        for path in _sources(house)
    }
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert packed >= sources | {"LICENSE", "README.md", "pyproject.toml"}


def _sources(house: str) -> list[Path]:
    """Every file that git knows below the package: what the package needs, it has."""
    known = run("git", "-C", ROOT, "ls-files", house, cwd=ROOT)
    return [ROOT / name for name in known.splitlines()]


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_environment(built, tmp_path):
    """Installed with the pinned versions: the imports, the help, and one step of the quickstart."""
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    bin = tmp_path / "venv" / "bin"
    run(bin / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    shutil.copy(ROOT / "configs" / "quickstart.toml", tmp_path)
    run(bin / "python", "-c", PROGRAM.format(prefix=str(tmp_path)), cwd=tmp_path)
    assert "train" in run(bin / "spmdtrain", "--help", cwd=tmp_path)
    train = ["train", "quickstart.toml", "--simulate-devices", "8", "--set", "train.steps=1"]
    run(
        bin / "spmdtrain",
        *train,
        "--set",
        "optimizer.warmup=0",
        "--set",
        "eval.every=0",
        cwd=tmp_path,
    )
    assert (tmp_path / "runs/quickstart/checkpoints/1").is_dir()


@pytest.mark.parametrize(
    ("file", "wanted"), [("check", {"check", "test-all", "docs"}), ("release", {"test-slow"})]
)
def test_the_workflow_calls_targets_that_exist(file, wanted):
    workflow = yaml.safe_load((ROOT / f".github/workflows/{file}.yml").read_text())
    commands = [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    called = {command.split()[1] for command in commands if command.startswith("make ")}
    assert called >= wanted
    assert called <= set(targets)
    assert all(
        (ROOT / file).exists()
        for command in commands
        for file in re.findall(r"tests/\S+\.py", command)
    )


@pytest.mark.parametrize(
    ("target", "line"),
    [
        # `data prepare --tokenizer` needs it, and each of these counts as installed.
        (".venv/installed", r"pip install .* -e '\.\[hf\]'"),
        (".venv/installed-dev", r"pip install .* -e '\.\[dev,hf\]'"),
        (".venv/installed-docs", r"pip install .* -e '\.\[docs,hf\]'"),
        ("docs", r"the site: build/site/index\.html"),
    ],
)
def test_make_leaves_a_newcomer_with_what_comes_next(target, line):
    planned = ["make", "--dry-run", "--always-make", target]
    commands = subprocess.run(planned, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(line, commands)
