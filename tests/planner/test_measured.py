"""Estimates beside what was measured on one H200, row by row."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spmdtrain.config import RunConfig, load
from spmdtrain.planner.cost import loss
from spmdtrain.planner.cost.step_time import step_time
from spmdtrain.planner.estimate import estimate

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
TURNS = json.loads((ROOT / "benchmarks/results/h200-2026-11-28/turns.json").read_text())
WITHIN = 0.03
GPT2_LOSS = "linear_cross_entropy bfloat16 32x1024x768x50304 weight bfloat16"
LLAMA_LOSS = "linear_cross_entropy bfloat16 2x4096x4096x128256 weight bfloat16"
NARROW = "precision.logits=bfloat16"
LOGITS = ("", " logits bfloat16")
LOOP = "train.scan_layers=true"


def gpt2(batch: int, *settings: str) -> RunConfig:
    sizes = (f"train.global_batch={batch}", f"train.microbatch={batch}", "mesh.data=1")
    shape = ("train.sequence_length=1024", "train.remat=none")
    return load(CONFIGS / "gpt2_124m.toml", (*sizes, *shape, *settings))


def llama(*settings: str) -> RunConfig:
    """Four layers of Llama 3 8B, with its vocabulary, on 2 x 4096 tokens."""
    sizes = ("model.layers=4", "train.global_batch=2", "train.microbatch=none", "mesh.fsdp=1")
    shape = ("train.sequence_length=4096", "train.remat=dots")
    return load(CONFIGS / "llama3_8b.toml", (*sizes, *shape, *settings))


def turn(name: str) -> tuple[float, float]:
    """The milliseconds of a variant of benchmarks/turns, and its GB by XLA."""
    return TURNS[name]["ms"], TURNS[name]["compiled_gb"]


# (the run, who computed its loss, (ms, GB)); without a name XLA did, in chunks of the default size.
ROWS = {
    "2026-11-26, 12 x 1024": (gpt2(12, LOOP), None, (33.2, 6.24)),
    "2026-11-26, 32 x 1024": (gpt2(32, LOOP), None, (81.8, 13.27)),
    "2026-11-26, Llama, inputs on the host": (llama("train.remat=offload"), None, (172.0, 30.71)),
    "2026-11-26, Llama, moments on the host": (
        *(llama("optimizer.memory=host", LOOP), None),
        (1419, 25.83),
    ),
    "a loop": (gpt2(32, LOOP), None, turn("loop")),
    "written out": (gpt2(32), None, turn("out")),
    "fourfold chunks": (gpt2(32), "xla/fourfold", turn("out_fourfold")),
    "the kernel": (gpt2(32), "triton/fourfold", turn("out_kernel")),
    "bfloat16 logits": (gpt2(32, NARROW), "xla/fourfold", turn("narrow_xla")),
    "bfloat16 logits, the kernel": (gpt2(32, NARROW), "triton/fourfold", turn("narrow")),
    "Llama": (llama(), None, turn("llama")),
    "Llama, bfloat16 logits, the kernel": (
        *(llama(NARROW), "triton/fourfold"),
        turn("llama_kernel"),
    ),
}
# Where the memory is further off: tables of 128 k tokens are counted as if both were copied to
# bfloat16 to the end of the step, and moments that come from the host as if one table's came.
MEMORY_WITHIN = {
    "2026-11-26, Llama, inputs on the host": 0.055,
    "2026-11-26, Llama, moments on the host": 0.08,
    "Llama": 0.035,
}


@pytest.fixture
def losses_by(monkeypatch):
    """Makes the table of measured kernels name one implementation for every loss, or none."""

    def by(name: str | None) -> None:
        calls = [f"{of}{logits}" for of in (GPT2_LOSS, LLAMA_LOSS) for logits in LOGITS]
        monkeypatch.setattr(loss, "measured", lambda _: dict.fromkeys(calls, name) if name else {})

    return by


@pytest.mark.parametrize("name", ROWS)
def test_a_measured_step(name, losses_by):
    config, implementation, (milliseconds, gigabytes) = ROWS[name]
    losses_by(implementation)
    estimated = estimate(config, 1, "h200")
    assert 1e3 * estimated.time.seconds == pytest.approx(milliseconds, rel=WITHIN)
    within = MEMORY_WITHIN.get(name, WITHIN)
    assert estimated.memory.of_step / 1e9 == pytest.approx(gigabytes, rel=within)


def test_the_loss_is_the_one_that_ships_for_the_gpu():
    """A batch of 16 is another call, which nobody has measured."""
    by_kernel, by_default = (
        estimate(gpt2(batch), 1, "h200").time.terms["head"] / batch for batch in (32, 16)
    )
    assert by_kernel < 0.9 * by_default


@pytest.mark.parametrize(
    ("settings", "hides"),
    [
        ((), True),
        ((LOOP,), False),
        (("train.microbatch=16",), False),
        (("train.zero=1",), False),
        (("compression.codec=int8",), False),
    ],
)
def test_written_out_layers_sum_their_gradients_beside_work(settings, hides):
    config = gpt2(256, "mesh.data=8", "train.microbatch=32", *settings)
    found = estimate(config, 8, "h200").time
    bare = replace(found.software, written_out_overlap=0.0)
    exposed = step_time(found.workload, found.hardware, bare).terms["data_reduction"]
    assert (found.terms["data_reduction"] < 0.6 * exposed) is hides


def test_a_compiled_step_says_itself_what_it_hides_over_data():
    told = {"kind": "all-reduce", "axis": "data", "sent": 4.0, "sent_beside_work": 1.0}
    found = estimate(gpt2(256, "mesh.data=8", "train.microbatch=32"), 8, "h200")
    compiled = found.as_compiled([told])
    assert compiled.time.terms["data_reduction"] > found.time.terms["data_reduction"]


def test_only_a_loop_copies_into_stacks(losses_by):
    losses_by(None)
    loop, written_out = (
        estimate(gpt2(32, setting), 1, "h200") for setting in (LOOP, "train.scan_layers=auto")
    )
    assert loop.time.terms["stacks"] > 0 == written_out.time.terms["stacks"]
    assert loop.memory.total > written_out.memory.total
    of_pipeline = gpt2(32, "mesh.data=1", "mesh.pipeline=2", "train.microbatch=8")
    assert estimate(of_pipeline, 2, "h200").time.terms["stacks"] > 0
