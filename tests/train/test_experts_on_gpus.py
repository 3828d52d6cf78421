"""What XLA's CUDA compiler makes of experts, for eight H100s that are not there."""

import json
import math

import pytest
from absent_gpu import needs_compiler, printed

from spmdtrain.parallel.experts.sending import bucket_of

pytestmark = pytest.mark.long

EXPERTS, CHOICES, EMBED = 24, 2, 128
TOKENS = 4 * 512  # of a device's microbatch
WAYS = {"fsdp": 2, "expert": 4}

STEP = f"""
from spmdtrain.processes.xla_flags import set_xla_flags
set_xla_flags(deviceless=True)
import json, math, re
import jax
import spmdtrain as st
from helpers import tiny
from test_owning_axes import make
from spmdtrain.compiled import hlo
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.planner.deviceless import described_devices
from spmdtrain.train.step import make_gradients
config = tiny(
    "mesh.fsdp={WAYS["fsdp"]}", "mesh.expert={WAYS["expert"]}", "precision.compute=bfloat16",
    "model.embed={EMBED}", "model.heads=1", "model.ffn=128", "model.layers=2",
    "train.sequence_length=512", "train.microbatch=4", "train.global_batch=32",
    "train.remat=full",
)
setup = st.shard(config, make, described_devices(hardware("h100"), 8))
with jax.sharding.use_abstract_mesh(setup.mesh.abstract_mesh):
    find = jax.jit(make_gradients(setup))
    made = find.lower(setup.state.params, setup.state.step, setup.batch).compile()
text = made.as_text()
found = [
    (each.kind, each.axis, each.bytes_by_dtype)
    for each in hlo.instructions(text, dict(setup.mesh.shape))
]
dense = {{
    path: each.size // (2 if setup.gathered[path] else 1)
    for path, each in setup.model.parameters.items() if "experts" not in each.axes
}}
shapes = {{shape for shape in re.findall(r"[a-z]+\\d+\\[([\\d,]+)\\]", text)}}
print(json.dumps({{
    "collectives": found,
    "dense_bytes": 4 * sum(dense.values()),
    "largest": max(math.prod(map(int, shape.split(","))) for shape in shapes),
}}))
"""


@needs_compiler
def test_tokens_travel_over_expert_and_weights_do_not():
    found = json.loads(printed(STEP, folders=["train"]).splitlines()[-1])

    exchanges = [each for each in found["collectives"] if each[0] == "all-to-all"]
    assert {axis for _, axis, _ in exchanges} == {"expert"}
    ways, own = WAYS["expert"], EXPERTS // WAYS["expert"]
    # A message for each device that has one of a token's experts, and a quarter to spare.
    absent = math.comb(EXPERTS - own, CHOICES) / math.comb(EXPERTS, CHOICES)
    sent = [bytes_by["bf16"] for *_, bytes_by in exchanges if "bf16" in bytes_by]
    theory = 1.25 * ways * TOKENS * (1 - absent) * EMBED * 2
    assert sent == pytest.approx([theory] * len(sent), rel=0.05)
    # Two of forward and three of backward; nothing is exchanged to recompute. XLA takes the last
    # turn of the backward scan out of the loop.
    assert len(sent) in (5, 8)
    told = [bytes_by for *_, bytes_by in exchanges if "bf16" not in bytes_by]
    bucket = bucket_of(TOKENS, CHOICES, ways, own, 1.25)
    assert all(sum(each.values()) <= 12 * ways * bucket.rows for each in told)

    over_expert = [
        (kind, sum(bytes_by.values()))
        for kind, axis, bytes_by in found["collectives"]
        if "expert" in axis and kind != "all-to-all"
    ]
    assert {kind for kind, _ in over_expert} == {"all-reduce"}
    dense = found["dense_bytes"]
    total = sum(size for _, size in over_expert)
    assert dense <= total <= dense + 64, "gradients of dense weights, and a few scalars"
    assert found["largest"] < TOKENS * CHOICES * own * EMBED, "rows, once for each expert"
