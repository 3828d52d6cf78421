"""Prints the speed of a run in one line: the median over the second half of its steps.

python examples/cluster/speed.py RUN
"""

import json
import statistics
import sys
from pathlib import Path


def speed(run: Path) -> str:
    """Returns the tokens a second of all devices, and the MFU where the device's peak is known."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "tokens_per_second" in line]
    if not steps:
        raise SystemExit(f"{run} has no step in metrics.jsonl")
    measured = steps[len(steps) // 2 :]
    tokens = statistics.median(line["tokens_per_second"] for line in measured)
    utilisations = [line["mfu"] for line in measured if line.get("mfu") is not None]
    share = f", MFU {statistics.median(utilisations):.1%}" if utilisations else ""
    return f"{tokens:,.0f} tokens/s{share}, median of {len(measured)} steps"


if __name__ == "__main__":
    print(speed(Path(sys.argv[1])))
