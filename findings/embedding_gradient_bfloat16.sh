#!/usr/bin/env bash
# The gradient of an embedding that is trained in mixed precision: parameters in float32, computing in bfloat16.
#
# Guess: float32 parameters have gradients that are added up in float32, in Flax (`nnx.Embed(dtype=bfloat16,
# param_dtype=float32)`) as in PyTorch under autocast; and `torch.nn.Embedding` adds up in float32 whatever its dtype.
# Truth: only PyTorch under autocast does, because autocast leaves the lookup in float32. Flax converts the table to
# bfloat16 before it looks rows up, and jax transposes that gather to a scatter-add in bfloat16, which stops growing at 256
# equal terms. A module that PyTorch holds in bfloat16 stops at 256 as well. So a token that occurs 4,096 times
# in a batch can have a sixteenth of its gradient, while every matrix of the same step is right to 0.4 %.
# (`nnx.Linear`'s bias is right on a CPU at this size: XLA splits its reduction into parts.)
#
# Versions: jax and jaxlib 0.10.2, flax 0.12.8, numpy 2.4.6, torch 2.13.0, Python 3.11, on a CPU.
# Output, 2026-11-28:
#   4096 tokens, each with the cotangent 1
#   flax, float32 parameters, bfloat16    256
#   torch, float32 parameters, autocast   4096
#   torch, bfloat16                       256
set -euo pipefail
room=$(mktemp -d)
trap 'rm -r "$room"' EXIT
python3 -m venv "$room/venv"
"$room/venv/bin/pip" install --quiet --disable-pip-version-check \
  jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 numpy==2.4.6 torch==2.13.0
JAX_PLATFORMS=cpu "$room/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import torch
from flax import nnx

TOKENS = 4096


def of_flax():
    layer = nnx.Embed(4, 2, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    ids = jnp.zeros(TOKENS, jnp.int32)
    found = nnx.grad(lambda embed: embed(ids).astype(jnp.float32).sum())(layer)
    return float(found.embedding[...][0, 0])


def of_torch(dtype, autocast):
    layer = torch.nn.Embedding(4, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer(torch.zeros(TOKENS, dtype=torch.long)).float().sum().backward()
    return float(layer.weight.grad[0, 0])


rows = {
    "flax, float32 parameters, bfloat16": (of_flax(), 256),
    "torch, float32 parameters, autocast": (of_torch(torch.float32, True), TOKENS),
    "torch, bfloat16": (of_torch(torch.bfloat16, False), 256),
}
print(f"{TOKENS} tokens, each with the cotangent 1")
for name, (gradient, _) in rows.items():
    print(f"{name:37} {gradient:.0f}")
for name, (gradient, seen) in rows.items():
    assert gradient == seen, f"{name}: {seen} was seen, now {gradient}"
PYTHON
