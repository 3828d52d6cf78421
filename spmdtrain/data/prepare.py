"""`spmdtrain data prepare`: text files into a token file."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spmdtrain.data.corpus import find_files, read_text
from spmdtrain.data.tokenizer import open_tokenizer
from spmdtrain.data.tokens import write_tokens

LINES = 10  # progress lines when nobody watches a terminal


def prepare(paths: list[str], out: str, tokenizer: str) -> None:
    """Files or globs, one document per file, into `out`.bin, .idx and .json; progress goes to standard error.

    Only one file's text and ids are in memory at a time (`characters` reads all files twice: first for the alphabet).
    """
    files = find_files(paths)
    encoder = open_tokenizer(tokenizer, (read_text(file) for file in files))
    with _progress(sum(os.path.getsize(file) for file in files)) as advance:
        # A progress call follows each document, in the order of the files.
        sizes = iter([os.path.getsize(file) for file in files])
        done = write_tokens(
            out, (read_text(file) for file in files), encoder, lambda _, tokens: advance(next(sizes), tokens)
        )
    print(
        f"{done.path}: {done.tokens:,} tokens ({done.dtype}) in "
        f"{done.documents:,} document{'s' * (done.documents > 1)}, "
        f"vocabulary {done.vocab:,}, tokenizer {tokenizer}"
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, int], None]]:
    """Gives `advance(bytes read, tokens so far)`: a bar on a terminal, else about ten plain lines."""
    if not sys.stderr.isatty():
        yield _plain_lines(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(), TextColumn("{task.fields[tokens]:,} tokens"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prepare", total=total, tokens=0)
        yield lambda size, tokens: bar.update(task, advance=size, tokens=tokens)


def _plain_lines(total: int) -> Callable[[int, int], None]:
    read, printed = 0, 0

    def advance(size: int, tokens: int):
        nonlocal read, printed
        read += size
        if read * LINES // max(total, 1) > printed:
            printed = read * LINES // total
            print(f"{100 * read // total}% of {total:,} bytes, {tokens:,} tokens", file=sys.stderr, flush=True)

    return advance
