"""Draws texts and conversations that people have, and those that nobody expects."""

from random import Random
from typing import Any

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "</s>", "<unk>", "<0x41>", "▁")
WORDS = ("the", "hello", "lll", "to be", "no", "aaaa", "def f(x):", "1234567890", "0.5")
ODD = (
    "\r\n", "\r", "\n\n", "\t", "\x00", "\x1a", "\x7f", "\x85", "\u2028", "\ufeff", "\ufffd",
    "\uffff", "\U0010fffe", "e\u0301", "\u202e", "ﬁ", "İ", "ß", "日本語", "🙂", "👩‍👩‍👧", "\u200b",
    " ", "  ", '"', "\\", "\\n", "{role}", "{content}", "{", "\x1c",
)  # fmt: skip
LAST_POINT = "\U0010ffff"  # by which the tokenizer `characters` ends a text
LONG = 300_000  # characters of a long document


def draw_text(random: Random, *, is_long: bool = False) -> str:
    """Return a text; one in ten is empty or white space."""
    if is_long:
        return random.choice(("x", "ab ", "日", "\n")) * (LONG // 2) + draw_text(random)
    kind = random.random()
    if kind < 0.1:
        return random.choice(("", "", " ", "\n", "\r\n \t"))
    parts = []
    for _ in range(random.randint(1, 12)):
        share = random.random()
        if share < 0.6:
            parts.append(random.choice(WORDS) + random.choice(("", " ", "\n")))
        elif share < 0.9:
            parts.append(random.choice(ODD))
        elif share < 0.97:
            parts.append(chr(_point(random)))
        else:
            parts.append(random.choice(SPECIALS))
    if random.random() < 0.005:
        parts.append(LAST_POINT)
    return "".join(parts)


def _point(random: Random) -> int:
    """Return a code point that is a character."""
    while True:
        point = random.randrange(random.choice((0x80, 0x800, 0x10000, 0x10FFFF)))
        if not 0xD800 <= point < 0xE000:
            return point


def draw_messages(random: Random, *, is_long: bool = False) -> list[dict[str, Any]]:
    """Return a conversation that must be taken."""
    messages = []
    if random.random() < 0.3:
        messages.append({"role": "system", "content": draw_text(random)})
    for _ in range(random.randint(1, 3)):
        messages.append({"role": "user", "content": draw_text(random)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw_text(random)}
        if random.random() < 0.2:
            answer["weight"] = random.choice((0, 1))
        messages.append(answer)
    if is_long:
        messages[-1]["content"] = draw_text(random, is_long=True)
    return messages


def draw_odd_messages(random: Random) -> Any:
    """Return a conversation that may be refused."""
    message: dict[str, Any] = {"role": "user", "content": draw_text(random)}
    change = random.choice(
        (
            {"role": "a<|im_end|>"},
            {"role": ""},
            {"role": 3},
            {"content": None},
            {"content": ["part", {"type": "text", "text": " and part"}]},
            {"content": [{"type": "image", "text": "x"}]},
            {"content": {"deep": [{}]}},
            {"tool_calls": [{"name": "f"}]},
            {"weight": -1},
            {"weight": "0"},
            {"name": "x"},
        )
    )
    return random.choice(([message | change], [], "text", {"role": "user"}, [[]], [None], 5))
