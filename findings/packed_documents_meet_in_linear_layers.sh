#!/usr/bin/env bash
# GUESS: DataCollatorWithFlattening packs documents into one row for a Qwen3.5, Granite 4, Falcon-H1 or Nemotron-H as it does
#        for a Qwen3: its position_ids, which restart at each document, keep them apart. LFM2, a hybrid too, agrees with that.
# TRUTH: in transformers 5.24 the restart cuts the attention mask, and in LFM2 the convolution, but neither state nor
#        convolution of the linear-time layers, which run on from one document into the next: no error, and no warning. With
#        return_flash_attn_kwargs=True, Qwen3.5 refuses what it cannot keep apart; Granite 4, Falcon-H1 and Nemotron-H still
#        mix, because theirs read seq_idx alone, which is another switch of the collator (return_seq_idx).
# SEEN:  2026-11-28, transformers 5.24.0, torch 2.13.0, Python 3.11, no kernels of fla or mamba_ssm; the logits of two packed
#        documents against those of each alone, as norms:
#                              by default   with return_flash_attn_kwargs
#          qwen3               4e-07        4e-07
#          lfm2                3e-07        3e-07
#          qwen3_5_text        0.68         refused
#          granitemoehybrid    0.62         0.62
#          falcon_h1           0.09         0.09
#          nemotron_h          0.36         0.36
# COST:  our comparisons of packed rows hold each document alone, and no packed row of transformers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - << 'PYTHON'
import warnings

import torch
import transformers

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LINEAR = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
LINEAR |= {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
MODELS = {
    "qwen3": {},
    "lfm2": {},
    "qwen3_5_text": LINEAR,
    "granitemoehybrid": MAMBA
    | {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 32},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
    },
}
documents = [torch.randint(1, 64, (length,)) for length in (9, 11)]
samples = [{"input_ids": document.tolist()} for document in documents]


def model_of(family):
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **MODELS[family]})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.8 / parameter.shape[-1] ** 0.5)
    return model


def off(model, **switches):
    """The distance of a packed row from its documents alone; None if the model refuses the row."""
    collate = transformers.DataCollatorWithFlattening(return_tensors="pt", **switches)
    packed = {name: value for name, value in collate(samples).items() if name != "labels"}
    apart = torch.cat([model(document[None]).logits for document in documents], 1)
    try:
        together = model(**packed, use_cache=False).logits
    except ValueError:
        return None
    return float((together - apart).norm() / apart.norm())


seen = {}
with torch.no_grad():
    for family in MODELS:
        model = model_of(family)
        seen[family] = off(model), off(model, return_flash_attn_kwargs=True)
        print(family, *("refused" if one is None else f"{one:.1g}" if one < 1e-3 else f"{one:.2f}" for one in seen[family]))
assert all(max(seen[family]) < 1e-5 for family in ("qwen3", "lfm2")), seen
assert seen["qwen3_5_text"][0] > 0.01 and seen["qwen3_5_text"][1] is None, seen
assert all(min(seen[family]) > 0.01 for family in ("granitemoehybrid", "falcon_h1", "nemotron_h")), seen
PYTHON
