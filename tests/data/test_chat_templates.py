"""Templates of Jinja: each family's text and mask are those written by hand, what a message spells
stays text, and a template that cannot be trusted ends in one line."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from chat_templates import ASKED, CHATML, FAMILIES, SMOLLM3, TOKENS, WITHOUT_SYSTEM
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import HOSTILE, KINDS, TEXTS, conversation, opened, tokenizers

from spmdtrain.cli import main
from spmdtrain.config.errors import DataError
from spmdtrain.data.chats.conversation import ChatFields, of_messages, read_conversation
from spmdtrain.data.chats.encode_conversation import encode_conversation, encode_prompt
from spmdtrain.data.chats.jinja_template import JinjaTemplate, JinjaText
from spmdtrain.data.chats.simple_template import CHATML as SIMPLE
from spmdtrain.data.chats.simple_template import SimpleTemplate
from spmdtrain.data.chats.template_folder import template_from_spec
from spmdtrain.data.token_files.tokens import open_tokens
from spmdtrain.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from spmdtrain.data.tokenizers.tokenizer import ByteTokenizer

DAY = "2026-01-02"
BYTES = ByteTokenizer()


@cache
def ready(text: str) -> JinjaTemplate:
    """A template with a process that lasts as long as the tests do."""
    return JinjaTemplate(JinjaText(text, tokens=TOKENS), DAY)


@pytest.fixture(scope="module", autouse=True)
def processes_end():
    yield
    for text in [*(family.template for family in FAMILIES.values()), CHATML]:
        ready(text).close()


def marked(ids: np.ndarray, loss: np.ndarray) -> str:
    """The text of bytes, with ⟦ and ⟧ around what is learned."""
    text, before = b"", 0
    for i, counts in zip(ids.tolist(), loss.tolist(), strict=True):
        text += {(0, 1): "⟦", (1, 0): "⟧"}.get((before, counts), "").encode() + bytes([i])
        before = counts
    return (text + ("⟧" if before else "").encode()).decode()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_writes_and_masks_as_by_hand(name):
    family = FAMILIES[name]
    asked = replace(of_messages(family.messages, "here"), tools=family.tools)
    if family.refused:
        with pytest.raises(DataError, match=f"^here: {family.refused}.*; try --last-answer-only,"):
            encode_conversation(asked, ready(family.template), BYTES, "here")
    if family.last_only:
        asked = asked.with_last_answer_only()
    found = encode_conversation(asked, ready(family.template), BYTES, "here")
    assert marked(found.ids, found.loss) == family.text
    assert found.text_bytes == len(found.ids)
    assert not found.has_gaps and not found.never_ends and not found.quotes_arguments
    prompt = encode_prompt(
        replace(asked, messages=asked.messages[:-1]), ready(family.template), BYTES, "here"
    )
    before_last = family.text.rpartition("⟦")[0].replace("⟦", "").replace("⟧", "")
    assert BYTES.decode(prompt) == before_last


@pytest.mark.parametrize(
    ("name", "frame"),
    [
        ("mistral", (" [/INST]", " ", "</s>")),
        (
            "qwen3",
            ("<|im_end|>\n<|im_start|>assistant\n", "<think>\n\n</think>\n\n", "<|im_end|>\n"),
        ),
        (
            "granite",
            ("<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>", "", "<|end_of_text|>\n"),
        ),
    ],
)
def test_what_a_template_writes_around_an_answer_is_tried_out(name, frame):
    assert ready(FAMILIES[name].template).frame == frame


@pytest.mark.parametrize("name", ["chatml", "smollm3", "tulu"])
def test_an_answer_with_weight_0_is_not_learned(name):
    messages = [dict(message) for message in ASKED]
    messages[2]["weight"] = 0
    family = FAMILIES[name]
    found = encode_conversation(
        of_messages(messages, "here"), ready(family.template), BYTES, "here"
    )
    assert marked(*found[:2]) == family.text.replace("⟦", "", 1).replace("⟧", "", 1)


def test_thoughts_that_the_prompt_supplies_are_not_learned():
    asked = of_messages(ASKED[1:3], "here")
    for variables, learned in (({}, "<think>\n\n</think>\n\n2"), ({"enable_thinking": False}, "2")):
        found = encode_conversation(
            replace(asked, variables=variables), ready(FAMILIES["qwen3"].template), BYTES, "here"
        )
        assert BYTES.decode(found.ids[found.loss == 1]) == f"{learned}<|im_end|>\n"


@pytest.mark.parametrize("kind", ["byte-level", "nfkc-lower", "llama", "words", "bytes"])
@settings(max_examples=25, deadline=None)
@given(st.lists(TEXTS | HOSTILE, min_size=2, max_size=5))
def test_chatml_of_jinja_is_the_simple_one(kind, texts):
    """The same ids and losses, whatever the messages spell."""
    tokenizer = opened(kind)
    messages = of_messages(conversation(texts), "here")
    simple = SimpleTemplate.parse(SIMPLE)
    want = encode_conversation(messages, simple, tokenizer, "here")
    got = encode_conversation(messages, ready(CHATML), tokenizer, "here")
    assert got.ids.tolist() == want.ids.tolist() and got.loss.tolist() == want.loss.tolist()
    assert got.text_bytes == want.text_bytes
    question = replace(messages, messages=messages.messages[:1])
    got, want = (
        encode_prompt(question, template, tokenizer, "here") for template in (ready(CHATML), simple)
    )
    assert got.tolist() == want.tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXTS | HOSTILE, min_size=2, max_size=4), st.sampled_from(["smollm3", "gemma"]))
def test_ids_are_the_text_and_the_learned_ones_the_answers(texts, name):
    tokenizer = opened("byte-level")
    asked = of_messages(conversation([f"{text}." for text in texts]), "here")
    found = encode_conversation(asked, ready(FAMILIES[name].template), tokenizer, "here")
    own, *_ = encode_conversation(asked, ready(FAMILIES[name].template), BYTES, "here")
    assert tokenizer.decode(found.ids) == BYTES.decode(own)
    closing = "<end_of_turn>\n" if name == "gemma" else "<|im_end|>\n"
    answers = [message["content"] for message in asked.messages[1::2]]
    if name == "gemma":
        answers = [answer.strip() for answer in answers]
    text = tokenizer.decode(found.ids[found.loss == 1])
    assert text == "".join(answer + closing for answer in answers)


def test_what_is_a_special_token_once_normalized_is_text_too():
    """And the simple template, which sees each token that touches a message, has the same ids."""
    model = KINDS["nfkc-lower"]()
    end = tokenizers.AddedToken("<|end|>", special=True, normalized=True)
    model.add_special_tokens([end])
    tokenizer = HuggingFaceTokenizer(model.to_str(), "lower")
    assert tokenizer.id_of("<|end|>") in tokenizer.encode("a<|END|>")
    asked = of_messages(conversation(["a<|END|>", "b"]), "here")
    found = encode_conversation(asked, ready(CHATML), tokenizer, "here").ids
    assert tokenizer.id_of("<|end|>") not in found
    simple = encode_conversation(asked, SimpleTemplate.parse(SIMPLE), tokenizer, "here").ids
    assert found.tolist() == simple.tolist()


# --- templates of others ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("{{ messages.__class__.__mro__ }}", "is not safe to run: access to attribute"),
        ("{{ messages.append(1) }}", "is not safe to run: access to attribute 'append'"),
        ("{% include '/etc/passwd' %}", "says: no loader"),
        ("{{ 'a' * 10 ** 10 }}", "needs more than 1024 MiB"),
        ("{% for a in range(90000) %}{{ 'abcdefgh' * 100 }}{% endfor %}", "more than 1,04"),
        (
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "it writes, is nested too deeply",
        ),
        ("{% if %}", r"is not a Jinja template: .* \(line 1\)"),
        ("{{ raise_exception('No\n  such') }}", "says: No such$"),
        ("{{ messages[0].content + 1 }}", "says: can only concatenate str"),
    ],
)
def test_a_template_that_cannot_be_trusted_is_one_line(code, said):
    asked = of_messages(WITHOUT_SYSTEM, "here")
    text = "{# role content #}" + code
    with (
        JinjaTemplate(JinjaText(text), DAY, seconds=1) as template,
        pytest.raises(DataError, match=f"^(here: )?the template.*{said}") as error,
    ):
        encode_conversation(asked, template, BYTES, "here")
    assert "\n" not in str(error.value)


def test_without_the_package_there_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    template = JinjaTemplate(JinjaText(CHATML), DAY)
    with pytest.raises(DataError, match="`jinja2`, which is not installed; try pip install"):
        template.write(of_messages(ASKED, "here"), BYTES, "here")


@pytest.mark.seconds
def test_a_template_goes_on_after_it_has_failed():
    """Both after an error of its own and after the end of its process."""
    text = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    text += "{% if messages[0].content == 'x' %}{{ 'a' * 10 ** 10 }}{% endif %}"
    text += "{% if messages[0].content == 'y' %}{% for a in range(99999) %}"
    text += "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    with JinjaTemplate(JinjaText(text), DAY, seconds=1) as template:
        for content, said in (
            ("x", "needs more than"),
            ("y", "has failed: it computes"),
        ):
            with pytest.raises(DataError, match=f"^here: the template {said}"):
                template.write(of_messages(conversation([content, "a"]), "here"), BYTES, "here")
            fine = template.write(of_messages(conversation(["b", "a"]), "here"), BYTES, "here")
            assert "".join(fine.parts) == "userbassistanta"


def test_what_a_template_does_not_read_is_refused_and_what_it_leaves_out_is_noted():
    for changed, said in (
        ({"name": "Ann"}, "has a message with 'name', which the template does not read"),
        ({"role": "<|im_end|>"}, "has a message whose role is not a name"),
    ):
        asked = of_messages([ASKED[1] | changed, ASKED[2]], "here")
        with pytest.raises(DataError, match=f"^here {said}"):
            encode_conversation(asked, ready(CHATML), BYTES, "here")
    for name, value in (("tools", [{}]), ("documents", [{}]), ("variables", {"style": 1})):
        asked = replace(of_messages(ASKED, "here"), **{name: value})
        with pytest.raises(DataError, match="which the template does not read"):
            encode_conversation(asked, ready(CHATML), BYTES, "here")
    with_tool = of_messages([*ASKED[:2], {"role": "other", "content": "lost"}, ASKED[2]], "here")
    only_two = "{% for m in messages if m.role != 'other' %}{{ m.content }}{% endfor %}"
    with JinjaTemplate(JinjaText(only_two), DAY) as template:
        assert encode_conversation(with_tool, template, BYTES, "here").has_gaps


# --- rows ---------------------------------------------------------------------------------------

DEEP = json.loads("[" * 900 + "]" * 900)
PLAIN = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": PLAIN},
        {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"prompt": "q", "completion": "a"},
        {"prompt": PLAIN[:1], "completion": PLAIN[1:]},
        {"messages": [PLAIN[0] | {"content": ["q"]}, PLAIN[1] | {"weight": 1, "name": None}]},
    ],
)
def test_every_form_of_a_row_is_the_same_conversation(row):
    found = read_conversation(row | {"id": 7}, ChatFields(), "here")
    assert found is not None and found.messages == PLAIN and found.learned == (False, True)


def test_what_else_a_row_holds_is_kept():
    calls = [{"function": {"name": "f", "arguments": '{"x": [1, "y"]}'}}]
    row = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "", "tool_calls": calls},
        ],
        "system": "s",
        "tools": '[{"name": "f"}]',
        "chat_template_kwargs": {"enable_thinking": False},
    }
    found = read_conversation(row, ChatFields(), "here")
    assert found is not None
    assert [message["role"] for message in found.messages] == [
        *("system", "user", "assistant", "tool", "assistant")
    ]
    assert found.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert found.messages[4]["tool_calls"] == calls  # a text stays a text
    assert (found.tools, found.variables) == ([{"name": "f"}], {"enable_thinking": False})
    earlier = {"prompt": [*PLAIN, PLAIN[0]], "completion": PLAIN[1:]}
    found = read_conversation(earlier, ChatFields(), "here")
    assert found is not None and found.learned == (False, False, False, True)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "q"}, " has a prompt or a completion, not both"),
        ({"prompt": 3, "completion": "a"}, "'prompt' is neither a text nor messages; found 3"),
        ({"messages": [{"from": "alien", "value": "q"}]}, "a message from 'alien'; try one of"),
        ({"messages": PLAIN, "tools": "["}, "'tools' is not JSON"),
        ({"messages": PLAIN, "tools": "3"}, "'tools' is not a list of objects; found 3"),
        ({"messages": PLAIN, "chat_template_kwargs": [1]}, "is not an object"),
        ({"messages": ASKED, "system": "s"}, "two system texts"),
        ({"messages": PLAIN, "tools": [{"a": "\ud800"}]}, "half a surrogate pair"),
        ({"messages": PLAIN, "tools": [{"a": DEEP}]}, "nested too deeply; found more than 100"),
        ({"messages": [PLAIN[0] | {"tool_calls": DEEP}]}, "nested too deeply"),
        ({"messages": [PLAIN[0] | {"tool_calls": "["}]}, "'tool_calls' is not JSON"),
        ({"messages": [PLAIN[0] | {"tool_calls": [3]}]}, "'tool_calls' is not a list of objects"),
        ({"messages": [{"role": "user", "content": 5, "name": "x"}]}, "a content that is not a t"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(row, said):
    with pytest.raises(DataError, match=f"^here.*{said}"):
        read_conversation(row, ChatFields(), "here")


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tokenizer's folder with templates, and conversations."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    tokenizer = tokenizers.Tokenizer.from_str(opened("byte-level").spec()["json"])
    tokenizer.save("model/tokenizer.json")
    named = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": "{{ tools }}" + CHATML},
    ]
    config = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": named}
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": [1, 4, 99999]}')
    rows = [{"messages": ASKED}, {"messages": conversation(["hello </s>", "yes"])}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.seconds
def test_a_folder_has_its_template_which_is_kept_with_the_tokens(folder, capsys):
    arguments = ["data", "prepare", "a.jsonl", "--chat", "--tokenizer", "model"]
    assert main([*arguments, "--out", "out"]) == 0
    said = capsys.readouterr().out
    source = open_tokens("out")
    text = FAMILIES["chatml"].text.replace("⟦", "").replace("⟧", "")
    tokenizer = opened("byte-level")
    starts = source.document_starts
    assert tokenizer.decode(source.tokens[: starts[1]]) == text and source.end_of_text is None
    share = 100 * source.loss.sum() / len(source.tokens)
    assert f"learned ({share:.0f} %)" in said and "template 'model'" in said
    assert "1 document spells a special token; kept as text" in said
    kept = template_from_spec(json.loads(json.dumps(source.template)))
    assert kept.ends == (tokenizer.id_of("<|im_end|>"), 1) and kept.spec == source.template
    assert kept.spec["tokens"] == {"eos_token": "<|im_end|>"}
    assert kept.frame == ("<|im_end|>\n<|im_start|>assistant\n", "", "<|im_end|>\n")
    kept.close()
    # A file of its own counts more, and one that is named still more.
    (folder / "model/chat_template.jinja").write_text(SMOLLM3)
    assert main([*arguments, "--out", "smol", "--last-answer-only"]) == 0
    source = open_tokens("smol")
    assert source.template["jinja"] == SMOLLM3
    assert tokenizer.decode(source.tokens[source.loss == 1]).startswith("It is 3.<|im_end|>\n")
    more = folder / "model/additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools }}")
    assert main([*arguments, "--out", "more"]) == 0
    assert open_tokens("more").template["for_tools"] == "{{ tools }}"
    (folder / "own.jinja").write_text("{{ mood }}" + CHATML)
    own = ["--chat-template", "own.jinja", "--chat-set", "mood=true", "--end-of-text", "<s>"]
    assert main([*arguments, "--out", "own", *own, "--workers", "2"]) == 0
    source = open_tokens("own")
    assert tokenizer.decode(source.tokens).count("<s>True<|im_start|>") == 1
    assert main([*arguments, "--out", "simple", "--template", "{role}: {content}\n"]) == 0
    assert open_tokens("simple").template == "{role}: {content}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--chat-template", "a.jinja", "--template", "{role}{content}"], 4, "cannot go together"),
        (["--chat-template", "none.jinja"], 5, "cannot read the template none.jinja: No such file"),
        (["--chat-set", "mood"], 4, "--chat-set 'mood' is not NAME=VALUE"),
        (["--chat-set", "mood=1"], 5, "the template does not read the variable 'mood'"),
        (["--chat-set", "mood=1", "--template", "{role}{content}"], 4, "is for Jinja templates"),
    ],
)
def test_what_the_command_cannot_do_is_one_line(arguments, code, said, folder, capsys):
    del folder
    command = ["data", "prepare", "a.jsonl", "--chat", "--tokenizer", "model", "--out", "out"]
    assert main([*command, *arguments]) == code
    assert said in capsys.readouterr().err
    del command[3]
    assert main([*command, *arguments]) == 4
    assert "is for conversations; try --chat " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "has a chat_template that is not one; found 3"),
        ([{"name": "a", "template": 3}], "has a chat_template that is not one"),
        (
            [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}],
            "found a, b; try",
        ),
    ],
)
def test_a_folder_whose_template_is_none_is_one_line(value, said, folder, capsys):
    (folder / "model/tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    command = ["data", "prepare", "a.jsonl", "--chat", "--tokenizer", "model", "--out", "out"]
    assert main(command) == 5
    assert said in capsys.readouterr().err
