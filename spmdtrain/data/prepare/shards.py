"""The token files of one prepare, and how a prepare that was killed goes on.

A *shard* is one token file of several: OUT-00000.bin, OUT-00001.bin and so on. A shard ends with
the document that reaches its number of tokens, so that shards come out the same however many
processes make them.

The *journal*, OUT.prepare.json, says which shards are finished, which row comes next, and what the
job is. It stays when all is finished, and says so.
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
from spmdtrain.data.prepare.encode import Encoded
from spmdtrain.data.prepare.token_writer import Summary, TokenWriter, refuse_existing, writing
from spmdtrain.data.token_files.tokens import open_tokens, token_paths

VERSION = 1  # of the journal

Position = tuple[int, int]  # (number of a file, number of the row in it that is next)


class Output:
    """The token files of a job: those that are finished, and the one in the making.

    `position` is that of the first input row that is in no finished file. Use it in a `with`, which
    discards the unfinished file.
    """

    def __init__(
        self,
        out: str,
        shard_tokens: int | None,
        job: dict[str, Any],
        make_writer: Callable[[str], TokenWriter],
    ):
        """Take over the finished shards of the same job.

        `shard_tokens` of None makes a single file, which is always begun anew. `job` is a JSON
        value. Raises DataError where something else lies at `out`.
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
        self._may_replace = ""  # the file that a killed process may have put here last
        if shard_tokens and os.path.exists(self._journal):
            self._go_on()
            self._may_replace = self._path()
        else:
            refuse_existing(self._path())

    @property
    def tokens(self) -> int:
        """The tokens that were written so far."""
        done = sum(summary.tokens for summary in self.summaries)
        return done + (self._writer.tokens if self._writer else 0)

    @property
    def learned(self) -> int | None:
        """The tokens that count in the loss so far; None where all do, or nobody knows."""
        counts = [summary.learned for summary in self.summaries]
        if self._writer:
            counts.append(self._writer.learned)
        return None if None in counts else sum(count or 0 for count in counts)

    def write(self, encoded: Encoded, position: Position) -> None:
        """Write documents, of the rows from `position` on, and finish each shard that is full."""
        file, row = position
        while len(encoded.lengths):
            if self._writer is None:
                path = self._path()
                if path != self._may_replace:  # also a later shard may lie there already
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
        """Finish the last shard. Raises DataError where there is not a single token."""
        if not self.tokens:
            raise DataError("the corpus is empty: no tokens to write")
        if self.learned == 0:
            raise DataError(
                "no token counts in the loss: no message that is learned has the role 'assistant'"
            )
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
        """Return the name of the next token file."""
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
        """Write the journal, whole or not at all."""
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

    def _go_on(self) -> None:
        """Take over what the journal says is finished."""
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
                f"{self._journal} is no journal that this program can go on from",
                fix="another --out, or remove it and its shards",
            )
        changed = [name for name, value in self._job.items() if job.get(name) != value]
        if changed:
            raise DataError(
                f"{self._out} was begun with other {' and '.join(changed)}",
                fix=f"another --out, or remove {self._journal} and its shards",
            )
        for summary in self.summaries:
            open_tokens(summary.path)  # a shard that has gone is refused here
        self._remove_partials()
        if self.is_finished:
            print(f"{self._out} is finished already", file=sys.stderr)
        else:
            print(f"going on behind {self.summaries[-1].path}", file=sys.stderr)

    def _remove_partials(self) -> None:
        """Remove what a killed process has left half written."""
        stem = token_paths(self._path())[0].stem
        for partial in self._journal.parent.glob(f".{stem}.*.partial"):
            partial.unlink(missing_ok=True)
