"""Records the number of tokens in each shard, once they have been made.

It is not a position: the index alone determines a sample. But with the ledger, which each
checkpoint includes, a resumed run need not tokenise everything before that sample again.
"""

import threading
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

MARK_TOKENS = 2**22  # tokens between two remembered places of a shard


class Ledger:
    """The numbers of tokens of shards that have been read whole, and places inside those last read.

    A place is (tokens, rows) before a document. Any thread may use it.
    """

    def __init__(self, shards: int):
        self._shards = shards
        self._totals: dict[int, int] = {}
        self._places: dict[int, list[tuple[int, int]]] = {}  # of the last two shards
        self._lock = threading.Lock()

    def total_of(self, shard: int) -> int | None:
        """Returns the number of tokens of a shard; None if it has not been read whole."""
        return self._totals.get(shard)

    @property
    def total(self) -> int | None:
        """The number of tokens of all shards; None until each has been read whole."""
        if len(self._totals) < self._shards:
            return None
        return sum(self._totals.values())

    def pass_by(self, shard: int, tokens: int, row: int) -> None:
        """Remembers that `tokens` tokens of a shard come before its row `row`."""
        with self._lock:
            if shard not in self._places:
                last = list(self._places)[-1:]
                self._places = {number: self._places[number] for number in last}
            places = self._places.setdefault(shard, [(0, 0)])
            if tokens >= places[-1][0] + MARK_TOKENS:
                places.append((tokens, row))

    def finish(self, shard: int, tokens: int) -> None:
        """Remembers the number of tokens of a whole shard."""
        with self._lock:
            self._totals[shard] = tokens

    def place_before(self, shard: int, tokens: int) -> tuple[int, int]:
        """Returns the last known place of a shard with at most `tokens` before it."""
        with self._lock:
            places = self._places.get(shard, [(0, 0)])
            return places[bisect_right(places, (tokens, 2**62)) - 1]

    def document(self) -> dict[str, Any]:
        """Returns the ledger as a JSON value."""
        with self._lock:
            return {
                "totals": [[shard, total] for shard, total in self._totals.items()],
                "places": [[shard, places] for shard, places in self._places.items()],
            }

    def recall(self, document: Mapping[str, Any]) -> None:
        """Adds what `document()` returned in an earlier run over the same shards."""
        with self._lock:
            self._totals |= {shard: total for shard, total in document["totals"]}
            for shard, places in document["places"]:
                self._places[shard] = [(tokens, row) for tokens, row in places]
