"""Reads what a row holds as JSON in a text, because a column of a table has one type.

Where only messages can be, a text is the JSON of messages. Where a text can be, too, one that holds
messages is refused: the model would learn its brackets and keys.
"""

import json
from typing import Any

from spmdtrain.config.errors import DataError


def value_of(value: Any, where: str) -> Any:
    """Returns the value that a text holds, None if it is empty, and any other value as it is.

    Raises DataError, with the name `where`, if a text is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "null")
    except (ValueError, RecursionError):
        raise DataError(f"{where} is not JSON", found=f"{value!r:.60}") from None


def messages_of(value: Any) -> Any:
    """Returns the messages that a text holds, and whatever is no JSON as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def messages_in(text: str) -> list | None:
    """Returns the messages of which a text is the JSON; None if it is an ordinary text."""
    value = messages_of(text) if text.lstrip().startswith("[") else None
    return value if are_messages(value) else None


def refuse_messages(text: str, where: str) -> None:
    """Raises DataError, with the name `where`, if a text is the JSON of messages."""
    if messages_in(text):
        raise DataError(
            f"{where} is a text that holds messages as JSON",
            found=f"{text!r:.60}",
            fix="the list that json.loads makes of it, or a message whose content is that text",
        )


def are_messages(value: Any) -> bool:
    """Returns True for a list that begins with a message, in the keys of either form."""
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    return not value[0].keys().isdisjoint(("role", "from"))
