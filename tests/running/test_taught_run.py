"""A run with a teacher resumes to the bit, saves no weights of the teacher, and takes no other."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import mesh_of, prepared, tiny

import spmdtrain as st
from spmdtrain.checkpoints.saved_steps import SavedSteps
from spmdtrain.cli import main
from spmdtrain.config import CheckpointError, ConfigError, DataError, to_toml
from spmdtrain.running.distillation.teacher_weights import with_teacher
from spmdtrain.running.distillation.write_logits import write_logits
from spmdtrain.running.published.export_run import export_run
from spmdtrain.train.distillation.run_teacher import teacher_of
from spmdtrain.train.shard import shard

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("shared_programs")]

TEACHER = ("model.name=llama", "model.embed=24", "model.layers=1", "model.vocab=51")
STUDENT = (
    *("model.layers=1", "model.embed=16", "model.heads=2", "model.vocab=51", "train.steps=4"),
    *("train.sequence_length=8", "train.global_batch=4", "checkpoint.every=2"),
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("teacher") / "run", seed=1)


def saved(directory: Path, seed: int) -> Path:
    """A run of the teacher's model, fresh from this seed."""
    setup = prepared(*TEACHER, f"train.seed={seed}")
    st.save(setup, st.init_state(setup), directory)
    return directory


def trained(directory: Path, teacher: Path, *settings: str, **options) -> st.Outcome:
    config = tiny(*STUDENT, f"distill.teacher={teacher}", *settings)
    return st.run(config, directory, devices=jax.devices()[: mesh_of(settings)], **options)


def lines(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_it_resumes_to_the_bit_and_saves_no_teacher(tmp_path, teacher):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    trained(whole, teacher)
    trained(halves, teacher, hooks=[lambda event, step, _: event == "step" and step == 2])
    moved = shutil.copytree(teacher, tmp_path / "moved")
    assert trained(halves, moved).step == 4
    want, got = st.weights(whole), st.weights(halves)
    for path in want:
        np.testing.assert_array_equal(got[path], want[path])
    with_loss = [(line["step"], line["loss"], line["distill_loss"]) for line in lines(whole)]
    assert with_loss == [
        (line["step"], line["loss"], line["distill_loss"]) for line in lines(halves)
    ]
    step = SavedSteps(whole)
    assert not [name for name in step.read_arrays(4) if name.startswith("teacher")]
    shutil.rmtree(moved)
    assert st.open_run(halves).step == 4, "whoever has the run need not have its teacher"


def test_another_teacher_is_refused(tmp_path, teacher):
    trained(tmp_path / "run", teacher, "train.steps=2")
    other = saved(tmp_path / "other", seed=2)
    with pytest.raises(CheckpointError, match="learned from another teacher") as refused:
        trained(tmp_path / "run", other)
    assert "\n" not in str(refused.value)


def fingerprint(teacher: Path, *mesh: str) -> str:
    config = tiny(*STUDENT, f"distill.teacher={teacher}", *mesh)
    setup = with_teacher(shard(config, devices=jax.devices()[: mesh_of(mesh)]))
    teacher = teacher_of(setup)
    assert teacher is not None
    return teacher.opened.fingerprint()


def test_its_fingerprint_is_one_on_any_mesh_and_of_the_published_model(tmp_path, teacher):
    export_run(teacher, tmp_path / "published", dtype="float32")
    want = fingerprint(teacher)
    assert fingerprint(teacher, "mesh.tensor=2", "mesh.fsdp=2") == want, "tensor appends a row"
    assert fingerprint(tmp_path / "published") == want
    assert fingerprint(saved(tmp_path / "other", seed=2)) != want


REFUSED = {
    "model.vocab=49": "another vocabulary",
    "train.sequence_length=32": "reads 16 tokens at most",
    "mesh.pipeline=2": "hold parts of one model",
    "train.z_loss=0.1": "shapes a loss without a teacher",
    "train.label_smoothing=0.1": "shapes a loss without a teacher",
    "model.multi_token.depth=1": "predicts the next token alone",
}


@pytest.mark.parametrize(("setting", "says"), REFUSED.items(), ids=REFUSED)
def test_what_does_not_go_with_a_teacher_is_refused_by_name(teacher, setting, says):
    with pytest.raises(ConfigError, match=says) as refused:
        shard(tiny(*STUDENT, f"distill.teacher={teacher}", setting), devices=jax.devices()[:1])
    assert "distill.teacher=" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_state_without_the_teacher_is_refused(teacher):
    config = tiny(*STUDENT, f"distill.teacher={teacher}")
    setup = shard(config, devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"not been opened; try setup = st.with_teacher\(setup\)"):
        st.init_state(setup)
    with pytest.raises(ConfigError, match="no function of params and batch alone"):
        st.make_loss(setup)


# --- saved logits ---------------------------------------------------------------------------------

PIPELINE = ("mesh.pipeline=2", "model.layers=2", "train.microbatch=1")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> tuple[str, ...]:
    """Settings of a small text of 51 characters at most."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(chr(65 + (number * number) % 51) for number in range(400)))
    return ("data.corpus=text", f"data.path={file}", "data.tokenizer=characters")


@pytest.fixture(scope="module")
def logits(tmp_path_factory, teacher, text) -> Path:
    """What the teacher says of that text, as the command saves it."""
    folder = tmp_path_factory.mktemp("logits")
    config = folder / "student.toml"
    config.write_text(to_toml(tiny(*STUDENT, *text)))
    command = ["data", "teach", str(config), str(teacher), "--out", str(folder / "logits")]
    assert main([*command, "--top=5", "--set", "mesh.data=4", "--set", "mesh.tensor=2"]) == 0
    return folder / "logits"


def beside(directory: Path, logits: Path, *settings: str, **options) -> st.Outcome:
    config = tiny(*STUDENT, f"distill.logits={logits}", *settings)
    return st.run(config, directory, devices=jax.devices()[: mesh_of(settings)], **options)


def test_a_pipeline_beside_saved_logits_resumes_to_the_bit(tmp_path, logits, text):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    beside(whole, logits, *text, *PIPELINE)
    stops = [lambda event, step, _: event == "step" and step == 2]
    beside(halves, logits, *text, *PIPELINE, hooks=stops)
    moved = shutil.copytree(logits, tmp_path / "moved")
    assert beside(halves, moved, *text, *PIPELINE).step == 4
    want, got = st.weights(whole), st.weights(halves)
    for path in want:
        np.testing.assert_array_equal(got[path], want[path])
    figures = [(line["loss"], line["distill_loss"]) for line in lines(whole)]
    assert figures == [(line["loss"], line["distill_loss"]) for line in lines(halves)]
    assert all(distilled > 0 for _, distilled in figures)
    shutil.rmtree(moved)
    assert st.open_run(halves).step == 4, "whoever has the run need not have the logits"


def test_other_saved_logits_are_refused(tmp_path, logits, text):
    other = shutil.copytree(logits, tmp_path / "other")
    described = json.loads((other / "logits.json").read_text())
    (other / "logits.json").write_text(json.dumps(described | {"weights": "of another"}))
    stops = [lambda event, step, _: event == "step" and step == 2]
    beside(tmp_path / "run", logits, *text, *PIPELINE, hooks=stops)
    with pytest.raises(CheckpointError, match="learned from another teacher than distill.logits="):
        beside(tmp_path / "run", other, *text, *PIPELINE)


def test_saved_logits_are_refused_for_data_that_they_do_not_lie_beside(tmp_path, teacher, logits):
    with pytest.raises(DataError, match="was written for other settings or data: the tokenizer"):
        beside(tmp_path / "run", logits)
    with pytest.raises(ConfigError, match="distill.logits=.* and data= makes its own"):
        beside(tmp_path / "run", logits, data=lambda *_: np.arange(9))
    mine = tmp_path / "mine.py"
    mine.write_text("def samples(seed, index):\n    return [index % 51] * 9\n")
    config = tiny(*STUDENT, f"distill.teacher={teacher}", f"own.data={mine}:samples")
    with pytest.raises(ConfigError, match="the place of a token in one corpus"):
        write_logits(config, tmp_path / "logits")
