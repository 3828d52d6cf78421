#!/usr/bin/env bash
# GUESS: from_pretrained lists every tensor that it leaves out as UNEXPECTED. So it does with the block of a DeepSeek-V3 or GLM-4.5
#        that predicts a further token, and an empty report means that save_pretrained writes back what was read.
# TRUTH: with transformers 5.24 the block of a Qwen3.5 or Qwen3-Next (mtp.*) is left out unreported: unexpected_keys lacks it, and
#        the report on the screen does too. The folder saved after a fine-tuning has no such tensor, while its config.json still
#        announces mtp_num_hidden_layers=1, which servers that speculate with the block go by.
# SEEN:  2026-11-28, transformers 5.24.0, torch 2.13.0, safetensors 0.8.0, Python 3.11; of two tensors of the block and one stray:
#          qwen3_5_text: reported ['stray.weight'], saved 0 of 2, announced 1
#          qwen3_next: reported ['stray.weight'], saved 0 of 2, announced 1
#          glm4_moe: reported ['model.layers.2.eh_proj.weight', 'model.layers.2.enorm.weight', 'stray.weight'], saved 0 of 2, announced 1
# COST:  `import` reads the block into model.multi_token, and where files lack it the key that announces it goes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  transformers==5.24.0 torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - << 'PYTHON'
import json
import pathlib

import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LINEAR = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
LINEAR |= {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
LINEAR |= {"num_experts": 4, "shared_expert_intermediate_size": 16, "mtp_num_hidden_layers": 1}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1}
OF_MTP = {"mtp.fc.weight": torch.ones(32, 64), "mtp.norm.weight": torch.ones(32)}
OF_LAYER = {"model.layers.2.eh_proj.weight": torch.ones(32, 64), "model.layers.2.enorm.weight": torch.ones(32)}
FAMILIES = {"qwen3_5_text": (LINEAR, OF_MTP), "qwen3_next": (LINEAR, OF_MTP), "glm4_moe": (GROUPS, OF_LAYER)}
reported = {}
for family, (keys, block) in FAMILIES.items():
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **keys})
    published, saved = pathlib.Path(f"{family}_published"), f"{family}_saved"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(published)
    file = published / "model.safetensors"
    save_file({**load_file(file), **block, "stray.weight": torch.ones(3)}, file, {"format": "pt"})
    model, report = transformers.AutoModelForCausalLM.from_pretrained(published, output_loading_info=True)
    model.save_pretrained(saved)
    names = load_file(f"{saved}/model.safetensors")
    keys = json.loads(pathlib.Path(saved, "config.json").read_text())
    announced = keys.get("mtp_num_hidden_layers", keys.get("num_nextn_predict_layers"))
    reported[family] = sorted(report["unexpected_keys"])
    kept = len(block.keys() & names.keys())
    print(f"{family}: reported {reported[family]}, saved {kept} of 2, announced {announced}")
    assert kept == 0 and announced == 1, family
assert reported["qwen3_5_text"] == reported["qwen3_next"] == ["stray.weight"], reported
assert reported["glm4_moe"] == sorted(["stray.weight", *OF_LAYER]), reported
PYTHON
