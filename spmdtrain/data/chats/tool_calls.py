"""Parses the arguments of tool calls that are JSON texts, for templates that need their value."""

import json
from typing import Any

PARSE_ARGUMENTS = "--parse-arguments"  # of `data prepare`


def with_parsed_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages whose tool calls have objects as arguments, in place of texts of them."""
    return [
        message | {"tool_calls": [_parsed(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _parsed(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    call = {key: _parsed(value) for key, value in call.items()}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        value = json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"arguments": value} if isinstance(value, dict) else call
