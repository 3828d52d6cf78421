"""`spmdtrain estimate --compile` in a process of its own: XLA may end the process, and reads its
flags once.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absent_gpu import UNTUNED

ROOT = Path(__file__).parents[1]


def compiled_estimate(arguments: Sequence[str], settings: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON of `estimate ARGUMENTS --compile --set ...`. XLA's flags are those that it sets, and
    UNTUNED, not those of this process.
    """
    command = [sys.executable, "-m", "spmdtrain.cli", "estimate", *arguments, "--compile", "--json"]
    for setting in settings:
        command += ["--set", setting]
    environment = os.environ | {"XLA_FLAGS": UNTUNED, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
