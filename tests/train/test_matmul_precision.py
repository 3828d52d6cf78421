"""What float32 compute means for a matmul, read off the lowered step: no factor becomes TF32."""

import re

import jax
import numpy as np
import pytest
from helpers import prepared

from spmdtrain.inference import sample
from spmdtrain.running.compile_step import lower_step
from spmdtrain.train.fresh import init_state
from spmdtrain.train.step import make_eval_step

MESHES = {
    "one": (),
    "split": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    "stages": ("mesh.pipeline=2", "mesh.tensor=2", "train.microbatch=2"),
}
MEANINGS = [
    ("float32", "HIGHEST, HIGHEST"),
    ("bfloat16", "DEFAULT, DEFAULT"),
]


def precisions(text: str) -> set[str]:
    """Of all matmuls in a lowered program."""
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert len(dots) >= 7
    said = [re.search(r"precision = \[(\w+, \w+)\]", line) for line in dots]
    return {found[1] if found else "none" for found in said}


@pytest.mark.seconds
@pytest.mark.parametrize(("compute", "wanted"), MEANINGS)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_matmul_of_a_step_says_what_compute_means(mesh, compute, wanted):
    setup = prepared(*MESHES[mesh], f"precision.compute={compute}")
    assert precisions(lower_step(setup).as_text()) == {wanted}
    evaluate = make_eval_step(setup)
    batch = setup.batch
    assert precisions(evaluate.lower(setup.state.params, batch).as_text()) == {wanted}


@pytest.mark.parametrize(("compute", "wanted"), MEANINGS)
def test_every_matmul_of_sampling_too(compute, wanted, monkeypatch):
    setup, texts, jit = prepared(f"precision.compute={compute}"), [], jax.jit
    params = init_state(setup).params

    def lowered(function, **options):
        def run(params, prompts_bt, *rest):
            texts.append(jit(function, **options).lower(params, prompts_bt, *rest).as_text())
            return prompts_bt

        return run

    monkeypatch.setattr(sample.jax, "jit", lowered)
    generate = sample.make_generate(setup, 2, sample.Choice(1.0, None, None))
    generate(params, [np.zeros(4, np.int32)], jax.random.key(0))
    assert precisions(texts[-1]) == {wanted}
