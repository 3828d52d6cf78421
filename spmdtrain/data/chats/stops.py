"""Finds the tokens and texts at which a model stops after it has learned a template."""

from spmdtrain.data.chats.encode_conversation import Template
from spmdtrain.data.tokenizers.tokenizer import Tokenizer


def stop_of_closing(closing: str, tokenizer: Tokenizer) -> int | str | None:
    """Returns what ends an answer, given the text after it: its first token, if that is special.

    Otherwise it is the text, stripped of trailing white space unless it is nothing else. None if
    there is no text.
    """
    first = tokenizer.encode_parts([closing]).ids[:1].tolist()
    if first and tokenizer.is_special(first[0]):
        return first[0]
    return closing.rstrip() or closing or None


def stop_texts(template: Template, tokenizer: Tokenizer) -> list[str]:
    """Returns every text that ends an answer: the closing text, and those of the template's ids."""
    stop = stop_of_closing(template.frame.closing, tokenizer)
    stops = [*template.ends, *([] if stop is None else [stop])]
    texts = [stop if isinstance(stop, str) else tokenizer.decode([stop]) for stop in stops]
    return [text for text in texts if text]
