"""Tool calls reach a template as they are in the data, and what it leaves out is noted."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spmdtrain.cli import main
from spmdtrain.config.errors import DataError
from spmdtrain.data.chats.conversation import of_messages
from spmdtrain.data.chats.encode_conversation import (
    EncodedConversation,
    encode_conversation,
    encode_prompt,
)
from spmdtrain.data.chats.jinja_template import JinjaTemplate, JinjaText
from spmdtrain.data.chats.template_folder import template_from_spec
from spmdtrain.data.token_files.tokens import open_tokens
from spmdtrain.data.tokenizers.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
ARGUMENTS = "call['function']['arguments']"
# Ways in which published templates write the arguments of a call.
WAYS = {
    "prints": f"{{{{ {ARGUMENTS} }}}}",
    "adds": f"{{{{ '```' + {ARGUMENTS} + '```' }}}}",
    "asks": f"{{% if {ARGUMENTS} is string %}}{{{{ {ARGUMENTS} }}}}"
    f"{{% else %}}{{{{ {ARGUMENTS} | tojson }}}}{{% endif %}}",
    "as JSON": f"{{{{ {ARGUMENTS} | tojson }}}}",
    "its length": f"{{{{ {ARGUMENTS} | length }}}}",
}


def calling(way: str) -> str:
    """A template of messages with calls, whose arguments it writes in a way."""
    return (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
        "{% for call in m['tool_calls'] or [] %}{{ call['function']['name'] }}"
        + way
        + "{% endfor %};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )


def conversation(arguments, **message) -> list[dict]:
    call = {"type": "function", "function": {"name": "forecast", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]} | message
    return [{"role": "user", "content": "weather?"}, answer]


def as_transformers(template: str, messages: list[dict]) -> str:
    """The text that transformers makes of messages."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template).render(messages=messages, add_generation_prompt=False)


def encoded(template: str, messages: list[dict], **named) -> EncodedConversation:
    with JinjaTemplate(JinjaText(template, **named)) as ready:
        return encode_conversation(of_messages(messages, "here"), ready, BYTES, "here")


def text_of(found: EncodedConversation) -> str:
    return bytes(found.ids.tolist()).decode()


@pytest.fixture(scope="module")
def ready():
    templates = {way: JinjaTemplate(JinjaText(calling(text))) for way, text in WAYS.items()}
    yield templates
    for template in templates.values():
        template.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("aé\"'\\", max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner),
)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=20, deadline=None)
@given(
    arguments=st.text("{}[]\"':, ab1é\\", max_size=12)
    | JSON.map(json.dumps)
    | st.dictionaries(st.text("ab", max_size=2), JSON, max_size=3)
)
def test_a_template_sees_the_arguments_that_are_in_the_data(way, arguments, ready):
    """A text stays a text, whether it is JSON or not; an object stays one."""
    messages = conversation(arguments)
    if way == "adds" and not isinstance(arguments, str):
        return
    found = encode_conversation(of_messages(messages, "here"), ready[way], BYTES, "here")
    assert text_of(found) == as_transformers(calling(WAYS[way]), messages)


def test_arguments_are_read_as_json_where_that_is_asked_for():
    messages = conversation('{"city":"Paris"}')
    as_object = conversation({"city": "Paris"})
    template = calling(WAYS["as JSON"])
    found = encoded(template, messages, parses_arguments=True)
    assert text_of(found) == as_transformers(template, as_object)
    assert not found.quotes_arguments
    assert encoded(template, messages).quotes_arguments
    assert not encoded(calling(WAYS["prints"]), messages).quotes_arguments
    for own in ("[1]", "Paris", '"Paris"'):
        found = encoded(template, conversation(own), parses_arguments=True)
        assert text_of(found) == as_transformers(template, conversation(own))


def test_a_template_of_an_older_file_reads_arguments_as_json_as_it_did():
    spec = JinjaText(calling(WAYS["as JSON"])).spec
    del spec["parses_arguments"]
    template = template_from_spec(spec)
    found = encode_conversation(
        of_messages(conversation('{"city":"Paris"}'), "here"), template, BYTES, "here"
    )
    template.close()
    assert '{"city": "Paris"}' in text_of(found)


def test_a_template_that_wants_an_object_names_the_option():
    way = f"{{% for key, value in {ARGUMENTS}.items() %}}{{{{ key }}}}{{{{ value }}}}{{% endfor %}}"
    with pytest.raises(DataError, match=r"^here: the template says: .*; try --parse-arguments$"):
        encoded(calling(way), conversation('{"city":"Paris"}'))
    assert "cityParis" in text_of(
        encoded(calling(way), conversation('{"city":"Paris"}'), parses_arguments=True)
    )


# Templates that look for the absence of a content, in the ways that published ones do.
ABSENCES = {
    "is none": "{% if m['content'] is none %}CALLS{% else %}{{ m['content'] }}{% endif %}",
    "is not none": "{% if m['content'] is not none %}{{ m['content'] }}{% else %}CALLS{% endif %}",
    "adds": "{% if m['content'] is none %}CALLS{% else %}{{ '' + m['content'] }}{% endif %}",
    "is defined": "{% if m['content'] is defined %}{{ m['content'] }}{% else %}CALLS{% endif %}",
    "is true": "{% if m['content'] %}{{ m['content'] }}{% else %}CALLS{% endif %}",
    "prints": "{{ m['content'] }}CALLS",
}
CALLS = "{% for c in m['tool_calls'] or [] %}<{{ c['function']['name'] }}>{% endfor %}"


@pytest.mark.parametrize("how", ABSENCES)
@pytest.mark.parametrize("has_null", [True, False])
def test_a_call_without_content_is_written_however_a_template_looks_for_it(how, has_null):
    template = "{% for m in messages %}[{{ m['role'] }}]" + ABSENCES[how].replace("CALLS", CALLS)
    template += ";{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    messages = conversation({}, content=None)
    if not has_null:
        del messages[1]["content"]
    found = encoded(template, messages)
    assert text_of(found) == "[user]weather?;[assistant]<forecast>;"
    assert bytes(found.ids[found.loss == 1].tolist()) == b"<forecast>;"
    assert not found.has_gaps
    with JinjaTemplate(JinjaText(template)) as ready:
        asked = of_messages([*messages, {"role": "user", "content": "and?"}], "here")
        prompt = encode_prompt(asked, ready, BYTES, "here")
    assert bytes(prompt.tolist()) == b"[user]weather?;[assistant]<forecast>;[user]and?;[assistant]"


@pytest.mark.parametrize(
    ("writes", "lost"),
    [
        ("{{ m['content'] }}", True),
        ("{{ m['content'] }}<{{ c['function']['name'] }}>", True),
        ("<{{ c['function']['name'] }}{{ c['function']['arguments'] | tojson }}>", True),
        ("{{ m['content'] }}{{ c['function']['arguments'] | tojson }}", True),
        ("{{ m['content'] }}<{{ c['function']['name'] }}{{ c['function']['arguments'] }}>", False),
    ],
)
def test_any_part_of_a_message_that_is_left_out_is_noted(writes, lost):
    """Even if the same words stand elsewhere in the text."""
    template = "{# tool_calls #}{% for m in messages %}{% for c in m.tool_calls or [0] %}[" + (
        "{% if c %}" + writes + "{% else %}{{ m['content'] }}{% endif %}{{ m['role'] }}]"
    )
    template += "{% endfor %}{% endfor %}"
    messages = conversation({"city": "weather?"}, content="weather?")
    messages[0]["content"] = "weather? forecast"
    assert encoded(template, messages).has_gaps is lost


def test_the_command_counts_what_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": conversation('{"city":"Paris"}')}, {"messages": conversation({"a": 1})}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.jinja").write_text(calling(WAYS["as JSON"]))
    command = ["data", "prepare", "a.jsonl", "--chat", "--chat-template", "t.jinja"]
    assert main([*command, "--out", "text"]) == 0
    assert "1 conversation has arguments of a tool call that are a text" in capsys.readouterr().out
    assert main([*command, "--out", "object", "--parse-arguments"]) == 0
    assert "a text" not in capsys.readouterr().out
    assert open_tokens("object").template["parses_arguments"] is True
    assert main(["data", "prepare", "a.jsonl", "--chat", "--parse-arguments", "--out", "x"]) == 4
    assert "--parse-arguments is for Jinja templates" in capsys.readouterr().err
