"""Scores continuations with lm-eval's own model: FOLDER. `null` is what it does not score."""

import json
import pathlib
import subprocess
import sys

import tokenizers
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

folder = pathlib.Path(sys.argv[1])
here = pathlib.Path(__file__).parent
subprocess.run([sys.executable, here / "model.py", folder, "Llama"], check=True)
pieces = ["<unk>", "<s>", "</s>", " ", "\n", *"abcdefghij"]
merges = [("a", "b"), (" ", "a"), ("ab", "ab"), ("b", "\n"), ("i", "j")]
vocab = {piece: at for at, piece in enumerate([*pieces, *map("".join, merges)])}
made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
made.add_special_tokens(["<unk>", "<s>", "</s>"])
made.post_processor = tokenizers.processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", 1)]
)
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
)
tokenizer.save_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
theirs = HFLM(model, tokenizer=tokenizer, batch_size=1, device="cpu")
CONTEXTS = ["", "ab", "a", "ab ", "c d  ", "abab\n", "<s>ab", "j" * 70, "i", "</s>", " "]
CONTINUATIONS = ["ab", " a", "b", "b\n", "\n", "", "<s>", "<s>a", "j", " " + "cd" * 31, "cd" * 33]


def scored(context: str, continuation: str):
    request = Instance("loglikelihood", {}, (context, continuation), 0)
    try:
        return theirs.loglikelihood([request], disable_tqdm=True)[0]
    except (AssertionError, IndexError):
        return None


pairs = [(context, continuation) for context in CONTEXTS for continuation in CONTINUATIONS]
scores = [scored(*pair) for pair in pairs]
(folder / "expected.json").write_text(json.dumps({"pairs": pairs, "scores": scores}))
