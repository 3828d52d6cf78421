#!/usr/bin/env bash
# GUESS: `from_pretrained` returns the weights of the file. A `pad_token_id` in the config only says which ids to leave out, so
#        setting it to the id of the end of text, as people do who tune a model whose tokenizer pads with nothing, is harmless.
# TRUTH: with transformers 5.24 the row of `pad_token_id` in the embedding of a loaded Youtu-LLM is zeros, whatever the file
#        holds, and no warning says so. Rows that are being initialised are set to zero, and a loaded weight is told by a mark on
#        the tensor, which the slice of that one row lacks; other families ask for the mark first. With tied embeddings the
#        token's logit is 0 as well. A model that is saved again has lost the row for good.
# SEEN:  2026-11-29, transformers 5.24.0, torch 2.13.0, Python 3.11: tiny random models in float32, saved, the id set in
#        config.json, and loaded; the largest weight of that row, and the largest logit of that token behind a prompt
#          family       row in the file   row as loaded   logits of the padding token, file -> loaded
#          llama        0.05              0.05            0.174 -> 0.174
#          youtu        0.58              0.00            1.571 -> 0.000
# COST:  `spmdtrain import --check` of such a model would blame our weights: read the file's row, not the loaded model's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  transformers==5.24.0 torch==2.13.0 numpy==2.4.6 safetensors
cd "$folder"
"$folder/venv/bin/python" - << 'PYTHON'
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

transformers.logging.set_verbosity_error()
END = 2  # the id of the end of text
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": END,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "youtu": transformers.YoutuConfig(**SIZES, **LATENT),
}
PROMPT = torch.tensor([[5, 9, 11, 30]])


def logit(model):
    with torch.no_grad():
        return float(model(PROMPT).logits[0, :, END].abs().max())


print("family       row in the file   row as loaded   logits of the padding token, file -> loaded")
found = {}
for name, config in CONFIGS.items():
    torch.manual_seed(0)
    config.pad_token_id = None
    before = transformers.AutoModelForCausalLM.from_config(config).eval()
    before.save_pretrained(name)
    file = Path(name) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": END}))
    after = transformers.AutoModelForCausalLM.from_pretrained(name).eval()
    in_file = load_file(Path(name) / "model.safetensors")["model.embed_tokens.weight"]
    loaded = after.get_input_embeddings().weight.detach()
    others = torch.arange(len(in_file)) != END
    assert torch.equal(loaded[others], in_file[others])
    found[name] = rows = float(in_file[END].abs().max()), float(loaded[END].abs().max())
    print(f"{name:<12} {rows[0]:<17.2f} {rows[1]:<15.2f} {logit(before):.3f} -> {logit(after):.3f}")
assert found["llama"][0] == found["llama"][1]
assert found["youtu"][0] > 0 and found["youtu"][1] == 0
PYTHON
