"""Turn text files into a token file: `spmdtrain data prepare`."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spmdtrain.data.corpus import find_files, read_text
from spmdtrain.data.tokenizer import open_tokenizer
from spmdtrain.data.tokens import write_tokens

LINES = 10  # progress lines when nobody watches a terminal


def prepare(paths: list[str], out: str, tokenizer: str) -> None:
    """Write files or globs, a document per file, as `out`.bin, .idx and .json.

    Progress goes to standard error, and what was written to standard output. One file's text and
    ids are in memory at a time. (The tokenizer `characters` reads all files twice: first for its
    alphabet.)

    Raises DataError where a file cannot be read, or `out` is there already, and StorageError where
    it cannot be written.
    """
    files = find_files(paths)
    encoder = open_tokenizer(tokenizer, (read_text(file) for file in files))
    sizes = [os.path.getsize(file) for file in files]
    with _progress(sum(sizes)) as advance:
        left = iter(sizes)

        def document_written(_, tokens: int):
            # It is called once for each document, in the order of the files.
            advance(next(left), tokens)

        done = write_tokens(out, (read_text(file) for file in files), encoder, document_written)
    documents = "1 document" if done.documents == 1 else f"{done.documents:,} documents"
    print(
        f"{done.path}: {done.tokens:,} tokens ({done.dtype}) in {documents}, "
        f"vocabulary {done.vocab:,}, tokenizer {tokenizer}"
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, int], None]]:
    """Yield `advance(bytes just read, tokens so far)`.

    It moves a bar on a terminal, and else prints about ten plain lines.
    """
    if not sys.stderr.isatty():
        yield _plain_lines(total)
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
        yield lambda size, tokens: bar.update(task, advance=size, tokens=tokens)


def _plain_lines(total: int) -> Callable[[int, int], None]:
    read = 0  # bytes
    printed = 0  # tenths

    def advance(size: int, tokens: int):
        nonlocal read, printed
        read += size
        if read * LINES // max(total, 1) > printed:
            printed = read * LINES // total
            line = f"{100 * read // total}% of {total:,} bytes, {tokens:,} tokens"
            print(line, file=sys.stderr, flush=True)

    return advance
