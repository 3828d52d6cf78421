"""Gives a published model the configuration and the tokenizer of a run."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdtrain.config.arguments import as_path
from spmdtrain.config.errors import DataError
from spmdtrain.config.load import COMMAND_LINE, from_resolved
from spmdtrain.config.published.longest import check_longest
from spmdtrain.config.published.read_config import Published, read_published
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.chats.template_folder import fault_of, folder_template, with_tokens
from spmdtrain.data.tokenizers.other_libraries import CONVERTED, NAMES
from spmdtrain.data.tokenizers.text_ends import begin_of_text, end_of_text
from spmdtrain.data.tokenizers.tokenizer import Tokenizer, open_tokenizer
from spmdtrain.interop.companion_files import ORIGINAL, TOKENIZER

LONGEST_SAMPLE = 1024  # tokens of the sequences that an imported run is evaluated on


@dataclass(frozen=True)
class Described:
    """The data of an import as config.json records it: its tokenizer."""

    tokenizer: dict[str, Any] | None
    end_of_text: int | None
    begin_of_text: int | None
    fingerprint: str = ""
    template: dict[str, Any] | None = None  # the spec of its chat template
    remarks: tuple[str, ...] = ()  # about what it cannot use


def model_config(
    folder: str | Path,
    overrides: Sequence[str] = (),
    run: str | Path = "RUN",
    ignored: Sequence[str] = (),
) -> tuple[Published, RunConfig]:
    """Returns a published model, and the configuration of a run with it.

    `overrides` are `a.b=c` strings applied on top, `ignored` patterns of tensors that are left out.
    Raises ConfigError as `read_published` does.
    """
    published = read_published(as_path(folder, "folder"), ignored)
    dtype = "bfloat16" if published.dtype == "bfloat16" else "float32"
    data = {"corpus": "synthetic"}
    if (published.folder / TOKENIZER).is_file():
        data = {"corpus": "stdlib", "tokenizer": str(Path(run) / ORIGINAL / TOKENIZER)}
    sections = {
        "model": published.settings,
        "precision": {"params": dtype, "compute": dtype},
        "train": {"sequence_length": 1},
        "data": data,
    }
    where = str(published.folder / "config.json")
    origin = {f"{section}.{name}": where for section, values in sections.items() for name in values}
    config = from_resolved({"config": sections, "origin": origin}, overrides)
    check_longest(published, config)
    if config.origin.get("train.sequence_length") != COMMAND_LINE:
        length = min(LONGEST_SAMPLE, config.model.max_length)
        train = config.train.model_copy(update={"sequence_length": length})
        config = config.model_copy(update={"train": train})
    return published, config


def described(published: Published, config: RunConfig) -> Described:
    """Returns the tokenizer of a published model, with its chat template if that can be used.

    Raises DataError if the model has too few rows for it.
    """
    if not (published.folder / TOKENIZER).is_file():
        return Described(None, None, None, remarks=(_without_tokenizer(published.folder),))
    name = str(published.folder)
    tokenizer = open_tokenizer(name)
    vocab = config.model.vocab or 0
    if tokenizer.size > vocab:
        rows = -(-tokenizer.size // 64) * 64
        raise DataError(
            f"the tokenizer of {name} has {tokenizer.size:,} tokens, and the model {vocab:,} rows",
            fix=f"spmdtrain import DIR --set model.vocab={rows}, which adds rows (the mean of the "
            "others)",
        )
    begin = end = None
    with contextlib.suppress(DataError):  # a tokenizer need not name one
        tokenizer, end = end_of_text(tokenizer, "auto", name)
    with contextlib.suppress(DataError):
        tokenizer, begin = begin_of_text(tokenizer, "auto", name)
    template, fault = _usable_template(published.folder, tokenizer)
    remarks = (f"{name}: its chat template cannot be used: {fault}",) if fault else ()
    return Described(tokenizer.spec(), end, begin, template=template, remarks=remarks)


def _without_tokenizer(folder: Path) -> str:
    """Returns a line about a folder whose tokenizer is none that can be read."""
    others = [name for name in NAMES if (folder / name).is_file()]
    line = f"{folder} holds no {TOKENIZER}: the run has no tokenizer, and reads ids alone"
    return f"{line}; found {', '.join(others)}; try {CONVERTED}" if others else line


def _usable_template(
    folder: Path, tokenizer: Tokenizer
) -> tuple[dict[str, Any] | None, DataError | None]:
    """Returns the spec of the chat template in a folder, and why it cannot be used.

    The weights are of use without one, so that is no error here.
    """
    try:
        template = folder_template(folder, {})
    except DataError as error:
        return None, error
    if template is None:
        return None, None
    template = with_tokens(template, folder, tokenizer)
    return template.spec, fault_of(template)
