"""Saves a LoRA adapter with peft, beside the model that it belongs to: FOLDER."""

import subprocess
import sys

import peft
import torch
import transformers

folder = sys.argv[1]
subprocess.run(
    [sys.executable, f"{__file__.rpartition('/')[0]}/model.py", f"{folder}/base", "Llama"],
    check=True,
)
torch.manual_seed(1)
base = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/base")
config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
adapted = peft.get_peft_model(base, config)
adapted.save_pretrained(f"{folder}/adapter")
