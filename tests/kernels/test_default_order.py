"""What runs where nobody names an implementation and nothing was measured."""

import json

import jax
import jax.numpy as jnp
import pytest
from absent_gpu import needs_compiler, printed

from pallas_kernels.attention import api as attention_api
from pallas_kernels.attention.problem import Inputs, Problem, call_of
from pallas_kernels.calls import AttentionCall, ChunksCall, GroupedCall, InverseCall, NormCall
from pallas_kernels.grouped import api as grouped_api
from pallas_kernels.inverse import api as inverse_api
from pallas_kernels.norm import api as norm_api
from pallas_kernels.recurrence import api as chunks_api


def call(queries: int) -> AttentionCall:
    q = jax.ShapeDtypeStruct((1, queries, 2, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    return call_of(Problem(None, 0, None, 1.0), Inputs(q, k, k), return_lse=False)


NORM = NormCall(
    op="rmsnorm", rows=8, width=8, dtype="float32", scale="float32", bias=None, residual=None
)
GROUPED = GroupedCall(rows=128, tile=128, width=128, experts=1, out_width=128, dtype="bfloat16")

CHUNKS = ChunksCall(
    chunks=16,
    tokens=64,
    heads=48,
    key_dim=128,
    value_dim=128,
    dtype="bfloat16",
    corrects=True,
    by_channel=False,
)

INVERSE = InverseCall(matrices=768, size=64, dtype="float32")


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
    without_mosaic = ("triton", "xla") if "triton" in order else ("xla",)
    assert norm_api.order(NORM) == without_mosaic
    assert chunks_api.order(CHUNKS) == inverse_api.order(INVERSE) == ("xla",), "not yet measured"


COMPILED = """
import json, math, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pallas_kernels.aot import described_devices
from pallas_kernels.attention import attention
from pallas_kernels.chosen import using
from spmdtrain.compiled import hlo
from spmdtrain.config import GPT, DataConfig, PrecisionConfig, RunConfig, TrainConfig
from spmdtrain.planner import deviceless
from spmdtrain.planner.cost.hardware import hardware

TIME = 1024

def step(data={}, table={}, **model):
    config = RunConfig(
        model=GPT(layers=1, embed=128, heads=2, vocab=64, max_length=TIME, **model),
        train=TrainConfig(global_batch=1, microbatch=1, sequence_length=TIME),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(corpus="synthetic", **data),
    )
    with using(table) as decisions:
        made, _ = deviceless.executable(config, config.mesh.sizes | {"data": 1}, hardware("h100"))
    return made.as_text(), [name for name in decisions.taken if name.startswith("layernorm")]

def by_xla():
    mesh = Mesh(np.array(described_devices("h100")), ("all",))
    shape = jax.ShapeDtypeStruct((1, TIME, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run = jax.jit(lambda q, k, v: attention(q, k, v, causal=True, implementation="xla"))
        return run.lower(shape, shape, shape).compile().as_text()

def seen(text):
    shapes = [[*map(int, found.split(","))] for found in re.findall(r"\\[(\\d[\\d,]*)\\]", text)]
    names = "attention_(?:forward|dq|dkv)|norm_(?:forward|backward)|joined_heads|gelu_gradient"
    kernels = re.findall(rf"({names})\\b", text)
    return {
        "calls": hlo.calls(text),
        "kernels": sorted(set(kernels)),
        "largest": max(map(math.prod, shapes)),
        "tiles of scores": sum(shape[-2:] == [512, 512] for shape in shapes),
    }

documents, norms = step(data={"packing": "documents"})
capped, _ = step(table=dict.fromkeys(norms, "xla"), windows=(300,), score_cap=30.0)
texts = {"documents": documents, "capped": capped, "XLA": by_xla()}
print(json.dumps({name: seen(text) for name, text in texts.items()}))
"""
ATTENTION = ["attention_dkv", "attention_dq", "attention_forward"]
NORMS = ["norm_backward", "norm_forward"]
BIASES = ["gelu_gradient", "joined_heads"]  # of the one layer


@needs_compiler
def test_training_steps_that_cudnn_refuses_run_our_kernels_and_have_no_scores_in_memory():
    """Whole steps for an H100, in the default configuration: packed, and with a window and a cap.

    The second has a table that gives its norms to XLA. No array is as large as the scores of
    one head, and none has a tile of them, which XLA's attention has.
    """
    found = json.loads(printed(COMPILED).splitlines()[-1])
    print(found)
    for name in ("documents", "capped"):
        seen = found[name]
        norms = [] if name == "capped" else NORMS
        assert seen["kernels"] == ATTENTION + BIASES + norms, name
        assert seen["calls"]["mosaic_gpu_v2"] == 3, name
        triton = seen["calls"].get("__gpu$xla.gpu.triton", 0)
        assert triton == 3 * len(norms) + len(BIASES), f"{name}: 3 norms"
        assert not any("fmha" in call for call in seen["calls"]), f"{name}: cuDNN"
        assert seen["largest"] < 1024 * 1024 and seen["tiles of scores"] == 0, name
    by_xla = found["XLA"]
    assert by_xla["tiles of scores"] > 0 and by_xla["kernels"] == []
