#!/usr/bin/env bash
# GUESS: `rope_theta` of an OLMo 3 config.json holds for every layer, as it does for the transformers 4 that wrote the file, and
#        as for Llama, Qwen or OLMo 2; a newer version that knows the class loads the folder to the same logits.
# TRUTH: transformers 5 moves the key into one table for each kind of layer and takes it out of the file's keys with the first:
#        layers that see all get it, layers with a window (three of four) get 500,000, without a word. Only models of that very
#        theta, as Ai2's, are the same. A config that has `rope_parameters` with both tables is read as it stands.
# SEEN:  2026-11-28, transformers 4.57.6 and 5.24.0, torch 2.13.0, Python 3.11: theta 10,000, written and read by 4.57.6:
#          4.57.6 logits off by 0.0000; 5.24.0 logits off by 0.1940; 5.24.0 with both tables 0.0000 (of their size)
# COST:  an import is read as transformers 4 reads it, and every export of OLMo 3 has both tables beside the old key.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for version in 4.57.6 5.24.0; do
  python3 -m venv "$version"
  "$version/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 "transformers==$version"
done
export HF_HUB_OFFLINE=1
4.57.6/bin/python - << 'PYTHON'
import torch
from transformers import Olmo3Config, Olmo3ForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
ids = dict(pad_token_id=0, eos_token_id=1)
model = Olmo3ForCausalLM(Olmo3Config(**sizes, **ids, max_position_embeddings=64, sliding_window=8, rope_theta=10_000.0))
for matrix in model.parameters():
    if matrix.dim() > 1:
        torch.nn.init.normal_(matrix, std=0.3)
model.save_pretrained("saved")
torch.save(model.eval()(torch.arange(40)[None]).logits.detach(), "logits.pt")
PYTHON
cat > read.py << 'PYTHON'
import sys

import torch
import transformers

torch.set_grad_enabled(False)
more = {}
if sys.argv[1:]:
    table = {"rope_type": "default", "rope_theta": 10_000.0}
    more["rope_parameters"] = {"full_attention": table, "sliding_attention": dict(table)}
model = transformers.Olmo3ForCausalLM.from_pretrained("saved", attn_implementation="eager", **more).eval()
logits, before = model(torch.arange(40)[None]).logits, torch.load("logits.pt")
print(f"{float((logits - before).norm() / before.norm()):.4f}")
PYTHON
old=$(4.57.6/bin/python read.py)
new=$(5.24.0/bin/python read.py)
both=$(5.24.0/bin/python read.py both)
echo "4.57.6 logits off by $old; 5.24.0 logits off by $new; 5.24.0 with both tables $both (of their size)"
python3 -c "import sys; old, new, both = map(float, sys.argv[1:]); assert max(old, both) < 1e-3 and new > 0.05, 'no longer so'" "$old" "$new" "$both"
