"""A teacher is counted: its bytes as the state has them, its FLOPs as the metrics do, its time."""

import json
from dataclasses import replace

import jax
import pytest
from helpers import described_run, prepared, tiny

from spmdtrain.models.size import train_flops_per_token
from spmdtrain.planner.cost import memory
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.planner.cost.workload import workload_of
from spmdtrain.planner.estimate import estimate_on_mesh
from spmdtrain.train.distillation.run_teacher import teacher_of
from spmdtrain.train.state import bytes_per_device

LARGE = ("model.embed=256", "model.ffn=1024", "model.layers=3")
STUDENT = ("model.embed=128", "model.ffn=512", "train.sequence_length=16")
MESH = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.zero=1")


def taught(*settings: str) -> tuple[str, ...]:
    return (*STUDENT, f"distill.teacher={described_run(*LARGE)}", *settings)


def test_its_weights_are_those_of_the_state_and_split_by_the_rules():
    """They are frozen: ZeRO-1, which splits what is trained, leaves them whole over `data`."""
    setup = prepared(*taught(*MESH, "precision.frozen=bfloat16"))
    teacher = teacher_of(setup)
    assert teacher is not None
    own = sum(x.size for x in jax.tree.leaves(teacher.setup.state.params))
    held = bytes_per_device(setup.state.items["teacher"])
    assert held == pytest.approx(2 * own / 4, rel=0.02), "but for norms and biases"
    config, sizes = setup.config, dict(setup.mesh.shape)
    alone = memory.exact_state(tiny(*STUDENT, *MESH), sizes)
    assert memory.exact_state(config, sizes) == (alone[0] + held, alone[1])
    closed_form = memory.closed_form_state(workload_of(config, sizes))
    assert closed_form == pytest.approx(memory.exact_state(config, sizes), rel=0.03)


def test_its_forward_pass_counts_in_flops_and_time():
    h100 = hardware("h100")
    config = tiny(*taught("precision.compute=bfloat16"))
    sizes = config.mesh.sizes
    found = estimate_on_mesh(config, sizes, h100)
    alone = estimate_on_mesh(tiny(*STUDENT, "precision.compute=bfloat16"), sizes, h100)
    larger = tiny(*LARGE).model
    flops = train_flops_per_token(config.model, 16) + train_flops_per_token(larger, 16) / 3
    each = found.time.tokens_per_second_per_device
    assert found.time.model_flops_per_device == pytest.approx(flops * each)
    terms = found.time.terms
    assert {**terms, "teacher": 0} == pytest.approx(dict(alone.time.terms))
    assert found.memory.total > alone.memory.total + found.memory.parameters / 2
    # The same model, learning: its layers take two times the forward pass more.
    ((_, teacher),) = found.workload.second_models
    itself = replace(found.workload.with_settings(model=teacher), second_models=())
    learning = sum(estimate_of(itself, h100, name) for name in ("matmul", "attention", "head"))
    assert 0.2 * learning < terms["teacher"] < 0.6 * learning


def estimate_of(workload, on, term: str) -> float:
    from spmdtrain.planner.cost.step_time import step_time
    from spmdtrain.planner.estimate import our_software

    return step_time(workload, on, our_software(tiny(), on)).terms[term]


def test_saved_logits_count_in_the_batch_and_nowhere_else(tmp_path):
    """A teacher's forward pass and its weights are those of another run."""
    said = {"temperature": 1.0, "vocab": 64, "corpus": "", "tokenizer": "", "weights": ""}
    said |= {"version": 1, "tokens": 100, "top": 8, "sequence_length": 16, "packing": "stream"}
    said |= {"teacher": "", "ids": "", "logs": ""}
    (tmp_path / "logits.json").write_text(json.dumps(said))
    h100 = hardware("h100")
    config = tiny(*STUDENT, f"distill.logits={tmp_path}")
    found, alone = (
        estimate_on_mesh(each, config.mesh.sizes, h100) for each in (config, tiny(*STUDENT))
    )
    assert dict(found.time.terms) == dict(alone.time.terms)
    numbers = 16 * 16 * (8 + 9)  # in a batch
    memory_of = {name: count for name, count in found.memory.by_category().items()}
    assert memory_of["parameters"] == alone.memory.by_category()["parameters"]
    more = found.memory.total - alone.memory.total
    assert 4 * numbers <= more <= 4 * numbers + 4 * 16 * 16 * 64, "and logits of two"
    setup = prepared(*STUDENT, f"distill.logits={tmp_path}")
    held = sum(x.size for name, x in setup.batch.items() if name.startswith("taught"))
    assert held == numbers
