"""Turns documents into token files: `spmdtrain data prepare`."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.data.chats.conversation import ChatFields
from spmdtrain.data.chats.faults import faults, markers_of_text
from spmdtrain.data.chats.jinja_template import JinjaText
from spmdtrain.data.chats.simple_template import SimpleTemplate, with_markers
from spmdtrain.data.chats.template_folder import template_from_spec, with_tokens
from spmdtrain.data.chats.tool_calls import PARSE_ARGUMENTS
from spmdtrain.data.prepare.chats import choose_template, texts_of_chats
from spmdtrain.data.prepare.encode import Recipe, encode_all
from spmdtrain.data.prepare.file_progress import heartbeat, plain_lines
from spmdtrain.data.prepare.notes import COUNTED, lines_of_notes
from spmdtrain.data.prepare.token_shards import Output, Position
from spmdtrain.data.prepare.token_writer import Summary, TokenWriter, share_tokenizer
from spmdtrain.data.texts.documents import (
    Chunk,
    find_inputs,
    format_of,
    lines_of_separator,
    read_chunks,
    texts_in,
)
from spmdtrain.data.token_files.tokens import open_tokens
from spmdtrain.data.tokenizers.text_ends import begin_of_text, end_of_text
from spmdtrain.data.tokenizers.tokenizer import (
    Tokenizer,
    from_spec,
    open_tokenizer,
    tokenizer_fingerprint,
)

SHOWN = 40  # tokens of the first document to print


@dataclass(frozen=True)
class Job:
    """A request to turn files into token files."""

    paths: Sequence[str]  # files, globs, folders of datasets
    out: str  # OUT.bin, or OUT-00000.bin etc.
    tokenizer: str = "bytes"
    end_of_text: str = "auto"  # or "none", or a token
    begin_of_text: str = "auto"  # likewise
    field: str | None = None  # in tables and JSON lines; default: text, or messages
    split_on: str | None = None  # what separates the documents of a text file
    chat: bool = False  # documents are conversations; only answers have loss
    template: str | None = None  # of {role} and {content}; None: the tokenizer's, or ChatML
    chat_template: str | None = None  # a file with a Jinja template instead
    variables: Sequence[str] = ()  # variables of a Jinja template: NAME=VALUE
    last_answer_only: bool = False  # of each conversation
    pairs: bool = False  # conversations come in pairs: with the chosen answer, with the rejected
    parse_special: bool = False  # special tokens spelled in a text are tokens
    parse_arguments: bool = False  # arguments of tool calls that are texts are read as JSON
    workers: int = 1
    shard_tokens: int | None = None  # a shard ends with the document that reaches this

    @property
    def fields(self) -> str | ChatFields:
        return ChatFields(self.field, self.pairs) if self.chat else self.field or "text"


def prepare(job: Job) -> None:
    """Writes token files from the documents that `job` names.

    Progress goes to standard error, the summary to standard output. (The tokenizer `characters`
    reads all files twice: first to find its alphabet.)

    Raises DataError if a file cannot be read, or if the output exists and belongs to another job,
    and StorageError if it cannot be written.
    """
    files = find_inputs(job.paths)
    recipe, origin = _recipe(job, files)
    tokenizer = from_spec(recipe.tokenizer)
    marker_faults = _warn_of_template(recipe, tokenizer)

    @cache
    def shared_spec() -> dict | None:
        if not job.shard_tokens:
            return None
        return share_tokenizer(job.out.removesuffix(".bin"), tokenizer)

    def make_writer(path: str) -> TokenWriter:  # called once the path is known to be free
        return TokenWriter(
            path,
            tokenizer,
            recipe.end_of_text,
            job.chat,
            shared_spec(),
            recipe.template,
            job.pairs,
            begin_of_text=recipe.begin_of_text,
        )

    identity = _identity(job, recipe, files)
    with Output(job.out, job.shard_tokens, identity, make_writer) as output:
        if not output.is_finished:
            _write(output, files, job, recipe)
    print(_report(job, output.summaries, tokenizer, recipe, origin, marker_faults))


def _recipe(job: Job, files: list[str]) -> tuple[Recipe, str]:
    """Returns the recipe that turns documents into tokens, and the origin of the template."""
    fields = job.fields
    if not isinstance(fields, ChatFields):
        tokenizer = open_tokenizer(job.tokenizer, texts_in(files, fields, job.split_on))
        tokenizer, end = end_of_text(tokenizer, job.end_of_text, job.tokenizer)
        tokenizer, begin = begin_of_text(tokenizer, job.begin_of_text, job.tokenizer)
        recipe = Recipe(tokenizer.spec(), end, fields, None, job.parse_special)
        return replace(recipe, begin_of_text=begin), ""
    if any(format_of(file) == "text" for file in files):
        raise DataError("--chat reads JSON lines and tables; a text file holds no messages")
    named = (job.template, job.chat_template, job.tokenizer, job.variables)
    template, origin, folder = choose_template(*named)
    texts = chain(texts_of_chats(files, fields), [template.letters])
    tokenizer = open_tokenizer(job.tokenizer, texts)
    begin = end = None
    # A published template writes every special token itself.
    if isinstance(template, SimpleTemplate) or job.end_of_text != "auto":
        tokenizer, end = end_of_text(tokenizer, job.end_of_text, job.tokenizer)
    if isinstance(template, SimpleTemplate) or job.begin_of_text != "auto":
        tokenizer, begin = begin_of_text(tokenizer, job.begin_of_text, job.tokenizer)
    if isinstance(template, SimpleTemplate):
        if job.parse_arguments:
            raise ConfigError(
                f"{PARSE_ARGUMENTS} is for Jinja templates", fix="--chat-template FILE"
            )
        tokenizer = with_markers(tokenizer, template)
    elif folder:
        template = with_tokens(template, folder, tokenizer)
    if isinstance(template, JinjaText):
        template = template._replace(parses_arguments=job.parse_arguments)
    recipe = Recipe(tokenizer.spec(), end, fields, template.spec, job.parse_special)
    today = date.today().isoformat()
    recipe = replace(recipe, last_answer_only=job.last_answer_only, today=today)
    return replace(recipe, begin_of_text=begin), origin


def _warn_of_template(recipe: Recipe, tokenizer: Tokenizer) -> bool:
    """Prints warnings about the template. Returns whether the tokenizer lacks a marker of it."""
    if recipe.template is None:
        return False
    with closing(template_from_spec(recipe.template, recipe.today)) as template:
        for line in faults(template, tokenizer):
            print(line, file=sys.stderr)
        return bool(markers_of_text(template, tokenizer))


def _write(output: Output, files: list[str], job: Job, recipe: Recipe) -> None:
    """Writes the documents that are not in the output yet."""
    number_of = {file: number for number, file in enumerate(files)}
    with _progress([os.path.getsize(file) for file in files]) as advance:
        chunks = _chunks(files, job, output.position)
        for chunk, encoded in encode_all(recipe, chunks, job.workers):
            file = number_of[chunk.path]
            output.write(encoded, (file, chunk.first))
            advance(file, chunk.read, output.tokens)
        output.finish()


def _chunks(files: list[str], job: Job, position: Position) -> Iterator[Chunk]:
    first, row = position
    for number in range(first, len(files)):
        skip = row if number == first else 0
        yield from read_chunks(files[number], job.fields, job.split_on, skip)


def _identity(job: Job, recipe: Recipe, files: list[str]) -> dict[str, Any]:
    """Returns the values that must equal those of an interrupted job in order to continue it."""
    stats = [os.stat(file) for file in files]
    described = asdict(replace(job, workers=1))
    for name in (
        *("workers", "out", "paths", "tokenizer", "chat_template", "variables"),
        *("begin_of_text", "parse_arguments"),
    ):
        del described[name]
    return (
        described
        | {
            "files": [
                [file, stat.st_size, int(stat.st_mtime)]
                for file, stat in zip(files, stats, strict=True)
            ],
            "tokenizer": tokenizer_fingerprint(recipe.tokenizer),
            "end_of_text": recipe.end_of_text,
            "template": recipe.template,
        }
        | ({"date": recipe.today} if _writes_date(recipe) else {})
        | ({"begin_of_text": recipe.begin_of_text} if recipe.begin_of_text is not None else {})
    )


def _writes_date(recipe: Recipe) -> bool:
    """Returns True if tokens may depend on the day on which they are made."""
    return isinstance(recipe.template, dict) and "strftime_now" in json.dumps(recipe.template)


# --- messages -----------------------------------------------------------------------------------


def _report(
    job: Job,
    summaries: list[Summary],
    tokenizer: Tokenizer,
    recipe: Recipe,
    origin: str,
    marker_faults: bool,
) -> str:
    """Returns the lines that summarise the output."""
    first = summaries[0]
    name = first.path
    if len(summaries) > 1:
        name = f"{first.path} to {Path(summaries[-1].path).name}"
    tokens = sum(summary.tokens for summary in summaries)
    count = sum(summary.documents for summary in summaries)
    size = sum(summary.text_bytes for summary in summaries)
    documents = "1 document" if count == 1 else f"{count:,} documents"
    begin, end = recipe.begin_of_text, recipe.end_of_text
    ending = "nothing ends a document" if end is None else f"token {end} ends each document"
    if begin is not None:
        ending = f"token {begin} begins each document; {ending}"
    source = open_tokens(first.path)
    lines = _lines_of_specials(summaries, job, marker_faults)
    if job.chat:
        lines.insert(0, f"{_learned(summaries, tokens)}; template {origin!r:.80}")
    starts = source.document_starts
    stop = min(SHOWN, starts[1] if len(starts) > 1 else len(source.row))
    sample = tokenizer.decode(source.row[:stop])
    return "\n".join(
        [
            f"{name}: {tokens:,} tokens ({first.dtype}) in {documents}, "
            f"vocabulary {first.vocab:,}, tokenizer {job.tokenizer}",
            f"{tokens / max(size, 1):.3f} tokens per byte of text; {ending}",
            *lines_of_separator(find_inputs(job.paths), job.split_on),
            *lines,
            f"the first {stop} tokens: {sample!r}",
        ]
    )


def _learned(summaries: list[Summary], tokens: int) -> str:
    """Returns a line on the share of tokens that count in the loss; older journals lack it."""
    counts = [summary.learned for summary in summaries]
    if None in counts:
        return "the messages of the assistant are learned"
    learned = sum(count for count in counts if count is not None)
    return (
        f"{learned:,} of {tokens:,} tokens are learned ({100 * learned / tokens:.0f} %), "
        "those of the assistant's messages"
    )


def _lines_of_specials(summaries: list[Summary], job: Job, marker_faults: bool) -> list[str]:
    """Returns lines about documents that spell out special tokens or markers."""
    lines = []
    what = "a special token; kept as text (--parse-special reads it as the token)"
    if job.parse_special:
        what = "a special token; read as that token"
    elif marker_faults:
        what = "a marker of the template, which this tokenizer cannot tell from the template's own"
    spelling = sum(summary.spelling for summary in summaries)
    if spelling:
        documents = "1 document spells" if spelling == 1 else f"{spelling:,} documents spell"
        lines.append(f"{documents} {what}")
    holding = sum(summary.holding_end for summary in summaries)
    if holding:
        documents = "1 document holds" if holding == 1 else f"{holding:,} documents hold"
        lines.append(f"{documents} the token that ends one before the end")
    counts = {name: sum(getattr(summary, name) for summary in summaries) for name in COUNTED}
    return lines + lines_of_notes(counts, job.pairs)


@contextmanager
def _progress(sizes: list[int]) -> Iterator[Callable[[int, int, int], None]]:
    """Yields `advance(index of the file, bytes read from it, tokens so far)`.

    `sizes` are the files' sizes in bytes. On a terminal `advance` moves a bar; otherwise it prints
    about ten plain lines, plus more if a document takes long.
    """
    total = sum(sizes)
    before = np.cumsum([0, *sizes]).tolist()
    if not sys.stderr.isatty():
        say = plain_lines(total)
        done = [0, 0]  # bytes, tokens

        def advance(file: int, read: int, tokens: int) -> None:
            done[:] = before[file] + read, tokens
            say(done[0], f", {tokens:,} tokens")

        with heartbeat(lambda: f"{done[0]:,} of {total:,} bytes, {done[1]:,} tokens"):
            yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prepare", total=total, tokens=0)
        yield lambda file, read, tokens: bar.update(
            task, completed=before[file] + read, tokens=tokens
        )
