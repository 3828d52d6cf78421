"""Manages the token files of one `data prepare`, and continues one that was killed.

A *shard* is one of several token files: OUT-00000.bin, OUT-00001.bin and so on. A shard ends with
the document that reaches its number of tokens, so shards are the same for any number of processes.

The *journal*, OUT.prepare.json, records the finished shards, the next row, and the settings of the
job. It stays, marked as finished, when the job is done.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.config.named_file import read_named
from spmdtrain.config.writing import writing
from spmdtrain.data.prepare.encode import Encoded
from spmdtrain.data.prepare.token_writer import Summary, TokenWriter, refuse_existing
from spmdtrain.data.token_files.tokens import open_tokens, token_paths

VERSION = 1  # of the journal

Position = tuple[int, int]  # (index of a file, index of the next row in it)


class Output:
    """The token files of a job: the finished ones, and the one being written.

    `position` is that of the first input row not in a finished file. Use it in a `with`, which
    discards the unfinished file.
    """

    def __init__(
        self,
        out: str,
        shard_tokens: int | None,
        job: dict[str, Any],
        make_writer: Callable[[str], TokenWriter],
    ):
        """Takes over the finished shards of the same job.

        With `shard_tokens` None there is a single file, always started from scratch. `job` is a
        JSON value. Raises DataError if anything else exists at `out`.
        """
        self._out = out.removesuffix(".bin")
        self._shard_tokens = shard_tokens
        self._job = job
        self._make_writer = make_writer
        self._writer: TokenWriter | None = None
        self.position: Position = (0, 0)
        self.summaries: list[Summary] = []
        self.is_finished = False
        path = Path(os.path.expanduser(self._out))
        self._journal = path.parent / f"{path.name}.prepare.json"
        self._may_replace = ""  # the last file that a killed process may have put here
        if shard_tokens and os.path.exists(self._journal):
            self._resume()
            self._may_replace = self._path()
        else:
            refuse_existing(self._path())

    @property
    def tokens(self) -> int:
        """The number of tokens written so far."""
        done = sum(summary.tokens for summary in self.summaries)
        return done + (self._writer.tokens if self._writer else 0)

    def write(self, encoded: Encoded, position: Position) -> None:
        """Writes the documents of the rows from `position` on, and finishes each full shard."""
        file, row = position
        while len(encoded.lengths):
            if self._writer is None:
                path = self._path()
                if path != self._may_replace:  # a later shard may exist already, too
                    refuse_existing(path)
                self._writer = self._make_writer(path)
            count = len(encoded.lengths)
            if self._shard_tokens:
                room = self._shard_tokens - self._writer.tokens
                reached = np.searchsorted(np.cumsum(encoded.lengths), room)
                count = min(count, int(reached) + 1)
            part, encoded = encoded.cut(count)
            self._writer.write(part)
            row += count
            if self._shard_tokens and self._writer.tokens >= self._shard_tokens:
                self._end_shard((file, row))

    def finish(self) -> None:
        """Finishes the last shard. Raises DataError if there are no tokens at all."""
        if not self.tokens:
            raise DataError("the corpus is empty: no tokens to write")
        self.is_finished = True
        if self._writer and self._writer.tokens:
            self._end_shard(self.position)
        else:
            self._record()

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_) -> None:
        self._leave_writer()

    def _path(self) -> str:
        """Returns the name of the next token file."""
        if self._shard_tokens:
            return f"{self._out}-{len(self.summaries):05}.bin"
        return self._out + ".bin"

    def _end_shard(self, position: Position) -> None:
        assert self._writer is not None, "a shard that ends was begun"
        self.summaries.append(self._writer.finish())
        self.position = position
        self._leave_writer()
        self._record()

    def _leave_writer(self) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None

    def _record(self) -> None:
        """Writes the journal atomically."""
        if not self._shard_tokens:
            return
        content = {
            "version": VERSION,
            "finished": self.is_finished,
            "position": self.position,
            "shards": [asdict(summary) for summary in self.summaries],
            "job": self._job,
        }
        with writing(self._journal):
            spare = self._journal.with_name(f".{self._journal.name}.partial")
            spare.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            spare.replace(self._journal)

    def _resume(self) -> None:
        """Takes over the shards that the journal lists as finished."""
        job: dict[str, Any] = {}
        try:
            content = json.loads(read_named(self._journal))
            is_ours = content["version"] == VERSION
            job = dict(content["job"])
            self.position = tuple(content["position"])
            self.summaries = [Summary(**summary) for summary in content["shards"]]
            self.is_finished = content["finished"]
        except (ValueError, KeyError, TypeError, OSError, RecursionError):
            is_ours = False
        if not is_ours:
            raise DataError(
                f"{self._journal} is not a journal that this program can continue",
                fix="another --out, or remove it and its shards",
            )
        changed = [name for name, value in self._job.items() if job.get(name) != value]
        if changed:
            raise DataError(
                f"{self._out} was started with different {' and '.join(changed)}",
                fix=f"another --out, or remove {self._journal} and its shards",
            )
        for summary in self.summaries:
            open_tokens(summary.path)  # a missing shard is refused here
        self._remove_partials()
        if self.is_finished:
            print(f"{self._out} is finished already", file=sys.stderr)
        else:
            print(f"continuing after {self.summaries[-1].path}", file=sys.stderr)

    def _remove_partials(self) -> None:
        """Removes half-written files of a killed process."""
        stem = token_paths(self._path())[0].stem
        for partial in self._journal.parent.glob(f".{stem}.*.partial"):
            partial.unlink(missing_ok=True)
