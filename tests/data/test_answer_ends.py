"""An answer whose end is not learned is noted, whatever hides it: then a model never stops."""

import json

import pytest

from spmdtrain.cli import main
from spmdtrain.data.chats.conversation import of_messages
from spmdtrain.data.chats.encode_conversation import encode_conversation
from spmdtrain.data.chats.jinja_template import JinjaTemplate, JinjaText
from spmdtrain.data.chats.simple_template import SimpleTemplate
from spmdtrain.data.tokenizers.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
END = "<|im_end|>"
CALL = {"function": {"name": "f", "arguments": {"a": "b"}}}
ASKED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "s"}]
CALLS = [ASKED[0], {"role": "assistant", "content": "s", "tool_calls": [CALL]}]
BEGIN, STOP = "{% generation %}", "{% endgeneration %}"
JSON = "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"


def writing(answer: str, opened: str = "A:", other: str = "{{ m.content }}" + END) -> str:
    """A Jinja template with this text for an answer."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + opened + answer
        + "{% else %}U:" + other + "{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}" + opened + "{% endif %}"
    )  # fmt: skip


# (the text of an answer, is its end learned?)
ANSWERS = {
    "marked with its end": (f"{BEGIN}{{{{ m.content }}}}{JSON}{END}{STOP}", True),
    "marked, with a line behind": (f"{BEGIN}{{{{ m.content }}}}{JSON}{END}\n{STOP}", True),
    "marked in two": (f"{BEGIN}{{{{ m.content }}}}{JSON}{STOP}{BEGIN}{END}{STOP}", True),
    "marked without its end": (f"{BEGIN}{{{{ m.content }}}}{JSON}{STOP}{END}", False),
    "marked with white space": (f"{BEGIN}{{{{ m.content }}}}{JSON}\n{STOP}{END}", False),
    "the call not marked": (f"{BEGIN}{{{{ m.content }}}}{STOP}{JSON}{END}", False),
    "no marks": (f"{{{{ m.content }}}}{JSON}{END}", True),
    "no marks, no end": (f"{{{{ m.content }}}}{JSON}", False),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("messages", [ASKED, CALLS, ASKED + CALLS, CALLS + ASKED], ids=len)
def test_an_end_that_no_mask_covers_is_noted(name, messages):
    answer, is_learned = ANSWERS[name]
    with JinjaTemplate(JinjaText(writing(answer))) as template:
        found = encode_conversation(of_messages(messages, "here"), template, BYTES, "here")
    assert found.never_ends is not is_learned


def test_an_end_that_the_next_message_writes_is_not_learned():
    """The text of an answer alone has no end, so the difference holds none."""
    template = f"{{% for m in messages %}}{{% if not loop.first %}}{END}{{% endif %}}"
    template += "{{ m.role }}:{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}" + END + "assistant:{% endif %}"
    with JinjaTemplate(JinjaText(template)) as ready:
        found = encode_conversation(of_messages(ASKED, "here"), ready, BYTES, "here")
    assert found.never_ends


def test_an_answer_that_is_not_learned_need_not_end():
    answer, _ = ANSWERS["marked without its end"]
    messages = [ASKED[0], ASKED[1] | {"weight": 0}, *ASKED]
    only_last = f"{{% if loop.last %}}{BEGIN}{{{{ m.content }}}}{END}{STOP}{{% else %}}"
    only_last += f"{{{{ m.content }}}}{END}{{% endif %}}"
    for text, ends in ((answer, False), (only_last, True)):
        with JinjaTemplate(JinjaText(writing(text))) as ready:
            found = encode_conversation(of_messages(messages, "here"), ready, BYTES, "here")
        assert found.never_ends is not ends


@pytest.mark.parametrize("closing", ["\n", "<|im_end|>", ""])
@pytest.mark.parametrize("is_ended", [True, False])
def test_an_end_of_text_ends_the_last_answer_of_a_template_without_one(closing, is_ended):
    for messages in (ASKED, ASKED + ASKED):
        asked = of_messages(messages, "here")
        never_ends = not closing and not (is_ended and messages is ASKED)
        jinja = writing("{{ m.content }}" + closing.replace("\n", "{{ '\\n' }}"))
        with JinjaTemplate(JinjaText(jinja)) as ready:
            for template in (SimpleTemplate("{role}:", closing), ready):
                found = encode_conversation(asked, template, BYTES, "here", is_ended=is_ended)
                assert found.never_ends is never_ends, (template, messages)


def test_a_token_that_the_files_name_ends_an_answer():
    """Where one answer ends with another token than the last, as before the result of a call."""
    answer = "{{ m.content }}{{ '<|call|>' if not loop.last else '<|return|>' }}"
    answer = BEGIN + answer + STOP
    ids = tuple(b"<|")  # stand-ins of bytes for tokens
    for ends, never_ends in (((), True), (ids, False)):
        with JinjaTemplate(JinjaText(writing(answer), ends=ends)) as ready:
            asked = of_messages(ASKED + ASKED, "here")
            assert encode_conversation(asked, ready, BYTES, "here").never_ends is never_ends


def test_the_command_says_how_many(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": ASKED}) + "\n") * 9)
    for name in ("marked with its end", "marked without its end"):
        answer, is_learned = ANSWERS[name]
        (tmp_path / "t.jinja").write_text(writing(answer))
        command = ["data", "prepare", "a.jsonl", "--chat", "--chat-template", "t.jinja"]
        assert main([*command, "--out", name]) == 0
        said = "9 conversations have an answer whose end is not learned"
        assert (said in capsys.readouterr().out) is not is_learned
