"""Holds a conversation with a trained run: each answer takes account of everything said so far."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax

from spmdtrain.config.errors import ConfigError
from spmdtrain.inference import sample
from spmdtrain.inference.prompts import (
    Prompts,
    ending_of,
    prompt_ids,
    stops_of,
    template_of,
    text_until_stop,
    texts_to_stop,
)
from spmdtrain.inference.trained_run import open_run
from spmdtrain.models.choose import MakeModel


class Chat:
    """A conversation that grows with each question. Use it in a `with`."""

    def __init__(  # noqa: PLR0913 - one keyword for each thing that a caller may choose
        self,
        run: str | Path,
        length: int | None = None,
        *,
        step: int | None = None,
        choice: sample.Choice = sample.Choice(),  # noqa: B008 - it is frozen
        seed: int = 0,
        stop: Sequence[str] = (),
        overrides: Sequence[str] = (),
        make: MakeModel | str | None = None,
        ema: bool = False,
    ):
        """Opens `run`; the arguments are those of `sample.generate`. Raises UserError."""
        self.messages: list[dict[str, str]] = []
        choice = sample.checked_choice(choice)
        self._key = sample.sampling_key(seed)
        self._length = sample.check_length(length)
        stop = [text for text in texts_to_stop(stop) if text != sample.END_OF_TEXT]
        self._opened = open_run(run, step=step, make=make, overrides=overrides, ema=ema)
        setup = self._opened.setup
        sample.refuse_pipeline(setup.mesh)
        self._template = template_of(self._opened)
        self._tokenizer = self._opened.tokenizer
        ending = ending_of(self._opened, self._template)
        self._prompts = Prompts([], self._tokenizer, is_one=True, ending=ending)
        self._stops = stops_of(self._prompts, stop, None)
        self._max_length = setup.config.model.max_length
        self._generate = sample.make_generate(
            setup, self._length, choice, self._stops.ids, shapes=partial(_shapes, self._max_length)
        )

    def ask(self, question: str) -> str:
        """Returns the answer to a question, which is then part of the conversation.

        Raises ConfigError if the conversation is longer than the model was made for.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        ids = prompt_ids(messages, self._template, self._opened)
        length = min(self._length, self._max_length - len(ids))
        if length < 1:
            raise ConfigError(
                f"the conversation has {len(ids)} tokens, and leaves no room for an answer",
                found=f"model.max_length={self._max_length}",
                fix="a new conversation",
            )
        key = jax.random.fold_in(self._key, len(self.messages))
        (made,) = self._generate(self._opened.params, [ids], key, length)
        answer = text_until_stop(self._prompts, made, len(ids), self._stops)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def __enter__(self) -> "Chat":
        return self

    def __exit__(self, *_) -> None:
        self._template.close()


def _shapes(max_length: int, start: int, room: int) -> tuple[int, int]:
    """Returns powers of two: there are few of them, so few programs are compiled."""
    return 1 << start.bit_length() - 1, min(1 << (room - 1).bit_length(), max_length)
