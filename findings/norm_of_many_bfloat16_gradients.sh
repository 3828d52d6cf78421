#!/usr/bin/env bash
# GUESS: optax.clip_by_global_norm(1.0) leaves gradients of norm 1 at most, in bfloat16 too but for its 0.4 % of rounding; XLA
#        adds up in float32, and torch.nn.utils.clip_grad_norm_ is right for gradients in bfloat16.
# TRUTH: the sum within a leaf is in float32; the sum over the leaves is one in the gradients' dtype, leaf after leaf. It stops
#        growing where a leaf is less than half a unit of its last place: after a few hundred leaves. The more leaves a
#        model has (layers that are not stacked, experts that are leaves of their own, adapters), the larger the step that passes
#        for clipped, and the smaller the norm that is logged (optax.global_norm, optax.tree.norm). Gradients that are cast to
#        float32 before the transformation are clipped right.
# SEEN:  2026-11-29, optax 0.2.8, jax 0.10.2, torch 2.13.0, Python 3.11, on a CPU (1.266 with jax 0.12.0.1 too); the norm after
#        clipping to 1, of normal gradients in the shapes of a Llama, 9 leaves a layer; of LoRA, 14 equal leaves a layer:
#                                 optax, bfloat16   optax, float32   torch, bfloat16
#          Llama of 32 layers     0.996             1.000            1.002
#          Llama of 126 layers    1.266             1.000            0.999
#          LoRA of 80 layers      1.479             1.000            0.999
# COST:  none here: all norms are summed in float32.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  optax==0.2.8 jax==0.10.2 jaxlib==0.10.2 torch==2.13.0 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - << 'PYTHON'
import jax.numpy as jnp
import numpy as np
import optax
import torch

WIDTH, HIDDEN, KEYS, RANK = 64, 224, 16, 8
LLAMA = [
    *[(WIDTH, WIDTH)] * 2,
    *[(WIDTH, KEYS)] * 2,
    *[(WIDTH, HIDDEN)] * 2,
    (HIDDEN, WIDTH),
    *[(WIDTH,)] * 2,
]
LORA = [(WIDTH, RANK)] * 14
MODELS = {
    "Llama of 32 layers": 32 * LLAMA,
    "Llama of 126 layers": 126 * LLAMA,
    "LoRA of 80 layers": 80 * LORA,
}


def norm(arrays):
    return np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in arrays))


def by_optax(gradients, dtype):
    clip = optax.clip_by_global_norm(1.0)
    given = [jnp.asarray(x, jnp.bfloat16).astype(dtype) for x in gradients]
    return norm(clip.update(given, clip.init(given))[0])


def by_torch(gradients):
    parameters = [torch.nn.Parameter(torch.zeros(x.shape, dtype=torch.bfloat16)) for x in gradients]
    for parameter, x in zip(parameters, gradients):
        parameter.grad = torch.from_numpy(x).to(torch.bfloat16)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    return norm([parameter.grad.double().numpy() for parameter in parameters])


rng = np.random.default_rng(0)
print(f"{'':22} optax, bfloat16   optax, float32   torch, bfloat16")
found = {}
for model, shapes in MODELS.items():
    gradients = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    norms = by_optax(gradients, jnp.bfloat16), by_optax(gradients, jnp.float32), by_torch(gradients)
    print(f"{model:22} {norms[0]:<17.3f} {norms[1]:<16.3f} {norms[2]:.3f}")
    found[model] = norms
assert abs(found["Llama of 32 layers"][0] - 1) < 0.01
assert found["Llama of 126 layers"][0] > 1.2 and found["LoRA of 80 layers"][0] > 1.2
assert all(abs(right - 1) < 0.01 for _, *others in found.values() for right in others)
PYTHON
