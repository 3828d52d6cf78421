"""Stages of a batch: smaller and shorter ones first, and the samples of a run in their order."""

import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import TINY, assert_same_bits, mesh_of, prepared
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.config import ConfigError, RunConfig, UserError, from_resolved
from spmdtrain.config.schema.train import BatchStage, TrainConfig
from spmdtrain.config.stage_timetable import TimedStage
from spmdtrain.data.cut_samples import in_pieces, sequences_of
from spmdtrain.data.source import open_data
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.lab.replay.replay import replay
from spmdtrain.running import loop
from spmdtrain.running.published.export_run import export_run
from spmdtrain.train.shard import shard
from spmdtrain.train.stages import setup_of
from spmdtrain.train.step import make_step

pytestmark = pytest.mark.usefixtures("shared_programs")

# Steps 1 and 2 read 2 samples each, cut in two, steps 3 and 4 as many in whole, the rest 8.
STAGES = [
    {"until": 2, "global_batch": 4, "sequence_length": 8},
    {"tokens": 128, "global_batch": 2},
]
SAMPLES = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 15), (16, 23)]
STEPS = len(SAMPLES)
SMALL = (f"train.steps={STEPS}", "model.layers=1", "model.embed=16", "train.global_batch=8")
EVERY_STEP = ("checkpoint.every=1", "checkpoint.keep=9", "log.fingerprints=1")
MESH = ("mesh.data=2", "mesh.tensor=2", "train.zero=1")


def staged(*overrides: str, stages: list[dict] | None = None) -> RunConfig:
    train = TINY["train"] | {"stages": STAGES if stages is None else stages}
    return from_resolved({"config": TINY | {"train": train}, "origin": {}}, overrides)


def run(directory: Path, *overrides: str, **options) -> loop.Outcome:
    config = staged(*SMALL, *overrides)
    return loop.run(config, directory, devices=jax.devices()[: mesh_of(overrides)], **options)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ran") / "run"
    run(directory, *EVERY_STEP)
    return directory


@given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 4]), st.integers(1, 3))),
    st.integers(0, 30),
)
def test_a_step_reads_on_where_the_one_before_has_ended(drawn, done):
    """Whatever the stages are: `(steps, pieces of a sample, samples of a step)`."""
    stages, end = [], 0
    for steps, pieces, samples in drawn:
        end += steps
        stages.append(
            BatchStage(until=end, global_batch=pieces * samples, sequence_length=16 // pieces)
        )
    train = TrainConfig(stages=tuple(stages), global_batch=3, sequence_length=16)
    read = sum(train.stage_of(step).samples for step in range(1, done + 1))
    assert train.samples_before(done) == read
    assert train.samples_before(done + 1) == read + train.stage_of(done + 1).samples
    by_tokens = [stage.model_copy(update={"until": None}) for stage in stages]
    tokens = [16 * train.samples_before(stage.until) for stage in stages]
    parts = zip(by_tokens, tokens, strict=True)
    again = tuple(stage.model_copy(update={"tokens": count}) for stage, count in parts)
    assert train.model_copy(update={"stages": again}).timetable == train.timetable


def test_the_pieces_of_samples_are_the_samples():
    """In any order, with a document that a piece cuts counted from the start of the piece."""
    config, data = open_data(staged("data.packing=documents", "train.sequence_length=32"))
    samples = data.train_samples(config)
    ids = np.array([7, 3])
    whole = samples(ids)
    sequences = sequences_of(ids, 4)
    assert sequences.tolist() == [28, 29, 30, 31, 12, 13, 14, 15]
    backwards = in_pieces(samples, 4)(sequences[::-1])
    found = {name: x[::-1] for name, x in backwards.items()}
    assert found["sample"].tolist() == sequences.tolist()
    for name in ("tokens", "targets", "mask", "segment_ids"):
        assert np.array_equal(found[name].reshape(2, 32), whole[name]), name
    positions = found["positions"]
    assert (positions[:, 0] == 0).all()
    inside = np.diff(found["segment_ids"], axis=1) == 0
    assert (np.diff(positions, axis=1)[inside] == 1).all()
    assert (positions[:, 1:][~inside] == 0).all()


@pytest.mark.seconds
@pytest.mark.parametrize("mesh", [(), MESH, ("mesh.pipeline=2", "train.microbatch=1")], ids=str)
def test_a_stage_runs_the_program_of_a_run_with_its_batch(mesh):
    numbers = ("model.embed=16", "train.global_batch=8", *mesh)
    setup = shard(staged(*numbers), devices=jax.devices()[: mesh_of(mesh)])
    for stage in setup.config.train.timetable:
        own = setup_of(setup, stage)
        sizes = (f"train.global_batch={stage.global_batch}", "model.max_length=16")
        length = f"train.sequence_length={stage.sequence_length}"
        alone = prepared(*numbers, *sizes, length)
        ours, theirs = (
            make_step(each).lower(each.state, each.batch).as_text() for each in (own, alone)
        )
        assert ours == theirs


def test_a_run_with_stages_reads_each_sample_once_in_its_order(ran):
    steps = lines(ran / "steps.jsonl")
    assert [tuple(line["samples"]) for line in steps] == SAMPLES
    figures = [line for line in lines(ran / "metrics.jsonl") if "loss" in line]
    assert [line["tokens"] for line in figures] == [32, 32, 32, 32, 128, 128]
    assert [line["tokens_per_second"] * line["step_seconds"] for line in figures] == pytest.approx(
        [32, 32, 32, 32, 128, 128]
    )
    compiled = json.loads((ran / "compiled.json").read_text())["stages"]
    assert [(each["first"], each["last"]) for each in compiled] == [(1, 2), (3, 4)]


@pytest.mark.seconds
@pytest.mark.parametrize("step", [1, 2, 4], ids="after step {}".format)
def test_a_run_resumed_anywhere_is_the_run_to_the_bit(ran, tmp_path, step):
    """Within a stage, and at each edge of one."""
    copy = tmp_path / "run"
    shutil.copytree(ran, copy)
    run(copy, *EVERY_STEP, step=step)
    assert lines(copy / "steps.jsonl") == lines(ran / "steps.jsonl")
    setup = shard(staged(*SMALL), devices=jax.devices()[:1])
    first, second = (
        Checkpoints(each, setup, keep=None).restore(STEPS, setup.state)[0] for each in (ran, copy)
    )
    assert_same_bits(first, second)


def test_a_step_of_a_stage_is_replayed_with_its_batch(ran):
    found = replay(ran, 2, to=STEPS)
    assert found.equal and found.samples == (2, 23)
    assert set(found.leaves) == set(range(2, STEPS + 1))


def test_an_export_may_be_the_mean_of_checkpoints(ran, tmp_path):
    def exported(out: str, **asked) -> dict[str, np.ndarray]:
        export_run(ran, tmp_path / out, dtype="float32", **asked)
        return {name: each.map() for name, each in open_tensors(tmp_path / out).items()}

    steps = [2, 3, 6]
    mean = exported("mean", average=steps)
    each = [exported(f"step{step}", step=step) for step in steps]
    for name, x in mean.items():
        want = np.mean([one[name] for one in each], 0, dtype=np.float64)
        assert np.array_equal(x, want.astype(np.float32)), name
        assert not np.array_equal(x, each[-1][name]), name
    for asked, said in (
        ({"average": [2]}, "fewer than two"),
        ({"average": [2, 2]}, "fewer than two"),
        ({"average": [2, 8]}, "no checkpoint of step 8"),
        ({"average": [2, 3], "step": 3}, "one checkpoint, --average several"),
    ):
        with pytest.raises(UserError, match=said):
            export_run(ran, tmp_path / "refused", **asked)


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", [MESH, ("mesh.pipeline=2", "mesh.fsdp=2", "train.microbatch=1")], ids=str
)
def test_stages_on_a_mesh_train_as_on_one_device(ran, tmp_path, mesh):
    run(tmp_path, *mesh, "checkpoint.every=0")
    one, many = (
        [line["loss"] for line in lines(each / "metrics.jsonl") if "loss" in line]
        for each in (ran, tmp_path)
    )
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert lines(tmp_path / "steps.jsonl")[1]["tokens"] == lines(ran / "steps.jsonl")[1]["tokens"]


FREEZING = [{"until": 2, "frozen_layers": 1}, {"until": 4, "frozen_layers": 0}]
DECAYS = ("optimizer.weight_decay=0.1", "optimizer.schedule=constant")


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", [(), ("mesh.pipeline=2", "mesh.data=2", "train.zero=1", "train.microbatch=2")], ids=str
)
def test_a_stage_freezes_its_own_layers(tmp_path, mesh):
    """The first layer, and what embeds: still in steps 1 and 2, and again from step 5 on, whatever
    momentum they have by then. Resumed inside a stage it is the run to the bit.
    """
    model = ("model.layers=2", "model.tied=false", "finetune.frozen_layers=1")
    small = (*SMALL, *model, *DECAYS, *EVERY_STEP, *mesh)
    config, devices = staged(*small, stages=FREEZING), jax.devices()[: mesh_of(mesh)]
    loop.run(config, tmp_path / "run", devices=devices)
    setup = shard(config, devices=devices)

    def states(run: Path, *steps: int) -> list:
        checkpoints = Checkpoints(run, setup, keep=None)
        return [jax.device_get(checkpoints.restore(step, setup.state)[0]) for step in steps]

    steps = range(1, STEPS + 1)
    after = dict(zip(steps, states(tmp_path / "run", *steps), strict=True))
    first = setup.model.stage_layout.numbers == 0
    for path, x in after[6].params.items():
        below = path in ("tokens.table_ve", "positions_te")
        frozen = [after[step].params[path] for step in (1, 2, 4, 5, 6)]
        if setup.model.in_stack(path):
            assert not np.array_equal(x[~first], frozen[-2][~first]), path
            frozen, below = [each[first] for each in frozen], True
        same = [np.array_equal(*frozen[at : at + 2]) for at in range(4)]
        assert same == [below, False, below, below], path
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    loop.run(config, tmp_path / "again", devices=devices, step=3)
    assert_same_bits(states(tmp_path / "again", STEPS)[0], after[STEPS])


@pytest.mark.parametrize(
    ("rule", "want"),
    [("none", [1, 1, 1, 1, 1, 1]), ("linear", [0.25] * 4 + [1, 1]), ("sqrt", [0.5] * 4 + [1, 1])],
)
def test_a_rate_follows_the_tokens_of_a_batch_if_asked(rule, want):
    constant = ("optimizer.schedule=constant", "optimizer.warmup=0", "optimizer.learning_rate=1")
    config = staged(*SMALL, *constant, f"optimizer.rate_by_batch={rule}")
    setup = shard(config, devices=jax.devices()[:1])
    assert [float(setup.learning_rate(step)) for step in range(STEPS)] == want


@pytest.mark.parametrize(
    ("stages", "overrides", "said"),
    [
        ([{"until": 2}], (), "needs a global_batch or a sequence_length"),
        ([{"global_batch": 2}], (), "ends by one of both"),
        ([{"until": 2, "tokens": 9, "global_batch": 2}], (), "ends by one of both"),
        ([{"until": 2, "sequence_length": 6}], (), "does not divide"),
        ([{"until": 2, "sequence_length": 4, "global_batch": 6}], (), "not divisible by the 4"),
        ([{"until": 2, "global_batch": 32}], (), "more than the 16 x 16"),
        ([{"until": 2, "global_batch": 2}] * 2, (), "begins after step 2"),
        (FREEZING, ("model.layers=1",), r"train.stages\[0\].frozen_layers=1: of the 1 layers"),
        (FREEZING, ("optimizer.name=schedule_free_adamw",), "go on moving"),
        (STAGES, ("train.epochs=1",), "name steps"),
        (STAGES, ("data.packing=best_fit",), "cuts no documents"),
        (STAGES, ("guard.replay_check=5",), "repeats one compiled step"),
        (
            STAGES,
            ("islands.count=2", "islands.index=0", "islands.directory=d"),
            "reads its own share",
        ),
        ([], ("optimizer.rate_by_batch=sqrt",), "needs batches of several sizes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_go_together_is_refused(stages, overrides, said):
    with pytest.raises(ConfigError, match=said):
        staged(*overrides, stages=stages)


def test_a_stage_that_the_mesh_does_not_divide_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"train.stages\[1\].global_batch=2 is not divisible"):
        run(tmp_path / "run", "mesh.data=4")
    assert not (tmp_path / "run").exists()


def test_stages_without_an_end_are_one():
    assert TrainConfig().timetable == (TimedStage(0, None, 16, 128, 1, 0),)


def test_a_stage_may_end_after_more_tokens_than_an_int32_counts():
    stage = BatchStage(tokens=100_000_000_000, global_batch=512)
    train = TrainConfig(steps=100_000, global_batch=1024, sequence_length=4096, stages=(stage,))
    assert train.timetable[0].last == math.ceil(100e9 / (512 * 4096))
