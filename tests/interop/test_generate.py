"""transformers' `generate` on an export stops where `sample --chat` stops, and encodes as we do.

`make test-hf` runs this, where torch and transformers are installed: version 4 or 5.
"""

import json
import os

import jax
import numpy as np
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.data.chats.simple_template import CHATML
from spmdtrain.inference.chat import Chat
from spmdtrain.inference.prompts import prompt_ids
from spmdtrain.running.published.export_run import export_run

pytestmark = pytest.mark.hf
MARKS = ("<|im_start|>", "<|im_end|>")
TEMPLATES = {
    "chatml": CHATML,
    "own ends": "<|im_start|>{role}:{content}<|im_end|>",
    "jinja": (
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    ),
}
SETTINGS = (
    *("model.name=llama", "model.vocab=none", "model.layers=1", "model.embed=32", "model.heads=2"),
    *("train.steps=60", "train.global_batch=8", "train.sequence_length=64"),
    *("optimizer.warmup=0", "optimizer.learning_rate=0.02"),
    *("data.corpus=tokens", "data.path=chats.bin", "data.packing=best_fit"),
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_generate_stops_where_a_conversation_does(name, tmp_path, monkeypatch):
    import transformers

    monkeypatch.chdir(tmp_path)
    os.environ["HF_HUB_OFFLINE"] = "1"
    question = [{"role": "user", "content": "what is 7"}]
    answers = [
        [
            {"role": "user", "content": f"what is {n}"},
            {"role": "assistant", "content": f"it is {n}"},
        ]
        for n in range(40)
    ]
    lines = "".join(json.dumps({"messages": each}) + "\n" for each in answers)
    (tmp_path / "chats.jsonl").write_text(lines)
    (tmp_path / "text.txt").write_text("what is it user assistant " * 400)
    special = [argument for mark in MARKS for argument in ("--special", mark)]
    train = ["tokenizer", "train", "text.txt", "--vocab", "300", "--out", "bpe.json"]
    assert main([*train, *special]) == 0
    template = TEMPLATES[name]
    (tmp_path / "own.jinja").write_text(template)
    given = ["--chat-template", "own.jinja"] if name == "jinja" else ["--template", template]
    prepare = ["data", "prepare", "chats.jsonl", "--chat", "--tokenizer", "bpe.json"]
    assert main([*prepare, "--out", "chats", *given]) == 0
    st.run(tiny(*SETTINGS), "run", devices=jax.devices()[:1])
    export_run("run", "out", dtype="float32")

    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    asked = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with Chat("run", 20, choice=st.Choice(0.0)) as talk:
        ours = prompt_ids(question, talk._template, talk._opened)
        assert asked["input_ids"][0].tolist() == np.asarray(ours).tolist()
        answer = talk.ask(question[0]["content"])
    made = model.generate(**asked, max_new_tokens=20, do_sample=False)[0, len(ours) :]
    assert len(made) < 20  # it did stop
    assert tokenizer.decode(made, skip_special_tokens=True) == answer
