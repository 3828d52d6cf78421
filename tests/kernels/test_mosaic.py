"""The kernels on Mosaic GPU, interpreted on CPU by jax >= 0.11, which looks for races.

The interpreter hangs where a kernel's warpgroups wait for each other for ever, and a kernel that
fails spoils it for the next one: cases run in a process of their own, with a time limit.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels.attention import attention, cases
from pallas_kernels.attention.cases import Case
from pallas_kernels.backends import mosaic
from pallas_kernels.choose import Refused
from pallas_kernels.grouped import cases as grouped_cases
from pallas_kernels.recurrence import cases as chunk_cases
from pallas_kernels.recurrence.cases import chunks_in
from pallas_kernels.recurrence.chunks import call_of
from pallas_kernels.tuning.on_jax import OnJax

ROOT = Path(__file__).parents[2]
OLD = jax.__version_info__ < (0, 11)
INTERPRETED = (
    Case(t=130, heads=(2, 1), causal=True),
    Case(t=64, s=260, d=72, heads=(1, 1), window=(40, 30), dtype="float16"),
    Case(
        t=64,
        s=200,
        d=128,
        e=64,
        heads=(1, 1),
        positions=True,
        segments="three",
        causal=True,
        softcap=15.0,
    ),
    # dk and dv in warpgroups of their own.
    Case(t=70, d=192, e=128, heads=(1, 1), dtype="float16", causal=True),
)
SLOW = (
    Case(b=2, t=200, heads=(2, 1), segments="padded", causal=True, softcap=15.0),
    Case(t=512, d=128, heads=(4, 2), causal=True),
    Case(t=200, d=256, heads=(1, 1), causal=True),
    Case(t=200, d=192, e=128, heads=(2, 1), causal=True),
    Case(t=300, s=64, heads=(1, 1), causal=True),
    Case(t=300, d=80, segments="three", window=(64, 0), softcap=50.0),
    Case(t=64, segments="short"),
    Case(b=2, t=400, segments="three", positions=True, heads=(4, 2)),
    Case(t=1, s=300),
    *(case for case in cases.SLOW if case.dtype != "float32"),
)
CHILD = """
import sys
from test_attention import compare
from test_mosaic import INTERPRETED, SLOW
for case in INTERPRETED + SLOW:
    if case.name in sys.argv[1:]:
        compare(case, "mosaic:interpret")
        print(case.name, flush=True)
"""


def run(program: str, *arguments: str, seconds: int) -> subprocess.CompletedProcess:
    """Runs `program` in a python of its own.

    XLA's threads, one per simulated device, are enough for a kernel's warpgroups.
    """
    path = os.pathsep.join(
        [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def interpret(chosen, seconds):
    done = run(CHILD, *(case.name for case in chosen), seconds=seconds)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.split() == [case.name for case in chosen]


@pytest.mark.skipif(OLD, reason="needs jax 0.11 or later")
def test_interpreted():
    interpret(INTERPRETED, seconds=300)


NARROW = """
from test_attention import compare
from test_mosaic import INTERPRETED
compare(INTERPRETED[0], "mosaic/narrow:interpret")
"""


@pytest.mark.skipif(OLD, reason="needs jax 0.11 or later")
def test_another_tiling_interpreted():
    done = run(NARROW, seconds=200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="needs jax 0.11 or later")
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.name)
def test_interpreted_on_more(case):
    interpret((case,), seconds=600)


GROUPED = """
from test_grouped import cases, compare
for case in cases.HOPPER:
    compare(case, "mosaic:interpret")
    print(case.name, flush=True)
compare(cases.HOPPER[-1], "mosaic/shallow:interpret")
"""


@pytest.mark.skipif(OLD, reason="needs jax 0.11 or later")
def test_interpreted_grouped_matmuls():
    done = run(GROUPED, seconds=200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.split() == [case.name for case in grouped_cases.HOPPER]


CHUNKS = """
import sys
from test_chunk_scan import cases, compare
for case in cases.HOPPER + cases.SLOW:
    if case.name in sys.argv[1:]:
        compare(case, "mosaic:interpret")
        print(case.name, flush=True)
"""


def interpret_chunks(chosen, seconds):
    done = run(CHUNKS, *(case.name for case in chosen), seconds=seconds)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.split() == [case.name for case in chosen]


@pytest.mark.skipif(OLD, reason="needs jax 0.11 or later")
def test_interpreted_scans_over_chunks():
    interpret_chunks(chunk_cases.HOPPER, seconds=200)


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="needs jax 0.11 or later")
@pytest.mark.parametrize(
    "case",
    [case for case in chunk_cases.SLOW if case.key_dim == 128 and case.dtype == "bfloat16"],
    ids=lambda case: case.name,
)
def test_more_interpreted_scans_over_chunks(case):
    interpret_chunks((case,), seconds=400)


@pytest.mark.skipif(OLD, reason="needs jax 0.11 or later")
def test_a_scan_takes_it_only_where_it_was_measured(monkeypatch):
    monkeypatch.setattr(mosaic, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    call = call_of(chunks_in(chunk_cases.PUBLISHED["Qwen3.5 27B"].abstract()))
    names, _ = OnJax().candidates(call)
    assert names == ["xla", "mosaic"], "the first runs where nothing was measured"


HIDDEN = """
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels.attention import attention
from pallas_kernels.attention.cases import Case

drawn, ids = Case(t=96, heads=(1, 1)).draw(), jnp.arange(96)[None] >= 64
nothing = ids[:, :, None, None]

def run(fill):
    q, k, v, dout = (jnp.where(nothing, fill, drawn[name]) for name in ("q", "k", "v", "dout"))
    segments = ids.astype(int), 2 * ids.astype(int)  # padding sees nothing and is not seen
    options = {"segment_ids": segments, "implementation": "mosaic:interpret"}
    out, pull = jax.vjp(lambda *qkv: attention(*qkv, **options), q, k, v)
    return out, *pull(dout)

for name, clean, dirty in zip(("out", "dq", "dk", "dv"), run(0.0), run(jnp.nan), strict=True):
    clean, dirty = (np.asarray(x, np.float32) for x in (clean, dirty))
    np.testing.assert_array_equal(dirty, clean, err_msg=name)
    assert not np.where(nothing, dirty, 0).any(), name
"""


@pytest.mark.skipif(OLD, reason="needs jax 0.11 or later")
def test_what_is_not_seen_may_be_nan():
    done = run(HIDDEN, seconds=200)
    assert done.returncode == 0, done.stderr[-3000:]


RACE = """
import linecache, sys
import jax
from pallas_kernels.backends import mosaic
from pallas_kernels.attention import attention
from pallas_kernels.attention.cases import Case

real = mosaic.barrier_wait

def wait(barrier):
    frame = sys._getframe(1)
    if "v_ready" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        real(barrier)

mosaic.barrier_wait = wait
drawn = Case(s=640, heads=(1, 1)).draw()
q, k, v = (drawn[name] for name in "qkv")
jax.block_until_ready(attention(q, k, v, implementation="mosaic:interpret"))
"""


@pytest.mark.skipif(OLD, reason="needs jax 0.11 or later")
def test_a_wait_that_is_missing_is_found():
    """Without the wait for values their use is a race, and a barrier nobody waits at an error."""
    done = run(RACE, seconds=100)
    assert done.returncode != 0 and re.search("RACE DETECTED|no threads observed", done.stderr), (
        done.stderr[-3000:]
    )


@pytest.mark.skipif(OLD, reason="jax's version is said first")
@pytest.mark.parametrize(
    ("case", "kind", "said"),
    [
        (Case(dtype="float32"), "NVIDIA H200", "bfloat16 and float16, not float32"),
        (Case(bias=(True, True, True, True)), "NVIDIA H200", "no bias"),
        (Case(d=320), "NVIDIA H200", "head dims up to 256"),
        (Case(), "NVIDIA A100-SXM4-80GB", "needs an NVIDIA GPU of sm_90"),
        (Case(), "NVIDIA B200", "needs an NVIDIA GPU of sm_90"),
        (Case(), "cpu", "this is cpu"),
    ],
)
def test_it_says_why_not(case, kind, said, monkeypatch):
    monkeypatch.setattr(mosaic, "device_kind", lambda: kind)
    drawn = case.draw()
    with pytest.raises(Refused, match=said):
        attention(*(drawn[name] for name in "qkv"), bias=drawn.get("bias"), implementation="mosaic")


@pytest.mark.parametrize(
    "kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H20", "NVIDIA GH200 480GB"]
)
def test_hopper_by_its_names(kind, monkeypatch):
    monkeypatch.setattr(mosaic, "device_kind", lambda: kind)
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert mosaic.refusal(False) == ""
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert mosaic.refusal(False).startswith("needs jax 0.11 or later")
