"""The process that examines draws: one JSON line on stdout before each (`begins`), and one after
it.

A process of its own, because XLA may abort it and because thousands of compiled programs do not
fit into one.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

DEVICES = 8


def flags() -> None:
    """As tests/conftest.py: before anything imports jax."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    wanted = {
        "--xla_force_host_platform_device_count": DEVICES,
        # These make a compilation cheap, and take nothing off what is checked.
        "--xla_backend_optimization_level": 0,
        "--xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
        "--xla_cpu_parallel_codegen_split_count": 1,
    }
    for flag, value in wanted.items():
        if flag not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FROM", "TO"), default=(0, 0))
    parser.add_argument("--draw", help="one draw, as JSON, instead of seeds")
    parser.add_argument(
        "--until", type=float, default=float("inf"), help="time after which no draw begins"
    )
    parser.add_argument(
        "--shrink", type=float, default=0.0, help="seconds for each finding of a new kind"
    )
    parser.add_argument("--known", nargs="*", default=[], help="kinds that are not shrunk any more")
    asked = parser.parse_args(arguments)
    flags()
    with _answers() as answers, tempfile.TemporaryDirectory(prefix="spmdtrain-fuzz-") as room:
        # For the many small programs of a restore; fuzz/programs.py keeps the large ones.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{room}/compiled")
        _work(asked, answers, Path(room))


@contextlib.contextmanager
def _answers():
    """What was stdout; what anything else prints there goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


def _work(asked: argparse.Namespace, answers: TextIO, room: Path) -> None:
    from fuzz.check import Oracles, examine
    from fuzz.draw import SEEDS_PER_NUMBERS, Draw, draw

    oracles, known = Oracles(room), set(asked.known)
    draws = (
        [Draw(**json.loads(asked.draw))]
        if asked.draw
        else (draw(seed) for seed in range(*asked.seeds))
    )
    refused = None  # numbers that are refused on one device are one draw, not one for each layout
    for each in draws:
        if time.time() > asked.until:
            return
        group = each.seed // SEEDS_PER_NUMBERS
        if group == refused and not asked.draw:
            continue
        _tell(answers, begins=each.plain())
        start = time.monotonic()
        cpu = time.process_time()
        report = examine(each, oracles, room)
        seconds = round(time.monotonic() - start, 1)
        cpu_seconds = round(time.process_time() - cpu, 1)
        refused = group if report.alone else refused
        small = {}
        for kind in sorted(report.kinds() - known):
            known.add(kind)
            small[kind] = _small(each, kind, asked.shrink, room)
        _tell(
            answers,
            **each.plain(),
            outcome="found" if report.findings else report.outcome,
            refused=report.refused,
            findings=report.findings,
            excused=report.excused,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            shrunk=small,
        )


def _small(each, kind: str, seconds: float, room: Path) -> dict[str, Any]:
    from fuzz.check import Oracles, examine
    from fuzz.shrink import shrunk, spoken

    oracles = Oracles(room)
    small = shrunk(each, lambda other: kind in examine(other, oracles, room).kinds(), seconds)
    return small.plain() | {"spoken": spoken(small)}


def _tell(answers: TextIO, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
