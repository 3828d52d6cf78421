#!/usr/bin/env bash
# GUESS: AdamW over a model in bfloat16 (param_dtype=bfloat16 in Flax, from_pretrained(dtype=bfloat16) in transformers) has
#        coarse moments that follow the gradients all the same; torch computes its update in float32 inside.
# TRUTH: with the beta2 of 0.999 that both have by default, the second moment grows and never falls. A step takes 0.1 % off, and
#        bfloat16 rounds that back, in torch as in optax (whose constant 0.999 is 1 in bfloat16). So gradients that were ten
#        times as large during the first 300 steps, as in a warmup or after a spike, leave steps of a fifth of the learning
#        rate for good, which no norm of a gradient shows. At 0.95 it follows.
# SEEN:  2026-11-29, optax 0.2.8, jax 0.10.2, torch 2.13.0, Python 3.11, on a CPU: normal gradients of rms 10 in 300 steps, then
#        of rms 1 in 10,000; the rms of the last second moments' square roots, 1 if they follow:
#          beta2    optax, float32   optax, bfloat16   torch, float32   torch, bfloat16
#          0.95     1.00             0.99              1.00             1.00
#          0.999    1.00             5.36              1.00             5.36
# COST:  moments in bfloat16 are refused here where a beta takes less off than half of bfloat16's spacing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  optax==0.2.8 jax==0.10.2 jaxlib==0.10.2 torch==2.13.0 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - << 'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

LARGE, STEPS, WIDTH = 300, 10_000, 1000


def gradients():
    rng = np.random.default_rng(0)
    for number in range(LARGE + STEPS):
        yield (10 if number < LARGE else 1) * rng.standard_normal(WIDTH, np.float32)


def by_optax(dtype, beta2):
    rule = optax.adamw(1e-3, b2=beta2)
    weights = jnp.zeros(WIDTH, dtype)
    state = rule.init(weights)
    update = jax.jit(lambda gradient, state: rule.update(gradient, state, weights)[1])
    for gradient in gradients():
        state = update(jnp.asarray(gradient, dtype), state)
    return float(jnp.sqrt(jnp.mean(state[0].nu.astype(jnp.float32))))


def by_torch(dtype, beta2):
    weights = torch.nn.Parameter(torch.zeros(WIDTH, dtype=dtype))
    rule = torch.optim.AdamW([weights], 1e-3, betas=(0.9, beta2))
    for gradient in gradients():
        weights.grad = torch.from_numpy(gradient).to(dtype)
        rule.step()
    return float(rule.state[weights]["exp_avg_sq"].float().mean().sqrt())


print("beta2    optax, float32   optax, bfloat16   torch, float32   torch, bfloat16")
found = {}
for beta2 in (0.95, 0.999):
    found[beta2] = row = (
        *(by_optax(dtype, beta2) for dtype in (jnp.float32, jnp.bfloat16)),
        *(by_torch(dtype, beta2) for dtype in (torch.float32, torch.bfloat16)),
    )
    print(f"{beta2:<8} {row[0]:<16.2f} {row[1]:<17.2f} {row[2]:<16.2f} {row[3]:.2f}")
assert all(abs(each - 1) < 0.05 for each in found[0.95])
assert all(abs(found[0.999][i] - 1) < 0.05 for i in (0, 2))
assert all(found[0.999][i] > 4 for i in (1, 3)), "it forgets"
PYTHON
