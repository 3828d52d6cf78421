"""Compiles the real run for GPUs that need not be present; checks its memory and traffic.

It is compiled in a separate process, because its XLA flags differ from those of the certificate,
and because XLA ends the whole process when it fails.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from spmdtrain.compiled.step_memory import memory_in
from spmdtrain.lab.certify.witnesses.witness import Witness
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.planner.cost.memory import SAFE_SHARE

LONGEST = 1800  # seconds; 1T over 3072 devices takes about 60
# Of the bytes that theory needs along an axis; a guess until more layouts are compared.
MOST_SENT = 1.25
FITS = "the real step fits into memory"
SENDS = "the real step sends what theory needs"
GIGABYTE = 1e9


def real_size(config: str, settings: Sequence[str], name: str, devices: int) -> list[Witness]:
    """Returns the witnesses of the run in the file `config` on `devices` GPUs called `name`.

    If the compiler is missing they do not apply, and their details say so.
    """
    arguments = [config, "--hardware", name, "--devices", str(devices), "--compile", "--json"]
    for setting in settings:
        arguments += ["--set", setting]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "spmdtrain.cli", "estimate", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("spmdtrain: ")]
        why = lines[0].removeprefix("spmdtrain: ") if lines else f"ended with {done.returncode}"
        holds = None if "cannot compile for" in why else False
        return [Witness(FITS, holds, why[:300])]
    return judge(json.loads(done.stdout.splitlines()[-1]), hardware(name).memory)


def judge(answer: dict[str, Any], memory: float) -> list[Witness]:
    """Judges the answer of `spmdtrain estimate --compile --json` for a GPU with `memory` bytes."""
    held = memory_in(answer["compiled"]).held
    fits = f"{held / GIGABYTE:.1f} of {memory / GIGABYTE:.0f} GB"
    witnesses = [Witness(FITS, held <= SAFE_SHARE * memory, fits)]
    traffic, needed = answer["compiled"]["traffic"], answer["needed_traffic"]
    if traffic is None:
        return [*witnesses, Witness(SENDS, None, answer["compiled"].get("unread", ""))]
    sent: dict[str, float] = {}
    for collective in traffic:
        sent[collective["axis"]] = sent.get(collective["axis"], 0.0) + collective["bytes"]
    shares = {axis: sent.get(axis, 0.0) / bytes_ for axis, bytes_ in needed.items() if bytes_}
    details = ", ".join(f"{axis} {share:.2f} of it" for axis, share in shares.items())
    return [
        *witnesses,
        Witness(SENDS, all(share <= MOST_SENT for share in shares.values()), details),
    ]
