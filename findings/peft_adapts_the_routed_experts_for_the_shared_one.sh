#!/usr/bin/env bash
# GUESS: peft's target_modules "shared_expert.gate_proj" (or a regex that spells out .shared_expert.) adapts the shared expert of
#        a Qwen3-Next, Qwen3.5-MoE, GLM-4.5 or DeepSeek-V3, and adapters of it that were trained before load again.
# TRUTH: with transformers 5, peft 0.21 rewrites each target that ends in gate_proj, up_proj or down_proj to the stacked weights
#        of the routed experts. Training then adapts those, in every layer, and the shared expert not at all. Loading leaves the
#        saved adapters of the shared expert out: it says which keys are missing, of experts that nobody asked for, and none of
#        those that it drops. As target_parameters ("shared_expert.gate_proj.weight") the same files load exactly.
# SEEN:  2026-11-28, peft 0.21.2, transformers 5.24.0, torch 2.13.0, Python 3.11:
#          trained: lora of mlp.experts, 0 of mlp.shared_expert
#          loaded as modules: off by 1.0 of what the adapters change; as parameters: off by 0.0
# COST:  our export of adapters named modules; it writes target_parameters for the mlps of models with experts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  peft==0.21.2 transformers==5.24.0 torch==2.13.0 accelerate==1.15.0 numpy==2.4.6 safetensors==0.8.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - << 'PYTHON'
import copy
import json
import pathlib
import warnings

import peft
import torch
import transformers
from safetensors.torch import save_file

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
NAMES = ("gate_proj", "up_proj", "down_proj")
config = transformers.Qwen3NextConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    layer_types=["linear_attention", "full_attention"],
)
base = transformers.Qwen3NextForCausalLM(config).eval()

# Training: a regex of the shared expert alone.
lora = peft.LoraConfig(r=2, target_modules=r".*\.shared_expert\.(gate|up|down)_proj")
adapted = peft.get_peft_model(copy.deepcopy(base), lora)
trained = [name for name, one in adapted.named_parameters() if one.requires_grad]
of_shared = [name for name in trained if "shared_expert" in name]
print(f"trained: {len(trained)} arrays, {len(of_shared)} of the shared expert, such as {trained[0]}")

# Loading: adapters of the shared expert, and a copy of the model into which they are added.
merged = copy.deepcopy(base)
tensors = {}
with torch.no_grad():
    for name, module in merged.named_modules():
        if "shared_expert." in name and name.endswith(NAMES):
            a, b = torch.randn(2, module.in_features), torch.randn(module.out_features, 2)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            module.weight += b @ a
common = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2}
of_shared_expert = [f"shared_expert.{name}" for name in NAMES]
variants = {
    "modules": {"target_modules": of_shared_expert},
    "parameters": {"target_modules": [], "target_parameters": [f"{x}.weight" for x in of_shared_expert]},
}
ids = torch.arange(12)[None]
off = {}
with torch.no_grad():
    want, plain = merged(ids).logits, base(ids).logits
    for variant, targets in variants.items():
        place = pathlib.Path(variant)
        place.mkdir()
        (place / "adapter_config.json").write_text(json.dumps(common | targets))
        save_file(tensors, place / "adapter_model.safetensors", {"format": "pt"})
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), place).eval()
        off[variant] = float((loaded(ids).logits - want).norm() / (plain - want).norm())
        print(f"loaded as {variant}: off by {off[variant]:.3f} of what the adapters change")
assert not of_shared and any(".mlp.experts." in name for name in trained)
assert off["modules"] > 0.9 and off["parameters"] < 1e-5, off
PYTHON
