"""Saves a tiny model as transformers does, with its logits: FOLDER FAMILY [OPTION...]."""

import sys

import numpy as np
import torch
import transformers

folder, family, *options = sys.argv[1:]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
HEADS_OF_16 = {"head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
# Ids of special tokens beyond a tiny vocabulary would be no valid config.
MARKS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LONG = {
    "original_max_position_embeddings": 32,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    },
}
FAMILIES = {
    "GPT2": {"vocab_size": 128, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "Llama": SIZES,
    "Mistral": SIZES | {"sliding_window": 8},
    "Qwen2": SIZES,
    "Qwen3": SIZES | HEADS_OF_16,
    "Gemma2": SIZES | HEADS_OF_16 | {"query_pre_attn_scalar": 16},
    "Gemma3Text": SIZES | HEADS_OF_16 | {"query_pre_attn_scalar": 16},
    "Phi3": SIZES | LONG,
    "Olmo2": SIZES,
    "Granite": SIZES,
    "SmolLM3": SIZES,
    "Mixtral": SIZES | EXPERTS,
    "Qwen3Moe": SIZES | HEADS_OF_16 | QWEN_EXPERTS,
    "GptOss": SIZES | HEADS_OF_16 | EXPERTS | WINDOW,
    "DeepseekV3": SIZES
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "GPTNeoX": SIZES | {"hidden_size": 64},
}

torch.manual_seed(0)
make_config = getattr(transformers, f"{family}Config")
given = FAMILIES[family] | MARKS
if transformers.__version__.startswith("4.28"):  # it has no groups of heads, and saves what it gets
    given = {name: value for name, value in given.items() if name in vars(make_config())}
if "no further tokens" in options:
    given["num_nextn_predict_layers"] = 0
config = make_config(**given)
of_class = "Gemma3ForCausalLM" if family == "Gemma3Text" else f"{family}ForCausalLM"
if family == "GPT2":
    of_class = "GPT2LMHeadModel"
model = getattr(transformers, of_class)(config).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.08 + (parameter.ndim == 1) * 0.5)
    # Longer than the original length of Phi3, so that its long factors count.
    tokens = torch.randint(3, 128, (1, 40))
more = {"safe_serialization": "bin" not in options} if transformers.__version__[0] == "4" else {}
if "sharded" in options:
    more["max_shard_size"] = "60KB"
if "bfloat16" in options:
    model = model.to(torch.bfloat16)
model.save_pretrained(folder, **more)
# Of what is in the files; a cast of the model in memory would round its rotary frequencies too.
# Attention other than the eager one leaves out the caps of Gemma2's scores in transformers 4.
how = {} if transformers.__version__.startswith("4.28") else {"attn_implementation": "eager"}
make_saved = getattr(transformers, of_class).from_pretrained
saved = make_saved(folder, torch_dtype=torch.float32, **how).eval()
with torch.no_grad():
    logits = saved(tokens).logits.double().numpy()
np.savez(f"{folder}/expected.npz", tokens=tokens.numpy(), logits=logits)
