"""What a run is asked: prompts of text, conversations by the template of the run, and ids, each
checked where it comes in."""

import argparse
import io
import json
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.cli.run import prompts
from spmdtrain.config.errors import ConfigError
from spmdtrain.data.chats.conversation import of_messages
from spmdtrain.data.chats.encode_conversation import encode_conversation
from spmdtrain.data.chats.jinja_template import JinjaText
from spmdtrain.data.chats.simple_template import CHATML, SimpleTemplate
from spmdtrain.data.chats.template_folder import template_from_spec
from spmdtrain.data.token_files.tokens import open_tokens
from spmdtrain.data.tokenizers.tokenizer import ByteTokenizer
from spmdtrain.inference import chat
from spmdtrain.inference import prompts as reading
from spmdtrain.running.published.export_run import export_run

SMALL = (
    "model.layers=1",
    "model.embed=16",
    "model.heads=2",
    "train.sequence_length=32",
    "train.global_batch=4",
    "model.vocab=none",
    "train.steps=1",
    "data.corpus=tokens",
    "data.packing=best_fit",
)
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes yes"}]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A run that was trained on conversations."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "a.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 40)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello yes assistant user"] * 3, trainer)
    tokenizer.save(str(folder / "bpe.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare = ["data", "prepare", "a.jsonl", "--chat", "--out", "a", "--tokenizer", "bpe.json"]
        assert main(prepare) == 0
        st.run(tiny(*SMALL, "data.path=a.bin"), "run", devices=jax.devices()[:1])
        yield st.open_run("run")


@pytest.mark.seconds
def test_a_question_has_the_tokens_of_training_and_the_answer_ends_where_it_closes(
    here, monkeypatch, capsys
):
    asked = CHAT[:1]
    found = reading.read_prompts(here, asked)
    assert here.template == CHATML
    trained = open_tokens("a").tokens
    assert found.ids[0].tolist() == trained[: len(found.ids[0])].tolist()
    template = SimpleTemplate.parse(CHATML)
    chat = of_messages(CHAT, "here")
    whole = encode_conversation(chat, template, here.tokenizer, "here").ids
    assert whole.tolist() == trained[: len(whole)].tolist()
    # A model that writes the answer: the text is the answer alone, up to its close.
    monkeypatch.setattr(
        "spmdtrain.inference.sample.make_generate",
        lambda *_: lambda _, ids, __: [np.concatenate([whole, [0, 0]])] * len(ids),
    )
    assert st.generate("run", asked) == "yes yes"
    assert st.generate("run", [asked, CHAT[:1]]) == ["yes yes"] * 2
    assert main(["sample", "run", "--chat", "hello"]) == 0
    assert capsys.readouterr().out == "yes yes\n"
    Path("p.jsonl").write_text(json.dumps({"messages": asked}) + "\n")
    assert main(["sample", "run", "--prompts", "p.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"messages": asked, "text": "yes yes"}


JINJA = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)


@pytest.mark.seconds
def test_an_export_has_the_template_and_stops_where_a_conversation_does(here, tmp_path):
    export_run("run", tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    with chat.Chat("run") as talk:
        assert set(as_list(settings["eos_token_id"])) == set(talk._stops.ids)
    assert here.tokenizer.id_of("<|im_end|>") in as_list(settings["eos_token_id"])

    messages = [*CHAT, {"role": "user", "content": "it's\n{role}"}]
    jinja = JinjaText((tmp_path / "out" / "chat_template.jinja").read_text()).spec
    with closing(template_from_spec(jinja)) as exported:
        for ours in (SimpleTemplate.parse(CHATML), exported):
            parts = ours.ask(of_messages(messages, "here"), here.tokenizer, "here")
            assert "".join(parts) == (
                "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nyes yes<|im_end|>\n"
                "<|im_start|>user\nit's\n{role}<|im_end|>\n<|im_start|>assistant\n"
            )


def as_list(ids: int | list[int]) -> list[int]:
    return ids if isinstance(ids, list) else [ids]


@pytest.mark.parametrize(
    "text",
    [CHATML, "[{role}]'{content}\\\n", "{role}: {role}>{content}</{role}>", "{role}{content}"],
)
def test_a_simple_template_is_the_same_in_jinja(text):
    template = SimpleTemplate.parse(text)
    tokenizer = ByteTokenizer()
    messages = of_messages([*CHAT, {"role": "user", "content": "x{%"}], "here")
    with closing(template_from_spec(JinjaText(template.jinja("<s>")).spec)) as jinja:
        want = "".join(template.ask(messages, tokenizer, "here"))
        assert "".join(jinja.ask(messages, tokenizer, "here")) == "<s>" + want


@pytest.fixture
def with_jinja(here, monkeypatch):
    """The run with a template of Jinja, and an end of its own; its model writes `yes`."""
    config = Path("run/config.json")
    before = config.read_text()
    ends = [here.tokenizer.id_of("<|endoftext|>"), 7]
    spec = JinjaText(JINJA, ends=tuple(ends)).spec
    config.write_text(json.dumps(json.loads(before) | {"template": spec}))
    asked = []

    def make(setup, length, choice, stops, **named):
        del setup, choice, named
        assert {*ends, here.tokenizer.id_of("<|im_end|>")} == set(stops)

        def generate(params, prompts, key, length=length):
            del params, key
            asked.append((here.tokenizer.decode(prompts[0]), length))
            made = here.tokenizer.encode("yes")
            return [np.concatenate([ids, made, [7], made]) for ids in prompts]

        return generate

    monkeypatch.setattr("spmdtrain.inference.sample.make_generate", make)
    yield asked
    config.write_text(before)


def test_a_template_of_jinja_asks_and_each_of_its_ends_ends_an_answer(with_jinja, capsys):
    assert main(["sample", "run", "--chat", "hello"]) == 0
    assert capsys.readouterr().out == "yes\n"
    assert with_jinja[0][0] == "<|im_start|>user: hello<|im_end|><|im_start|>assistant: "


@pytest.mark.seconds
def test_a_conversation_on_the_terminal_grows_until_it_is_too_long(with_jinja, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb\n" + "c" * 9 + "\n"))
    assert main(["sample", "run", "--chat", "--json"]) == ConfigError.exit_code
    said = capsys.readouterr()
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [line["text"] for line in lines] == ["yes", "yes"]
    assert [message["content"] for message in lines[1]["messages"]] == ["a", "yes", "b"]
    first, second = with_jinja
    assert second[0].startswith(first[0] + "yes<|im_end|><|im_start|>user: b")
    assert second[1] < first[1] <= 32
    assert "leaves no room for an answer; found model.max_length=" in said.err
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    assert main(["sample", "run", "--chat"]) == 0
    assert capsys.readouterr().out == "yes\n"


@pytest.mark.core
@pytest.mark.seconds
def test_a_conversation_answers_as_a_prompt_does_with_few_programs(here, monkeypatch):
    """Lengths are rounded, and the likeliest tokens are the same."""
    del here
    rounded, shapes = chat._shapes, []

    def remembered(*given):
        shapes.append(rounded(*given))
        return shapes[-1]

    monkeypatch.setattr(chat, "_shapes", remembered)
    choice = st.Choice(0.0)
    with chat.Chat("run", 3, choice=choice) as talk:
        first, second = talk.ask("a"), talk.ask("b")
        asked = talk.messages[:-1]
    assert [message["content"] for message in asked] == ["a", first, "b"]
    assert second and st.generate("run", asked, 3, choice=choice).startswith(second)
    assert all(start in (8, 16) and room in (16, 32) for start, room in shapes)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prompt", r"a\nb\tc\\n"], "a\nb\tc\\n"),
        (["--prompts", "p.txt"], r"a\nb"),
        (["--prompts", "p.jsonl"], "a\n\u2028b"),
    ],
)
def test_a_typed_prompt_has_escapes_and_a_line_of_json_has_line_breaks(
    arguments, text, here, capsys
):
    del here
    Path("p.txt").write_text(r"a\nb" + "\n")
    Path("p.jsonl").write_text(json.dumps({"prompt": "a\n\u2028b"}, ensure_ascii=False) + "\n\n")
    assert main(["sample", "run", "--json", "--length", "1", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"] == text and found["text"].startswith(text)


def test_a_special_token_of_a_prompt_is_text_unless_asked(here, capsys):
    end = here.tokenizer.id_of("<|im_end|>")
    prompt = "a<|im_end|>"
    assert end not in reading.read_prompts(here, prompt).ids[0]
    assert "spells a special token, which is read as text" in capsys.readouterr().err
    assert reading.read_prompts(here, prompt, parse_special=True).ids[0][-1] == end
    question = [{"role": "user", "content": prompt}]
    assert (reading.read_prompts(here, question).ids[0] == end).sum() == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([5, 300], "the id 300; found ids from 0 to 269"),
        ([5, -1], "the id -1"),
        ([2**40], "the id 1099511627776"),
        (np.array([2**64 - 1], np.uint64), "the id 18446744073709551615"),
        ([2**70], "dtype object"),
        ([1.0, 2.0], "dtype float64"),
        ([True, False], "dtype bool"),
        ([[1, 2], [3]], "several lengths"),
        (5, r"shape \(\)"),
        (None, r"shape \(\)"),
        (b"abc", r"shape \(\)"),
        ([[[1]]], r"shape \(1, 1, 1\)"),
        ([], "--prompt is empty"),
        ([[]], "--prompt is empty"),
        ("", "--prompt is empty"),
        (["a", ""], "--prompt is empty"),
        (["a", 3], "dtype <U"),
    ],
)
def test_what_is_no_prompt_is_one_line(prompt, said, here):
    with pytest.raises(ConfigError, match=said):
        reading.read_prompts(here, prompt)
    is_text = isinstance(prompt, str) or (isinstance(prompt, list) and "a" in prompt)
    if not is_text:
        with pytest.raises(ConfigError, match=said):
            st.generate_ids(here.setup, here.params, prompt, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"length": 0}, "--length 0 "),
        ({"length": -1}, "--length -1 "),
        ({"length": 1.5}, "--length 1.5 "),
        ({"length": True}, "--length True "),
        ({"seed": -1}, "--seed -1 "),
        ({"seed": 2**64}, "--seed 18446744073709551616 "),
        ({"stop": ""}, "--stop is not a text"),
        ({"stop": [3]}, "--stop is not a text"),
        ({"stop": ["a"], "prompt": [1]}, "needs a prompt of text"),
        ({"choice": (float("nan"),)}, "--temperature nan"),
        ({"choice": (float("inf"),)}, "--temperature inf"),
        ({"choice": (1e-40,)}, "--temperature 1e-40"),
        ({"choice": ("1",)}, "--temperature 1"),
        ({"choice": (1.0, -1)}, "--top-k -1"),
        ({"choice": (1.0, 1.5)}, "--top-k 1.5"),
        ({"choice": (1.0, True)}, "--top-k True"),
        ({"choice": (1.0, None, float("nan"))}, "--top-p nan"),
        ({"choice": (1.0, None, "a")}, "--top-p a"),
    ],
)
def test_what_sampling_cannot_do_is_one_line(given, said, here):
    del here
    with pytest.raises(ConfigError, match=said):
        choice = st.Choice(*given.get("choice", (1.0,)))
        others = {name: value for name, value in given.items() if name not in ("choice", "prompt")}
        st.generate("run", given.get("prompt", "a"), choice=choice, **others)


def prompts_of(name: str) -> list:
    return prompts.read_prompts(argparse.Namespace(prompt=None, prompts=name, chat=None))


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl", "P.JSONL", "p.ndjson"])
def test_a_file_of_prompts_may_begin_with_the_mark_of_windows(name, tmp_path):
    line = "a" if name == "p.txt" else '{"prompt": "a", "id": 7}'
    (tmp_path / name).write_bytes(f"\ufeff{line}\r\n".encode())
    assert prompts_of(str(tmp_path / name)) == ["a"]


@pytest.mark.parametrize("line", ['"\\ud800"', '{"messages": [{"content": "\\udfff"}]}'])
def test_half_a_character_is_named_with_its_line(line, tmp_path):
    (tmp_path / "p.jsonl").write_text(f'"fine \\ud83d\\ude00"\n{line}\n')
    with pytest.raises(ConfigError, match="p.jsonl:2 has half a surrogate pair"):
        prompts_of(str(tmp_path / "p.jsonl"))


def test_a_line_that_is_no_prompt_is_named(here, capsys):
    del here
    for line in ("[" * 100_000, "{}", "3", '{"prompt": ""}', '{"messages": [1]}', "{"):
        Path("bad.jsonl").write_text(f'"fine"\n{line}\n')
        assert main(["sample", "run", "--prompts", "bad.jsonl"]) == ConfigError.exit_code
        assert "bad.jsonl:2 is " in capsys.readouterr().err
    for one, two in (("--prompt", "--chat"), ("--prompts", "--chat"), ("--prompt", "--prompts")):
        assert main(["sample", "run", one, "a", two, "b"]) == ConfigError.exit_code
        assert f"{one} and {two} cannot go together" in capsys.readouterr().err
