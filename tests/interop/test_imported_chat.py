"""The template of conversations of a published model comes in, is talked to, and goes out again."""

import json

import directories
import pytest
from chat_templates import CHATML, SMOLLM3

from spmdtrain.cli import main
from spmdtrain.data.chats.template_folder import folder_template
from spmdtrain.data.token_files.tokens import open_tokens
from spmdtrain.running.published.as_run import described, model_config
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import import_model

tokenizers = pytest.importorskip("tokenizers")


def write_tokenizer(folder) -> int:
    """Writes a byte-level tokenizer with a template; returns its size."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>", "<|stop|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=0, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return tokenizer.get_vocab_size()


@pytest.mark.seconds
def test_a_template_comes_in_is_talked_to_and_goes_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    config = directories.CONFIGS["llama"] | {"vocab_size": write_tokenizer(model)}
    directories.write(model, config)
    import_model("model", "run")
    document = json.loads((tmp_path / "run/config.json").read_text())
    assert document["template"]["jinja"] == CHATML and document["template"]["ends"] == [1, 2]
    assert main(["sample", "run", "--chat", "hi", "--length", "2"]) == 0
    # The run is a tokenizer's folder too, with the template.
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    command = ["data", "prepare", "a.jsonl", "--chat", "--tokenizer", "run", "--out", "out"]
    assert main(command) == 0
    assert open_tokens("out").template == document["template"]
    export_run("run", "same")
    assert sorted(path.name for path in (tmp_path / "same").glob("*chat*")) == []
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "same" / name).read_bytes() == (model / name).read_bytes()
    # A run that was trained with another template takes that one along.
    document["template"]["jinja"] = SMOLLM3
    (tmp_path / "run/config.json").write_text(json.dumps(document))
    export_run("run", "other")
    exported = folder_template(tmp_path / "other", {})
    assert exported is not None and exported.text == SMOLLM3
    capsys.readouterr()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{% if %}", "the template is not a Jinja template: "),
        ([{"name": "a", "template": "x"}, {"name": "b", "template": "y"}], "found a, b"),
        (3, "has a chat_template that is not one; found 3"),
        (CHATML, None),
        (None, None),
    ],
)
def test_an_import_says_in_a_line_that_a_template_cannot_be_used(written, said, tmp_path):
    """Its weights come in all the same."""
    size = write_tokenizer(tmp_path)
    names = tmp_path / "tokenizer_config.json"
    names.write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": written}))
    directories.write(tmp_path, directories.CONFIGS["llama"] | {"vocab_size": size})
    data = described(*model_config(tmp_path))
    if said is None:
        assert data.remarks == ()
        return
    (line,) = data.remarks
    assert line.startswith(f"{tmp_path}: its chat template cannot be used: ")
    assert said in line
    assert line.endswith("try another template: spmdtrain data prepare --chat --chat-template FILE")
    assert "\n" not in line
    assert data.end_of_text == 1
