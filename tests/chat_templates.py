"""Templates written in the manner of published families, and what each makes of one conversation.

The expected texts are written by hand; what is learned stands between ⟦ and ⟧.
"""

from typing import Any, NamedTuple

ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Two? "},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "It is 3."},
]
WITHOUT_SYSTEM = ASKED[1:]
CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": "ü<|end|>"}}}
WITH_CALL = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sum": 3}'},
    {"role": "assistant", "content": "3"},
]
TOOLS = [{"type": "function", "function": {"name": "add"}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


class Family(NamedTuple):
    """A template, a conversation, and its text."""

    template: str
    text: str
    messages: list[dict[str, Any]] = ASKED
    tools: list | None = None
    last_only: bool = False
    refused: str = ""  # what is said where every answer is to be learned


CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') }}
{{- '\\n\\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}' }}
        {%- endfor %}
        {{- '<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Thoughts of answers to earlier questions are left out, and the last answer always has some.
QWEN3 = """
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role != 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- set thoughts = '' %}
    {%- if '</think>' in message.content %}
        {%- set thoughts = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last %}
        {{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""

# No prompt opens an answer: its first character is the space after [/INST].
MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

PHI = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>\\n' }}
{%- endif %}
"""

# The end of the text comes after the last answer alone, and between the others a line break.
TULU = """
{%- for message in messages %}
    {%- if message['role'] != 'assistant' %}
        {{- '<|' + message['role'] + '|>\\n' + message['content'] + '\\n' }}
    {%- else %}
        {{- '<|assistant|>\\n' }}
        {%- generation %}
            {{- message['content'] + eos_token }}
        {%- endgeneration %}
        {%- if not loop.last %}{{ '\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""

GRANITE = """
{%- if messages[0].role != 'system' %}
    {{- '<|start_of_role|>system<|end_of_role|>You are kind.<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' ~ message.role ~ '<|end_of_role|>' }}
    {%- for part in message.content %}
        {{- part.text }}
    {%- endfor %}
    {{- '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_of_role|>assistant<|end_of_role|>' }}
{%- endif %}
"""

SMOLLM3 = """
{{- '<|im_start|>system\\n' }}
{%- set told = '' %}
{%- for message in messages if message.role == 'system' %}
    {%- set told = message.content | replace('/no_think', '') | trim %}
    {{- told }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- for message in messages if message.role != 'system' %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content ~ '<|im_end|>\\n' }}{%- endgeneration %}
    {%- else %}
        {{- message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# The last answer returns; earlier ones, and those of before a call, end.
GPT_OSS = """
{%- for message in messages %}
    {%- if message.role != 'assistant' %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>assistant' }}
        {%- if message.thinking is defined and loop.last %}
            {{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}
        {%- endif %}
        {{- '<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last else '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

THINKING = [
    *ASKED[1:3],
    ASKED[3],
    {"role": "assistant", "content": "It is 3.", "thinking": "One more."},
]

FAMILIES = {
    "chatml": Family(
        CHATML,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Two? <|im_end|>\n"
        "<|im_start|>assistant\n⟦2<|im_end|>\n⟧<|im_start|>user\nThree?<|im_end|>\n"
        "<|im_start|>assistant\n⟦It is 3.<|im_end|>\n⟧",
    ),
    "llama": Family(
        LLAMA,
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday: 02 Jan 2026\n\n<|eot_id|>"
        '{"type": "function", "function": {"name": "add"}}'
        "<|start_header_id|>user<|end_header_id|>\n\nAdd.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '⟦{"name": "add", "parameters": {"a": 1, "b": "ü<|end|>"}}<|eot_id|>⟧'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"{\\"sum\\": 3}"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦3<|eot_id|>⟧",
        WITH_CALL,
        TOOLS,
    ),
    "qwen3": Family(
        QWEN3,
        "<|im_start|>user\n Two? <|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nThree?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nOne more.\n</think>\n\nIt is 3.<|im_end|>\n⟧",
        [
            *ASKED[1:4],
            {"role": "assistant", "content": "<think>\nOne more.\n</think>\n\nIt is 3."},
        ],
        last_only=True,
        refused="message 2: the template writes an answer differently",
    ),
    "gemma": Family(
        GEMMA,
        "<s><start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n⟦2<end_of_turn>\n⟧"
        "<start_of_turn>user\nThree?<end_of_turn>\n<start_of_turn>model\n"
        "⟦It is 3.<end_of_turn>\n⟧",
        WITHOUT_SYSTEM,
    ),
    "mistral": Family(
        MISTRAL,
        "<s>[INST] Two? [/INST]⟦ 2</s>⟧[INST] Three? [/INST]⟦ It is 3.</s>⟧",
        WITHOUT_SYSTEM,
    ),
    "phi": Family(
        PHI,
        "<|system|>\nBe brief.<|end|>\n<|user|>\n Two? <|end|>\n<|assistant|>\n⟦2<|end|>\n⟧"
        "<|user|>\nThree?<|end|>\n<|assistant|>\n⟦It is 3.<|end|>\n⟧",
    ),
    "tulu": Family(
        TULU,
        "<|system|>\nBe brief.\n<|user|>\n Two? \n<|assistant|>\n⟦2</s>⟧\n"
        "<|user|>\nThree?\n<|assistant|>\n⟦It is 3.</s>⟧",
    ),
    "granite": Family(
        GRANITE,
        "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|> Two? <|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦2<|end_of_text|>\n⟧"
        "<|start_of_role|>user<|end_of_role|>Three?<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦It is 3.<|end_of_text|>\n⟧",
    ),
    "smollm3": Family(
        SMOLLM3,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Two? <|im_end|>\n"
        "<|im_start|>assistant\n⟦2<|im_end|>\n⟧<|im_start|>user\nThree?<|im_end|>\n"
        "<|im_start|>assistant\n⟦It is 3.<|im_end|>\n⟧",
    ),
    "gpt_oss": Family(
        GPT_OSS,
        "<|start|>user<|message|> Two? <|end|><|start|>assistant<|channel|>final<|message|>2<|end|>"
        "<|start|>user<|message|>Three?<|end|><|start|>assistant"
        "⟦<|channel|>analysis<|message|>One more.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 3.<|return|>⟧",
        THINKING,
        last_only=True,
        refused="message 2: the template writes an answer differently",
    ),
}
