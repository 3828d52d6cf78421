"""Reads random windows of a token file with pread, as a run does, and from a mapped file.

    python benchmarks/reading.py

Side by side in one run, with the file in the page cache. It prints microseconds of a window, the
median of 9 rounds, and the ratio of pread to the mapped file.
"""

import mmap
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from spmdtrain.data.token_files.rows import StoredRow

TOKENS = 100_000_000
ROUNDS = 9
WINDOWS = 5000


def seconds(read: Callable[[int], np.ndarray], starts: list[int]) -> float:
    begin = time.perf_counter()
    for start in starts:
        read(start).astype(np.int32)
    return time.perf_counter() - begin


def main() -> None:
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        np.random.default_rng(0).integers(0, 50000, TOKENS).astype("<u2").tofile(file.name)
        row = StoredRow(file.name, np.dtype("<u2"), TOKENS)
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), "<u2")
        for length in (65, 1025, 8193):
            readers = {
                "pread": lambda start, length=length: row[start : start + length],
                "mapped": lambda start, length=length: mapped[start : start + length],
            }
            times: dict[str, list[float]] = {name: [] for name in readers}
            rng = np.random.default_rng(length)
            for _ in range(ROUNDS):
                starts = rng.integers(0, TOKENS - length, WINDOWS).tolist()
                for name, read in readers.items():
                    times[name].append(seconds(read, starts) / WINDOWS * 1e6)
            medians = {name: statistics.median(each) for name, each in times.items()}
            ratio = medians["pread"] / medians["mapped"]
            said = ", ".join(f"{name} {value:.2f} us" for name, value in medians.items())
            print(f"windows of {length} tokens: {said}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
