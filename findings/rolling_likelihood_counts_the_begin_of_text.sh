#!/usr/bin/env bash
# GUESS: lm-eval's loglikelihood_rolling (the perplexities of wikitext, pile, ...) is the log-probability of a text after one
#        token that begins it, as its documentation says.
# TRUTH: where the tokenizer itself adds that token (Llama, Gemma, Mistral), it stands there twice, and the second is scored
#        as a token of the text: log P(<s> | <s>), which no training ever made likely, is added to the sum, and the model reads the
#        text after two of them. Perplexities of short texts, and of models whose tokenizers differ in this, are not comparable.
# SEEN:  2026-11-28, lm-eval 0.4.13, transformers 5.24.0, torch 2.13.0, Python 3.11:
#          harness -12.249; the text after one <s> -10.315; <s> and the text after one <s> -12.249
# COST:  our bridge scores the text alone, and differs from hf there; docs/first_run.md says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  lm-eval==0.4.13 transformers==5.24.0 torch==2.13.0 tokenizers==0.23.3 accelerate==1.15.0 numpy==2.4.6
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - << 'PYTHON'
import tokenizers
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

torch.manual_seed(0)
made = tokenizers.Tokenizer(tokenizers.models.BPE(dict(zip(("<s>", "</s>", *"abc"), range(5))), []))
made.add_special_tokens(["<s>", "</s>"])
made.post_processor = tokenizers.processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", 0)]  # as the tokenizer of Llama 3 has it
)
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=made, bos_token="<s>", eos_token="</s>"
)
config = transformers.LlamaConfig(
    vocab_size=8,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=1,
)
model = transformers.LlamaForCausalLM(config).eval()
harness = HFLM(model, tokenizer=tokenizer, batch_size=1, device="cpu")
request = Instance("loglikelihood_rolling", {}, ("abcab",), 0)
[scored] = harness.loglikelihood_rolling([request], disable_tqdm=True)


def likelihood(ids: list[int]) -> float:
    """Of all ids but the first."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(ids)[1:, None]).sum().item()


text = tokenizer("abcab", add_special_tokens=False).input_ids
once, twice = likelihood([0, *text]), likelihood([0, 0, *text])
print(f"harness {scored:.3f}; the text after one <s> {once:.3f}; <s> and the text after one <s> {twice:.3f}")
assert abs(scored - twice) < 1e-4 and abs(scored - once) > 1, "no longer so"
PYTHON
