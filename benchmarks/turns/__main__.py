"""What one GPU does with each variant of a training step: all compile at once, then run in turns.

    python benchmarks/turns FOLDER [--only NAME ...] [--wait SECONDS] [--dry]

Each variant is a process of its own. All of them compile side by side, and say so; then one after
another is told to run, alone on the GPU, and ends. FOLDER/NAME.json is what it found, NAME.log what
it printed, FOLDER/turns.json all that is known so far. The first and the last are the same, which
shows how far the card has drifted.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from variants import VARIANTS, Variant

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
READY = "ready"


class Turn:
    """A variant's process."""

    def __init__(self, name: str, variant: Variant, folder: Path, dry: bool):
        self.name = name
        self.file = folder / f"{name}.json"
        self.log = folder / f"{name}.log"
        root = Path(variant.root) if variant.root else ROOT
        flags = os.environ.get("XLA_FLAGS", "").split() + list(variant.flags)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            "XLA_FLAGS": " ".join(flags),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_TRACEBACK_FILTERING": "off",
        }
        command = [sys.executable, str(HERE / "one.py"), name, str(self.file)]
        command += ["--dry"] if dry else []
        self.child = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w", encoding="utf-8"),
            text=True,
        )

    def is_ready(self, seconds: float) -> bool:
        """True once the child has compiled; False if it ended or took longer than this."""
        assert self.child.stdout is not None
        readable, _, _ = select.select([self.child.stdout], [], [], max(seconds, 0))
        return bool(readable) and self.child.stdout.readline().strip() == READY

    def run(self, seconds: float) -> dict[str, Any]:
        """Tells the child to run, waits for its end, and returns what it found."""
        assert self.child.stdin is not None
        try:
            self.child.stdin.write("go\n")
            self.child.stdin.flush()
            code = self.child.wait(seconds)
        except (subprocess.TimeoutExpired, BrokenPipeError) as error:
            self.end()
            return {"failed": type(error).__name__}
        if code:
            return {"failed": f"code {code}"}
        return json.loads(self.file.read_text(encoding="utf-8"))

    def end(self) -> None:
        self.child.kill()
        self.child.wait()


def run_all(names: list[str], folder: Path, wait: float, dry: bool) -> dict[str, Any]:
    """Returns what each variant found; one that fails costs itself only."""
    begin = time.monotonic()
    turns = []
    for name in names:
        turns.append(Turn(name, VARIANTS[name], folder, dry))
        if len(turns) == 1:  # its autotuning is what all the others find in the cache
            turns[0].is_ready_first = turns[0].is_ready(wait)  # type: ignore[attr-defined]
    results: dict[str, Any] = {}
    ready = []
    for turn in turns:
        left = wait - (time.monotonic() - begin)
        if getattr(turn, "is_ready_first", False) or turn.is_ready(left):
            ready.append(turn)
        else:
            turn.end()
            results[turn.name] = {"failed": "it did not compile in time: see its log"}
            print(turn.name, results[turn.name]["failed"], flush=True)
    print(f"{len(ready)} compiled after {time.monotonic() - begin:.0f} s", flush=True)
    for turn in ready:
        results[turn.name] = found = turn.run(60)
        said = {key: value for key, value in found.items() if not isinstance(value, list | dict)}
        print(turn.name, json.dumps(said), f"{time.monotonic() - begin:.0f} s", flush=True)
        (folder / "turns.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--wait", type=float, default=240, help="seconds for all to compile")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    chosen = parser.parse_args()
    folder = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = run_all(chosen.only, folder, chosen.wait, chosen.dry)
    sys.exit(all("failed" in each for each in results.values()))


if __name__ == "__main__":
    main()
