"""Finds faults in how a tokenizer and a chat template fit together."""

from spmdtrain.config.errors import DataError
from spmdtrain.data.chats.encode_conversation import Template
from spmdtrain.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from spmdtrain.data.tokenizers.tokenizer import Tokenizer


def markers_of_text(template: Template, tokenizer: Tokenizer) -> list[str]:
    """Returns the markers of a template that the tokenizer has no token for."""
    return [marker for marker in template.markers if _is_text(marker, tokenizer)]


def _is_text(marker: str, tokenizer: Tokenizer) -> bool:
    try:
        return len(tokenizer.encode(marker)) != 1
    except DataError:  # its alphabet lacks some of the characters
        return False


def faults(template: Template, tokenizer: Tokenizer) -> list[str]:
    """Returns warnings about how a tokenizer handles a template, one line each."""
    lines = []
    spelled = markers_of_text(template, tokenizer)
    if spelled:
        named = " and ".join(
            f"{marker} ({len(tokenizer.encode(marker))} tokens)" for marker in spelled
        )
        special = " ".join(f"--special '{marker}'" for marker in spelled)
        lines.append(
            f"to this tokenizer the template's {named} is ordinary text, which a message can "
            f"also spell; spmdtrain tokenizer train ... {special} makes one that has them"
        )
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return lines  # its tokens never span two texts
    opening, lead, closing = template.frame
    for answer in ("yes", "The", "1"):
        encoding = tokenizer.encode_parts([opening + lead, answer, closing])
        cut = (encoding.starts < len(opening)) & (encoding.ends > len(opening))
        if cut.any():
            token = tokenizer.decode(encoding.ids[cut][:1])
            lines.append(
                f"an answer begins inside a token: {answer!r} after {opening[-12:]!r} gives "
                f"{token!r}, which `sample` can never produce; end the opening differently, e.g. "
                "with a line break"
            )
            break
    return lines
