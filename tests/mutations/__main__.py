"""`make mutations`: breaks a copy of the tree in one place at a time and sees the named test fail.

    python -m tests.mutations [WORDS ...]    only those whose description holds one of the words

Two at a time on two cores. Ends with 1 where a breakage survives, or a test fails without one.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations.breakages import BREAKAGES, Breakage
from tests.mutations.place import broken

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("spmdtrain", "pallas_kernels", "tests", "configs", "examples", "benchmarks")
FILES = ("pyproject.toml", "Makefile")  # which tests read where they begin
SURVIVES, NO_TESTS = 0, 5  # pytest's exit codes


def copied(directory: Path) -> Path:
    for room in ROOMS:
        shutil.copytree(ROOT / room, directory / room, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, directory)
    return directory


def run_tests(tree: Path, arguments: str) -> int:
    """pytest's exit code. What another breakage has compiled is not compiled again."""
    command = f"{sys.executable} -m pytest -q -x -p no:cacheprovider {arguments}"
    environment = os.environ | {"PYTHONPATH": str(tree)}
    with (tree / "log").open("w") as log:
        return subprocess.run(
            command, shell=True, cwd=tree, env=environment, stdout=log, stderr=log
        ).returncode


def try_one(breakage: Breakage) -> str:
    """How the test that is to catch it ended."""
    with tempfile.TemporaryDirectory(prefix="breakage-") as directory:
        tree = copied(Path(directory))
        file = tree / "spmdtrain" / breakage.file
        file.write_text(broken(file.read_text(), breakage.before, breakage.after))
        code = run_tests(tree, breakage.caught_by)
        log = (tree / "log").read_text()
        failed = next(
            (line for line in log.splitlines() if line.startswith(("FAILED", "ERROR", "Fatal"))), ""
        )
    verdict = {SURVIVES: "SURVIVES", NO_TESTS: "NO TEST"}.get(code, "caught")
    print(f"{verdict:<9} {breakage.what}  [{breakage.caught_by}] {failed[:140]}", flush=True)
    return verdict


def unbroken(arguments: str) -> str:
    """The tests pass where nothing is broken."""
    with tempfile.TemporaryDirectory(prefix="breakage-") as directory:
        code = run_tests(copied(Path(directory)), arguments)
    verdict = "passes" if code == 0 else f"FAILS WITHOUT A BREAKAGE ({code})"
    print(f"{verdict:<9} {arguments}", flush=True)
    return verdict


def main(words: list[str]) -> int:
    chosen = [each for each in BREAKAGES if not words or any(word in each.what for word in words)]
    with (
        ThreadPoolExecutor(2) as pool,
        tempfile.TemporaryDirectory(prefix="breakages-compiled-") as compiled,
    ):
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": compiled,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }
        passing = list(pool.map(unbroken, dict.fromkeys(each.caught_by for each in chosen)))
        verdicts = list(pool.map(try_one, chosen))
    print(f"{verdicts.count('caught')} of {len(chosen)} caught")
    return 0 if set(verdicts) == {"caught"} and set(passing) == {"passes"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
