"""Where does a step of GPT-2 124M spend its time? Traces one; prints it by sort of work and part.

python benchmarks/gpu_hour/profiled.py FILE.json [--config FILE] [--set KEY=VALUE]

FILE.json is the table; the trace itself, which is large, is thrown away.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from trained import CONFIG, SETTINGS
from training import ROOT, arguments, train

from spmdtrain.config.run_files import PROFILE, SECONDS

STEP = 12


def main() -> None:
    chosen = arguments(__doc__, CONFIG).parse_args()
    settings = [*SETTINGS, "checkpoint.every=0", f"train.steps={STEP + 2}", f"log.profile={STEP}"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(chosen.config, run, settings + chosen.set)
        command = [sys.executable, "-m", "spmdtrain.cli", "profile", str(run)]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode:
            raise SystemExit(f"profile ended with code {done.returncode}")
        shutil.copy(run / PROFILE / f"step{STEP}" / SECONDS, chosen.file)


if __name__ == "__main__":
    main()
