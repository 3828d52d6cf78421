#!/usr/bin/env bash
# GUESS: the config.json of a Nemotron-H or Nemotron 3 bounds the time steps of its state spaces by time_step_limit, as the code
#        that it was published with does; time_step_min, _max and _floor are those of the first values, as in Mamba-2.
# TRUTH: the class of transformers 5.24 ignores time_step_limit, whatever it says, and raises every time step of a token to
#        time_step_min (0.001 by default). A model whose steps are shorter computes something else than where it was trained.
# SEEN:  2026-11-28, transformers 5.24.0, torch 2.13.0, Python 3.11, no kernels of mamba_ssm; logits against those of the
#        default keys, as norms, of a model whose steps lie around both bounds:
#          time_step_limit=(0.3, 0.4) 0.000
#          time_step_min=0.1          0.064
#          time_step_min=1e-06        0.001
# COST:  `model.ssd.smallest_step` and `largest_step` come from time_step_limit; docs/models.md says where both agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - << 'PYTHON'
import torch
import transformers

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
KEYS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hybrid_override_pattern": "M*-M",
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
}
ids = torch.arange(1, 30)[None]


def model_of(**changes):
    config = transformers.NemotronHConfig(**{**KEYS, **changes})
    return transformers.NemotronHForCausalLM(config).eval()


with torch.no_grad():
    usual = model_of()
    for name, parameter in usual.named_parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.randn_like(parameter) * 0.8 / parameter.shape[-1] ** 0.5)
        if name.endswith("dt_bias"):  # time steps of 1e-4 to 1.3
            parameter.copy_(torch.linspace(-9, 1, parameter.numel()))
    weights, want = usual.state_dict(), usual(ids).logits
    far = {}
    for changes in ({"time_step_limit": (0.3, 0.4)}, {"time_step_min": 0.1}, {"time_step_min": 1e-6}):
        other = model_of(**changes)
        other.load_state_dict(weights)
        ((name, value),) = changes.items()
        far[name, value] = float((other(ids).logits - want).norm() / want.norm())
        print(f"{name}={value}".ljust(26), f"{far[name, value]:.3f}")
assert far["time_step_limit", (0.3, 0.4)] == 0, far
assert far["time_step_min", 0.1] > 0.01 and far["time_step_min", 1e-6] > 1e-4, far
PYTHON
