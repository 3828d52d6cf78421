"""Says at which token or text a model stops that has learned to answer in a template."""

from spmdtrain.data.chats.encode_conversation import Template
from spmdtrain.data.tokenizers.tokenizer import Tokenizer


def stop_of_closing(closing: str, tokenizer: Tokenizer) -> int | str | None:
    """Returns what in the text behind an answer ends it: its first token, if that is a special one.

    Otherwise it is the text, without white space at its end if it is more than that. None if there
    is no text.
    """
    first = tokenizer.encode_parts([closing]).ids[:1].tolist()
    if first and tokenizer.is_special(first[0]):
        return first[0]
    return closing.rstrip() or closing or None


def stop_texts(template: Template, tokenizer: Tokenizer) -> list[str]:
    """Returns the texts of all that ends an answer: the closing text, and the template's ids."""
    stop = stop_of_closing(template.frame.closing, tokenizer)
    stops = [*template.ends, *([] if stop is None else [stop])]
    texts = [stop if isinstance(stop, str) else tokenizer.decode([stop]) for stop in stops]
    return [text for text in texts if text]
