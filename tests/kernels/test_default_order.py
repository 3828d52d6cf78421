"""What runs where nobody names an implementation and nothing was measured."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import api as attention_api
from pallas_kernels.attention.problem import Inputs, Problem, call_of
from pallas_kernels.calls import AttentionCall, GroupedCall, NormCall
from pallas_kernels.grouped import api as grouped_api
from pallas_kernels.norm import api as norm_api

ROOT = Path(__file__).parents[2]


def call(queries: int) -> AttentionCall:
    q = jax.ShapeDtypeStruct((1, queries, 2, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    return call_of(Problem(None, 0, None, 1.0), Inputs(q, k, k), return_lse=False)


NORM = NormCall(
    op="rmsnorm", rows=8, width=8, dtype="float32", scale="float32", bias=None, residual=None
)
GROUPED = GroupedCall(rows=128, tile=128, width=128, experts=1, out_width=128, dtype="bfloat16")


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("NVIDIA H100 80GB HBM3", ("cudnn", "mosaic", "triton", "xla")),
        ("NVIDIA A100-SXM4-80GB", ("cudnn", "triton", "xla")),
        ("NVIDIA A100-PCIE-40GB", ("cudnn", "triton", "xla")),
        ("NVIDIA B200", ("cudnn", "triton", "xla")),
        ("NVIDIA GeForce RTX 4090", ("cudnn", "xla")),  # our tiles may be more than it has room for
        ("cpu", ("cudnn", "xla")),
    ],
)
def test_cudnn_then_the_kernels_of_the_generation_then_xla(kind, order, monkeypatch):
    monkeypatch.setattr(attention_api, "device_kind", lambda: kind)
    monkeypatch.setattr(norm_api, "device_kind", lambda: kind)
    monkeypatch.setattr(grouped_api, "device_kind", lambda: kind)
    assert attention_api.order(call(128)) == order
    assert attention_api.order(call(1)) == ("cudnn", "xla"), "generation: a query at a time"
    assert grouped_api.order(GROUPED) == order[1:], "the same, but no cuDNN"
    assert norm_api.order(NORM) == (("triton", "xla") if "triton" in order else ("xla",))


COMPILED = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pallas_kernels.aot import described_devices
from pallas_kernels.attention import attention
from pallas_kernels.norm import rmsnorm
from spmdtrain.compiled import hlo
from spmdtrain.config import GPT, DataConfig, PrecisionConfig, RunConfig, TrainConfig
from spmdtrain.planner import deviceless
from spmdtrain.planner.cost.hardware import hardware

mesh = Mesh(np.array(described_devices("h100")), ("all",))

def step(forward=False, **options):
    def loss(scale, q, k, v):
        y = attention(rmsnorm(q, scale), k, v, causal=True, **options)
        return jnp.sum(y.astype(jnp.float32) ** 2)
    def shape(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P()))
    q, k = (shape(jnp.bfloat16, 1, 1024, heads, 64) for heads in (4, 2))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        given = jax.jit(loss if forward else jax.grad(loss, (0, 1, 2, 3)))
        return given.lower(shape(jnp.float32, 64), q, k, k).compile().as_text()

def of_documents():
    config = RunConfig(
        model=GPT(layers=1, embed=128, heads=2, vocab=64, max_length=1024),
        train=TrainConfig(global_batch=1, microbatch=1, sequence_length=1024),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(corpus="synthetic", packing="documents"),
    )
    made, _ = deviceless.executable(config, config.mesh.sizes | {"data": 1}, hardware("h100"))
    return made.as_text()

texts = {
    "documents": of_documents(),
    "windowed": step(window=(300, 0), softcap=30.0),
    "windowed by XLA": step(window=(300, 0), softcap=30.0, implementation="xla", forward=True),
}
found = {name: [hlo.calls(text), text.count("512,512]")] for name, text in texts.items()}
print(json.dumps(found))
"""


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11) or not importlib.util.find_spec("jax_cuda13_plugin"),
    reason="needs jax 0.11 and its CUDA plugin",
)
def test_steps_that_cudnn_refuses_run_our_kernels_and_have_no_scores_in_memory():
    """XLA's attention has tiles of 512 x 512 scores."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    for name in ("documents", "windowed"):
        calls, tiles_of_scores = found[name]
        assert calls.get("mosaic_gpu_v2", 0) >= 3, f"{name}: forward, dq, dk and dv"
        assert calls.get("__gpu$xla.gpu.triton", 0) >= 2, f"{name}: a norm and its gradient"
        assert tiles_of_scores == 0, name
    calls, tiles_of_scores = found["windowed by XLA"]
    assert tiles_of_scores > 0 and "mosaic_gpu_v2" not in calls
