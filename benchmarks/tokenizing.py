"""What `data prepare` costs beside the package `tokenizers` alone: megabytes of text per second and
core.

Both tokenize the same documents, the sources of Python's own library as JSON lines, with the same
byte-level BPE, which is trained on them first. In turns: `encode_batch` of `tokenizers` on texts
that are in memory already, one thread; `encode_batch_fast`, which tracks no offsets and is what
`data prepare` calls; then `data prepare` from the file to finished token files, with one worker and
with several. Their tokens must be equal.

A core's time is what is compared: the processor time of a contender and of its processes, which
other programs hardly move. Starting a worker costs a second or so of it, once.

    python benchmarks/tokenizing.py [--rounds N] [--workers N] [--megabytes N] [--vocab N]
                                    [--json FILE]
"""

import argparse
import contextlib
import io
import json
import os
import resource
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # before anything imports tokenizers

import numpy as np
import tokenizers

from spmdtrain.data.prepare.prepare_corpus import Job, prepare
from spmdtrain.data.texts.documents import CHUNK_BYTES
from spmdtrain.data.token_files.tokens import open_tokens
from spmdtrain.data.tokenizers.train_tokenizer import train_tokenizer

ALONE = "encode_batch"


def sources(limit: int) -> list[str]:
    """Python's own sources, again and again up to `limit` bytes."""
    found: list[str] = []
    total = 0
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    while total < limit:
        for file in files:
            with contextlib.suppress(UnicodeDecodeError):
                text = file.read_text(encoding="utf-8")
                found.append(text)
                total += len(text.encode())
            if total >= limit:
                break
    return found


def encode_alone(encode_batch: Callable, texts: list[str]) -> np.ndarray:
    """The ids of all texts, by a method of a tokenizer alone; the end of text is not put in."""
    ids: list[np.ndarray] = []
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= CHUNK_BYTES or text is texts[-1]:
            encodings = encode_batch(batch, add_special_tokens=False)
            ids += [np.array(encoding.ids, np.int32) for encoding in encodings]
            batch = []
            size = 0
    return np.concatenate(ids)


def processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """(processor seconds, wall seconds) of a run, its processes included."""
    begun = processor_seconds()
    start = time.perf_counter()
    run()
    return processor_seconds() - begun, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=30)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), asked)
    print(json.dumps(result))
    if asked.json:
        Path(asked.json).write_text(json.dumps(result))
    return 0


def measure(folder: Path, asked: argparse.Namespace) -> dict:
    texts = sources(int(asked.megabytes * 1e6))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    lines = folder / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = folder / "bpe.json"
    train_tokenizer([str(lines)], str(path), asked.vocab)
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    outputs: list[Path] = []

    def prepared(workers: int) -> None:
        outputs.append(folder / f"out{len(outputs)}")
        job = Job(
            [str(lines)], str(outputs[-1]), tokenizer=str(path), end_of_text="none", workers=workers
        )
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            prepare(job)

    contenders: dict[str, Callable[[], object]] = {
        ALONE: lambda: encode_alone(tokenizer.encode_batch, texts),
        "encode_batch_fast": lambda: encode_alone(tokenizer.encode_batch_fast, texts),
        "prepare, 1 worker": lambda: prepared(1),
        f"prepare, {asked.workers} workers": lambda: prepared(asked.workers),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(asked.rounds):
        for name, run in contenders.items():
            times[name].append(timed(run))
    wanted = encode_alone(tokenizer.encode_batch, texts)
    for out in outputs:
        assert np.array_equal(open_tokens(out).tokens, wanted), (
            "the contenders made different tokens"
        )
    return report(times, megabytes)


def report(times: dict[str, list[tuple[float, float]]], megabytes: float) -> dict:
    """The figures for --json, printed as a table on the way."""
    per_core = {name: [megabytes / cpu for cpu, _ in each] for name, each in times.items()}
    on_wall = {
        name: megabytes / statistics.median(wall for _, wall in each)
        for name, each in times.items()
    }
    ratios = {
        name: statistics.median(
            ours / alone for ours, alone in zip(each, per_core[ALONE], strict=True)
        )
        for name, each in per_core.items()
    }
    print(f"{megabytes:.1f} MB of text, {len(times[ALONE])} rounds, medians")
    print(f"{'':20}{'MB/s and core':>15}{'beside alone':>14}{'MB/s':>8}")
    for name, each in per_core.items():
        print(f"{name:20}{statistics.median(each):15.2f}{ratios[name]:14.2f}{on_wall[name]:8.2f}")
    return {
        "megabytes": megabytes,
        "megabytes_per_core_second": {
            name: statistics.median(each) for name, each in per_core.items()
        },
        "megabytes_per_second": on_wall,
        "ratio": ratios,
    }


if __name__ == "__main__":
    sys.exit(main())
