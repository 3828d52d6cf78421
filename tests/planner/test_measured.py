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


KERNEL = "triton/fourfold"
# (the run, who computed its loss, (ms, GB)).
ROWS = {
    "2026-11-26, Llama, inputs on the host": (llama("train.remat=offload"), "xla", (172.0, 30.71)),
    "2026-11-26, Llama, moments on the host": (
        *(llama("optimizer.memory=host", LOOP), "xla"),
        (1419, 25.83),
    ),
    "a loop": (gpt2(32, LOOP), KERNEL, turn("loop")),
    "written out": (gpt2(32), KERNEL, turn("default")),
    "the loss by XLA": (gpt2(32), "xla/fourfold", turn("loss_by_xla")),
    "bfloat16 logits": (gpt2(32, NARROW), KERNEL, turn("narrow")),
    "Llama": (llama(), KERNEL, turn("llama")),
    "Llama, bfloat16 logits": (llama(NARROW), KERNEL, turn("llama_narrow")),
}
# Where the memory is further off: tables of 128 k tokens are counted as if both were copied to
# bfloat16 to the end of the step, and moments that come from the host as if one table's came. After
# a loss of bfloat16 logits the peak is in the backward pass, where XLA frees more than is counted.
MEMORY_WITHIN = {
    "2026-11-26, Llama, inputs on the host": 0.055,
    "2026-11-26, Llama, moments on the host": 0.08,
    "bfloat16 logits": 0.06,
}


@pytest.fixture
def losses_by(monkeypatch):
    """Makes the table of measured kernels name one implementation for every loss."""

    def by(name: str) -> None:
        calls = [f"{of}{logits}" for of in (GPT2_LOSS, LLAMA_LOSS) for logits in LOGITS]
        monkeypatch.setattr(loss, "measured", lambda _: dict.fromkeys(calls, name))

    return by


@pytest.mark.parametrize("name", ROWS)
def test_a_measured_step(name, losses_by):
    config, implementation, (milliseconds, gigabytes) = ROWS[name]
    losses_by(implementation)
    estimated = estimate(config, 1, "h200")
    assert 1e3 * estimated.time.seconds == pytest.approx(milliseconds, rel=WITHIN)
    within = MEMORY_WITHIN.get(name, WITHIN)
    assert estimated.memory.of_step / 1e9 == pytest.approx(gigabytes, rel=within)


def test_the_loss_is_the_kernel_where_a_run_takes_it(losses_by):
    """A batch of 16 is a call that nobody has measured; an A100 has no kernel by default."""

    def of_a_sequence(batch: int, gpu: str = "h200") -> float:
        return estimate(gpt2(batch), 1, gpu).time.terms["head"] / batch

    measured, unmeasured = of_a_sequence(32), of_a_sequence(16)
    assert unmeasured == pytest.approx(measured, rel=0.03)
    on_a100 = of_a_sequence(32, "a100-80")
    losses_by("xla")
    assert measured < 0.9 * of_a_sequence(32)
    assert of_a_sequence(32, "a100-80") == on_a100


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
    losses_by("xla")
    loop, written_out = (
        estimate(gpt2(32, setting), 1, "h200") for setting in (LOOP, "train.scan_layers=auto")
    )
    assert loop.time.terms["stacks"] > 0 == written_out.time.terms["stacks"]
    assert loop.memory.total > written_out.memory.total
    of_pipeline = gpt2(32, "mesh.data=1", "mesh.pipeline=2", "train.microbatch=8")
    assert estimate(of_pipeline, 2, "h200").time.terms["stacks"] > 0
