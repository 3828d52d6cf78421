"""Traces a step, and keeps of the trace its kernels by time and how long each stream idled."""

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import jax

KEPT = 300  # kernels of a stream


def traced(step: Callable[[], object], file: Path) -> dict[str, float]:
    """Runs `step` under the profiler, and writes FILE.top.json; the trace itself is thrown away.

    Returns the figures of the stream of a GPU that was busy longest; none where there is no GPU.
    """
    folder = Path(tempfile.mkdtemp())
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    try:
        with jax.profiler.trace(str(folder), profiler_options=options):
            step()
        found = {}
        for path in sorted(folder.rglob("*.xplane.pb")):
            found |= top_kernels(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    file.with_suffix(".top.json").write_text(json.dumps(found, indent=0), encoding="utf-8")
    of_gpus = [stream for name, stream in found.items() if "GPU" in name]
    longest = max(of_gpus, key=lambda stream: stream["busy_ms"], default={})
    return {key: x for key, x in longest.items() if key != "top"}


def top_kernels(path: Path) -> dict[str, dict]:
    """Returns of each stream: events, busy and idle milliseconds, and its longest kernels."""
    streams = {}
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if "GPU" not in plane.name and "CPU" not in plane.name:
            continue
        for line in plane.lines:
            kernels: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
            spans = []
            for event in line.events:
                if not event.duration_ns:
                    continue
                told = dict(event.stats)
                kernel = kernels[event.name[:120], str(told.get("hlo_op", ""))]
                kernel[0] += 1
                kernel[1] += event.duration_ns
                spans.append((event.start_ns, event.start_ns + event.duration_ns))
            if spans:
                streams[f"{plane.name} / {line.name}"] = _summary(kernels, sorted(spans))
    return streams


def _summary(kernels, spans) -> dict:
    busy = idle = 0.0
    last = spans[0][0]
    for begin, end in spans:
        idle += max(0.0, begin - last)
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:KEPT]
    rows = [[name, op, count, round(ns / 1e6, 4)] for (name, op), (count, ns) in longest]
    return {
        "events": len(spans),
        "busy_ms": round(busy / 1e6, 3),
        "idle_between_ms": round(idle / 1e6, 3),
        "top": rows,
    }
