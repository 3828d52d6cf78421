"""Refuses weights that were trained with another tokenizer than that of the data."""

from pathlib import Path
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.published.model_from import is_run
from spmdtrain.config.run_files import RunFiles
from spmdtrain.data.tokenizers.difference import Spec, difference, named, spec_in
from spmdtrain.data.tokenizers.tokenizer import from_spec


def tokenizer_of(folder: Path) -> Spec | None:
    """Returns the tokenizer of the weights in a run or a published model; None if none is known.

    Raises UserError if what is recorded there is damaged.
    """
    if not is_run(folder):
        return spec_in(folder)
    recorded: dict[str, Any] | None = RunFiles(folder).config.get("tokenizer")
    return None if recorded is None else from_spec(recorded).spec()


def check_same(what: str, folder: Path, tokenizer: Spec | None, of: str, fix: str) -> None:
    """Raises ConfigError if the weights in `folder` learned another tokenizer than `tokenizer`.

    `what` names the weights, and `of` what `tokenizer` belongs to.
    """
    if tokenizer is None:
        return
    theirs = tokenizer_of(folder)
    if theirs is None:
        return
    if differs := difference(tokenizer, theirs):
        raise ConfigError(
            f"{what} has another tokenizer than {of}",
            asked=named(tokenizer),
            found=f"{named(theirs)}: {differs}",
            fix=fix,
        )
