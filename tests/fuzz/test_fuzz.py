"""The fuzzer itself: that it misses no setting, that it finds what is planted, and a few draws of
it.

`make fuzz` draws by the thousand; here are only as many as a minute allows.
"""

import json
import math
import random
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from shares import rest

from fuzz import campaign, files, programs, schedule_files
from fuzz.agreement import BFLOAT16, Oracle
from fuzz.check import Oracles, Report, check_narrow, examine
from fuzz.draw import (
    AXES,
    LAYOUTS_PER_NUMBERS,
    SEEDS_PER_NUMBERS,
    Draw,
    after,
    config_of,
    draw,
    draw_change,
    layout_of,
    numbers_of,
    settings_of,
)
from fuzz.runs import Run, Seen
from fuzz.settings import BASE_FILE, NOT_DRAWN, settings, values_of
from fuzz.shrink import shrunk, spoken
from spmdtrain.config import load
from spmdtrain.parallel import reduce, wide_sums
from spmdtrain.pipeline.find_table import choose_table
from spmdtrain.running import loop
from spmdtrain.train import exchange
from spmdtrain.train.gradients import grad_accumulation, reduction

pytestmark = pytest.mark.long
of_the_fuzzer = rest(
    "finds faults of the fuzzer; test_a_draw_trains_as_on_one_device those of ours"
)

# A pipeline, stopped, and resumed on a mesh that has none.
SEEDS = (357,)
TWO = {"train.steps": 2}
# Weights over an axis of the batch and an automatic one, used inside of a layer that is recomputed:
# XLA once ended the process here.
OVER_EXPERT_AND_TENSOR = {
    "mesh.data": 2,
    "mesh.expert": 2,
    "mesh.tensor": 2,
    "train.microbatch": 2,
    "train.remat": "full",
    "rules.parameters.vocab": (),
    "rules.parameters.kv_heads": ("expert", "tensor"),
    "rules.parameters.position": ("expert", "tensor"),
    "rules.parameters.norm": ("expert", "tensor"),
    "rules.activations.time": (),
    "rules.activations.embed": ("tensor",),
}
BY_FILE = {
    "mesh.pipeline": 2,
    "train.microbatch": 4,
    "pipeline.schedule": schedule_files.name(1, stages=2, chunks=1, microbatches=4, split=True),
}
FFN_OVER_FSDP = {"mesh.fsdp": 2, "rules.parameters.ffn": ("fsdp",), "rules.parameters.embed": ()}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def oracles(room):
    return Oracles(room)


@pytest.fixture(autouse=True)
def programs_anew():
    """A fault is planted in what is compiled: no test may run what another has."""
    programs.forget()
    yield
    programs.forget()


def test_every_setting_is_drawn_or_says_why_not():
    missed = [key for key in settings() if key not in NOT_DRAWN and not _is_drawn(key)]
    assert missed == [], "tests/fuzz/settings.py: give it values, or a reason in NOT_DRAWN"
    assert set(NOT_DRAWN) <= set(settings())


def _is_drawn(key: str) -> bool:
    if key.startswith("rules."):
        return True  # by certify/drawn_rules.py
    try:
        return len(values_of(key)) > 1
    except KeyError:
        return False


@pytest.fixture(scope="module")
def many() -> list[Draw]:
    return [drawn_of(group) for group in range(400)]


def drawn_of(group: int) -> Draw:
    return draw(SEEDS_PER_NUMBERS * group + group % SEEDS_PER_NUMBERS)


def test_over_many_draws_every_setting_takes_several_values(many):
    """Over 400, and a few hundred more for settings of a table that few runs have."""
    seen: dict[str, set] = {}

    def add(one: Draw) -> None:
        for values in (one.numbers, one.layout, one.onto):
            for key, value in values.items():
                seen.setdefault(key, set()).add(value)

    def rare() -> list[str]:
        drawn = [key for key in settings() if key not in NOT_DRAWN and not key.startswith("rules.")]
        wanted = {key: set(values_of(key)) - _switched_off(key) for key in drawn}
        return [
            key
            for key, values in wanted.items()
            if len(seen.get(key, set()) & values) < min(3, len(values))
        ]

    for one in many:
        add(one)
    for group in range(400, 700):
        if not rare():
            break
        add(drawn_of(group))
    assert rare() == []


def _switched_off(key: str) -> set:
    return {1} if key.removeprefix("mesh.") in AXES else {None}


def test_meshes_have_every_axis_and_rules_both_orders():
    layouts = []
    for group in range(100):
        numbers = numbers_of(group)
        layouts += [layout_of(group, at, numbers) for at in range(LAYOUTS_PER_NUMBERS)]
    split = {axis for axis in AXES for each in layouts if each.get(f"mesh.{axis}", 1) > 1}
    assert split == set(AXES)
    rules = {each.get("rules.parameters.embed") for each in layouts}
    assert {("expert", "fsdp"), ("fsdp", "expert"), ("tensor", "fsdp"), ()} <= rules


def test_a_seed_is_a_draw_and_nearly_all_are_what_the_schema_accepts(many):
    assert draw(7) == draw(7) != draw(8)
    assert draw(8).numbers == draw(15).numbers
    accepted = [config_of(settings_of(each.numbers, each.layout)[0]) for each in many]
    assert 0 < accepted.count(None) < len(many) / 10


def test_a_change_leaves_a_run_that_the_schema_accepts():
    for seed in range(60):
        numbers = draw(seed * SEEDS_PER_NUMBERS).numbers
        change = draw_change(random.Random(seed), numbers)
        if change:
            changed = config_of(after(numbers, change))
            assert changed.model_dump() != config_of(numbers).model_dump()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_draw_trains_as_on_one_device(seed, oracles, room):
    report = examine(draw(seed), oracles, room)
    assert report.findings == [], spoken(report.draw)
    assert report.outcome == "trained"


@of_the_fuzzer
def test_a_run_by_a_schedule_file_begins_another_whose_weights_rest_elsewhere(oracles, room):
    numbers = {"model.heads": 4, "train.global_batch": 16, "train.steps": 2}
    each = Draw(0, numbers, BY_FILE, end="begun", by="term", onto=OVER_EXPERT_AND_TENSOR)
    report = examine(each, oracles, room)
    assert report.findings == [] and report.outcome == "trained"


@pytest.mark.parametrize("split", [False, True])
def test_a_drawn_schedule_file_is_what_its_name_says(split, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for seed in range(5):
        name = schedule_files.name(seed, stages=3, chunks=2, microbatches=2, split=split)
        schedule_files.write(name)
        table = choose_table(name, stages=3, chunks=2, microbatches=2)
        assert table.split == split


@pytest.mark.parametrize(("there", "faults"), [((2, 3), 0), ((), 1)], ids=["newer", "gone"])
def test_a_kill_before_the_event_of_a_save_is_no_fault(there, faults, tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "saved", "step": 1}\n')
    for step in there:
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    killed = Run("killed", "", "", tmp_path, {}, {}, Seen())
    assert len(list(files.faults(killed, load(BASE_FILE)))) == faults


@pytest.mark.parametrize(
    ("setting", "evaluated", "faults"),
    [
        ("train.init_from=other", (0, 2), 0),
        ("train.init_from=other", (2,), 1),
        ("eval.at_start=true", (0, 2), 0),
        ("log.every=1", (0, 2), 1),
    ],
)
def test_an_evaluation_of_step_0_is_asked_for_or_a_fault(setting, evaluated, faults, tmp_path):
    steps = [f'{{"step": {step}, "loss": 1.0}}\n' for step in (1, 2)]
    evals = [f'{{"step": {step}, "eval_loss": 1.0}}\n' for step in evaluated]
    (tmp_path / "metrics.jsonl").write_text("".join(steps + evals))
    (tmp_path / "events.jsonl").write_text('{"event": "finished", "step": 2}\n')
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    finished = Run("finished", "", "", tmp_path, {}, {}, Seen())
    config = load(BASE_FILE, ["train.steps=2", "eval.every=2", setting])
    assert len(list(files.faults(finished, config))) == faults


@pytest.mark.parametrize(
    ("rows", "right"),
    [
        ([[math.inf, math.inf], [math.inf, math.inf]], True),
        ([[math.inf, math.inf], [3.0, 0.5]], True),
        ([[3.0, 0.5], [math.inf, math.inf]], False),
        ([[math.inf, math.inf], [3.0, math.inf]], False),
        ([[math.inf, math.inf], [math.nan, 0.5]], False),
        ([[-math.inf, -math.inf], [3.0, 0.5]], False),
        ([[2.0, 0.5], [3.0, 0.5]], False),
    ],
)
def test_a_window_of_good_steps_fills_from_its_end(rows, right, tmp_path):
    """After step 1 it holds one row at most."""
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    saved = {1: {"[2]['recent']": np.array(rows, np.float32)}}
    killed = Run("killed", "", "", tmp_path, {}, {}, Seen(saved=saved))
    assert len(list(files.faults(killed, load(BASE_FILE)))) == (not right)


@pytest.mark.parametrize(("flipped", "wrong"), [(1, 0), (5, 1)])
def test_a_sign_that_few_roundings_change_is_excused_and_five_are_not(flipped, wrong, tmp_path):
    """Of the nudged runs only the tenth changes the sign of one update among 32."""

    def moved(flips: int) -> Run:
        update = np.full(32, 1e-5, np.float32)
        update[:flips] *= -1
        seen = Seen(born={"bias": np.zeros(32, np.float32)}, params={2: {"bias": update}})
        return Run("finished", "", "", tmp_path, {}, {}, seen)

    oracle = Oracle(moved(0), BFLOAT16, lambda nudge: moved(int(nudge.keywords["seed"] == 9)))
    found, excused = oracle.judged(moved(flipped))
    assert (len(found), excused) == (wrong, 1 - wrong)


def lower_precision(gradients, *rest):
    """Planted: a cast to what the settings do not say."""
    return reduce.reduce_gradients(
        {path: x.astype(jnp.bfloat16) for path, x in gradients.items()}, *rest
    )


def one_forgotten(gradients, ways, *rest):
    """Planted: a bias, a thousandth of the gradient, is never summed."""
    ways = {
        path: reduce.Reduction() if path.endswith("out_bias") else way for path, way in ways.items()
    }
    return reduce.reduce_gradients(gradients, ways, *rest)


@of_the_fuzzer
def test_a_planted_scatter_in_the_wrong_order_is_found(monkeypatch, oracles, room):
    """Two axes of one dim, each handing out what belongs to the other."""
    right = exchange.reduction

    def wrong(*arguments):
        found = right(*arguments)
        return reduce.Reduction(found.sum, found.scatter[::-1])

    monkeypatch.setattr(exchange, "reduction", wrong)
    mesh = {"mesh.pipeline": 2, "mesh.fsdp": 2, "mesh.expert": 2}
    each = Draw(0, TWO, mesh | {"rules.parameters.embed": ("expert", "fsdp")})
    report = examine(each, oracles, room)
    assert report.kinds() == {"numbers differ from one device, float32"}


@of_the_fuzzer
@pytest.mark.parametrize("planted", [lower_precision, one_forgotten])
def test_a_planted_fault_of_the_gradients_is_found(planted, monkeypatch, oracles, room):
    each = Draw(0, TWO, {"mesh.data": 2})
    assert oracles.of(TWO).run.end == "finished"
    monkeypatch.setattr(reduction, "reduce_gradients", planted)
    report = examine(each, oracles, room)
    assert report.kinds() == {"numbers differ from one device, float32"}


@of_the_fuzzer
def test_a_planted_sum_in_16_bits_is_found(monkeypatch):
    """Both runs lose the same terms, and agree: only the comparison with float32 sees it."""
    monkeypatch.setattr(wide_sums, "with_wide_sums", lambda function, *_: function)
    report = Report(Draw(0, TWO | {"precision.compute": "bfloat16"}, {"mesh.data": 2}))
    check_narrow(report)
    assert report.kinds() == {"a step in 16 bits is not that of float32"}


@of_the_fuzzer
def test_a_planted_fault_of_resuming_is_found(monkeypatch, oracles, room):
    batches = loop.batches
    monkeypatch.setattr(
        loop, "batches", lambda setup, data, step, _, saw: batches(setup, data, step, 0, saw=saw)
    )
    draws = [
        Draw(0, TWO, {"checkpoint.every": 1}, end="same", stop=1, by="term"),
        Draw(
            0, TWO, {"checkpoint.every": 1}, end="moved", stop=1, by="term", onto={"mesh.data": 2}
        ),
    ]
    kinds = [examine(each, oracles, room).kinds() for each in draws]
    assert kinds == [{"not bit by bit the same"}, {"numbers differ from one device, float32"}]


@of_the_fuzzer
def test_a_planted_traceback_is_found(monkeypatch, oracles, room):
    make = grad_accumulation.make_gradients

    def broken(setup, parts):
        if setup.rules.parameters["ffn"] == ("fsdp",):
            raise KeyError("ffn")
        return make(setup, parts)

    monkeypatch.setattr(grad_accumulation, "make_gradients", broken)
    (kind,) = examine(Draw(0, TWO, FFN_OVER_FSDP), oracles, room).kinds()
    assert kind.startswith("traceback: KeyError in step.py:find_gradients_of: _")


def test_a_failing_draw_is_made_small():
    def fails(each: Draw) -> bool:
        return (
            each.layout.get("rules.parameters.ffn") == ("fsdp",)
            and each.numbers.get("model.layers") == 3
        )

    layout = FFN_OVER_FSDP | {
        "mesh.data": 2,
        "train.remat": "full",
        "train.zero": 1,
        "log.every": 1,
    }
    numbers = {"model.layers": 3, "model.bias": False, "train.steps": 5}
    small = shrunk(Draw(3, numbers, layout, end="moved", onto={"mesh.data": 2}), fails, seconds=20)
    assert small == Draw(3, {"model.layers": 3}, {"rules.parameters.ffn": ("fsdp",)})
    assert spoken(small).endswith(
        "--simulate-devices 1 --set model.layers=3 --set rules.parameters.ffn=fsdp"
    )


def test_what_is_spoken_is_what_was_drawn():
    for seed in range(40):
        each = draw(seed * (SEEDS_PER_NUMBERS + 1))
        values, _ = settings_of(each.numbers, each.layout)
        words = spoken(each).splitlines()[0].partition("    #")[0].split("--set ")[1:]
        if config := config_of(values):
            assert load(BASE_FILE, words).model_dump() == config.model_dump()


def test_an_abort_and_a_silence_are_told_with_the_draw_they_end():
    each = Draw(5, {}, {}).plain()
    begins = f"import os, sys, time; print({json.dumps({'begins': each})!r}, flush=True);"
    endings = {
        "os.write(2, b'Check failed: 3 == 4'); os.abort()": "SIGABRT, Check failed: N == N",
        "time.sleep(60)": "silent for 2 s",
    }
    for ending, told in endings.items():
        _, last = campaign.answers([sys.executable, "-c", begins + ending], 2)
        assert last.pop("died") == f"the process ended: {told}"
        assert last.pop("stderr") in ("Check failed: 3 == 4", "") and last == each


def test_a_worker_that_dies_is_a_finding_and_the_campaign_goes_on(monkeypatch):
    def said(command, _patience):
        first = command.index("--seeds") + 1
        for seed in range(*map(int, command[first : first + 2])):
            line = Draw(seed, {}, {}).plain()
            yield {"begins": line}
            if seed == 5:
                yield line | {"died": "it aborted", "stderr": "opcode copy"}
                return
            yield line | {
                "outcome": "trained",
                "refused": [],
                "findings": [],
                "excused": 0,
                "seconds": 1,
                "cpu_seconds": 1,
                "shrunk": {},
            }

    monkeypatch.setattr(campaign, "answers", said)
    lines = list(campaign.campaign(3, 50, float("inf"), 0.0))
    assert [line["seed"] for line in lines] == list(range(3, 50))
    assert [line["findings"] for line in lines if line["findings"]] == [
        [["it aborted", "opcode copy"]]
    ]
    assert "1   it aborted (first: seed 5)" in campaign.summary(lines)
