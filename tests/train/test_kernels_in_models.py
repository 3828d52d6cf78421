"""Kernels in models: the same gradients on any mesh, nothing gathered around them, one line where
one cannot run.
"""

import jax
import numpy as np
import pytest
from absent_gpu import needs_compiler, printed
from helpers import batches_of, mesh_of, tiny

from spmdtrain.config import ConfigError
from spmdtrain.running.compile_step import lower_step
from spmdtrain.train.fresh import init_state
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard
from spmdtrain.train.step import make_gradients

pytestmark = pytest.mark.long

SMALL = (
    "model.embed=32",
    "model.heads=4",
    "model.vocab=32",
    "train.sequence_length=16",
    "train.global_batch=8",
)
MESHES = {
    "data fsdp tensor": (
        "mesh.data=2",
        "mesh.fsdp=2",
        "mesh.tensor=2",
        "model.kv_heads=2",
        "model.name=llama",
    ),
    "context documents": (
        "mesh.context=2",
        "mesh.tensor=2",
        "data.packing=documents",
        "precision.compute=bfloat16",
    ),
    "zero bubble": (
        "mesh.pipeline=2",
        "mesh.tensor=2",
        "train.microbatch=2",
        "pipeline.schedule=zero_bubble",
    ),
}


def setup_with(attention: str, settings: tuple[str, ...]) -> Setup:
    """`attention`: also an interpreted kernel, which the settings do not offer."""
    config = tiny(*SMALL, *settings)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"attention": attention})}
    )
    return shard(config, devices=jax.devices()[: mesh_of(settings)])


def loss_and_gradients(attention: str, settings: tuple[str, ...]):
    setup = setup_with(attention, settings)
    find = jax.jit(make_gradients(setup))
    state = init_state(setup)
    with batches_of(setup) as ahead:
        return jax.device_get(find(state.params, state.step, next(ahead)))


@pytest.mark.parametrize("settings", MESHES.values(), ids=MESHES)
def test_a_kernel_gives_the_gradients_of_the_plain_implementation(settings):
    got, got_sums = loss_and_gradients("triton:interpret", settings)
    want, want_sums = loss_and_gradients("xla", settings)
    near = 2e-2 if "precision.compute=bfloat16" in settings else 1e-5
    assert got_sums["loss"] == pytest.approx(want_sums["loss"], rel=near)
    for path in want:
        worst = np.max(np.abs(got[path] - want[path])) / np.max(np.abs(want[path]))
        assert worst <= near, f"{path}: {worst}"


def test_an_implementation_that_cannot_run_is_one_line():
    setup = setup_with("cudnn", ())
    with pytest.raises(ConfigError) as refused:
        lower_step(setup)
    said = (
        "model.attention='cudnn' cannot run: bfloat16 and float16, not float32; "
        "try --set model.attention=auto"
    )
    assert str(refused.value) == said


GPU_STEP = """
import sys
from spmdtrain.config import GPT, DataConfig, MeshConfig, PipelineConfig, PrecisionConfig, \
RunConfig, TrainConfig
from spmdtrain.planner import deviceless
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.train.step import make_gradients
from spmdtrain.train.shard import shard
from spmdtrain.compiled import hlo
attention, stages = sys.argv[1], int(sys.argv[2])
config = RunConfig(
    model=GPT(layers=4, embed=512, heads=8, vocab=4096, attention=attention),
    mesh=MeshConfig(pipeline=stages, data=4 // stages, tensor=2),
    train=TrainConfig(global_batch=16, microbatch=2, sequence_length=256),
    precision=PrecisionConfig(compute="bfloat16"),
    data=DataConfig(corpus="synthetic"),
)
step, _ = deviceless.executable(config, config.mesh.sizes, hardware("h200"))
text = step.as_text()
own = "__gpu$xla.gpu.triton", "mosaic_gpu"
calls = sum(count for name, count in hlo.calls(text).items() if name.startswith(own))
kinds = " all-gather(", " all-gather-start(", " all-to-all(", " all-to-all-start("
gathers = [line for line in text.splitlines() if any(kind in line for kind in kinds)]
if stages > 1:  # slices of the stream that were summed over the stages are put together
    gathers = [line for line in gathers if "bf16[2,256,512]" not in line]
print(calls, len(gathers))
"""


@needs_compiler
@pytest.mark.parametrize(("attention", "stages"), [("triton", 2), ("mosaic", 1)])
def test_a_step_for_8_gpus_gathers_nothing_around_its_kernels(attention, stages):
    calls, gathers = map(int, printed(GPU_STEP, attention, str(stages)).split())
    assert calls >= 3, "forward, dq, dk and dv"
    assert gathers == 0
