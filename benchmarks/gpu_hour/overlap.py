"""How much of the communication is hidden: in the profile of a step, and by its compiled text.

    python benchmarks/gpu_hour/overlap.py FILE.json [--config FILE] [--simulate-devices N]
                                          [--set KEY=VALUE]

Trains GPT-2 124M split over all GPUs here and traces one step. A nanosecond of communication is
hidden if the same device does other work in it. The planner takes the share of bytes that the
compiled text starts early: this is the only place where that is held against a clock.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layouts import count
from trained import CONFIG, SETTINGS
from training import arguments, train

from spmdtrain.compiled.operations import NETWORK
from spmdtrain.config.run_files import COMPILED, OPERATIONS, PROFILE, RunFiles
from spmdtrain.lab.profile.trace import Executed, read_trace

STEP = 12  # that is traced


def hidden_and_whole(ran: Sequence[Executed], sorts: Mapping[str, str]) -> tuple[float, float]:
    """Returns the nanoseconds of a device's communication in which it does other work, and all.

    `sorts`: instruction -> its sort of work; what has none is not counted.
    """
    edges = []
    for each in ran:
        if each.name in sorts:
            is_network = sorts[each.name] == NETWORK
            edges += [(each.begin, 1, is_network), (each.end, -1, is_network)]
    open_ones = {True: 0, False: 0}
    hidden = whole = last = 0.0
    for at, change, is_network in sorted(edges):
        if open_ones[True]:
            whole += at - last
            hidden += (at - last) * (open_ones[False] > 0)
        last = at
        open_ones[is_network] += change
    return hidden, whole


def of_text(compiled: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the bytes that a device sends in a step while matmuls or loops run, and all."""
    listed = compiled.get("traffic") or []
    return sum(each["sent_beside_work"] for each in listed), sum(each["sent"] for each in listed)


def main() -> None:
    parser = arguments(__doc__, CONFIG)
    parser.add_argument("--simulate-devices", type=int)
    chosen = parser.parse_args()
    simulated = chosen.simulate_devices
    devices = simulated or count()
    if devices < 2:
        print("one GPU communicates with nobody: there is nothing to hide")
        return
    settings = [*SETTINGS, "mesh.data=1", f"mesh.fsdp={devices}", "checkpoint.every=0"]
    settings += [f"train.steps={STEP + 2}", f"train.global_batch={12 * devices}"]
    settings += [f"log.profile={STEP}", *chosen.set]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(chosen.config, run, settings, simulated)
        compiled = RunFiles(run).document(COMPILED)
        traced = run / PROFILE / f"step{STEP}"
        known = RunFiles(traced).document(OPERATIONS)
        sorts = {name: told[0] for name, told in known.items()}
        pairs = [hidden_and_whole(ran, sorts) for ran in read_trace(traced).values()]
    hidden, whole = (sum(each) / 1e9 / devices for each in zip(*pairs, strict=True))
    of_bytes = of_text(compiled)
    found = {
        "devices": devices,
        "communication_seconds": whole,
        "hidden_seconds": hidden,
        "sent_bytes": of_bytes[1],
        "hidden_bytes": of_bytes[0],
    }
    chosen.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(
        f"{devices} devices: {1e3 * whole:.2f} ms of communication each, "
        f"{share(hidden, whole)} hidden; by the compiled text {share(*of_bytes)} of the bytes"
    )


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "none"


if __name__ == "__main__":
    main()
