"""Schedule files, drawn: random legal tables in CSV, each named after all that decides it."""

import random
import re
from pathlib import Path

from random_schedules import waiting_table

from spmdtrain.pipeline.check import LETTERS
from spmdtrain.pipeline.schedule import Table

ROOM = "runs/fuzz"  # below the repository
NAME = re.compile(rf"{ROOM}/random-(\d+)-p(\d+)-v(\d+)-m(\d+)(-split)?\.csv")


def name(seed: int, stages: int, chunks: int, microbatches: int, split: bool) -> str:
    end = "-split" if split else ""
    return f"{ROOM}/random-{seed}-p{stages}-v{chunks}-m{microbatches}{end}.csv"


def write(schedule: str) -> None:
    """The file of that name; another word names a schedule that is built in, or none."""
    asked = NAME.fullmatch(schedule)
    path = Path(schedule)
    if not asked or path.exists():
        return
    seed, stages, chunks, microbatches = map(int, asked.groups()[:4])
    choose = random.Random(seed)
    table = waiting_table(stages, chunks, microbatches, bool(asked[5]), choose)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows(table)) + "\n")


def rows(table: Table) -> list[str]:
    """A row per tick, a cell per stage."""

    def cell(tick: int, stage: int) -> str:
        words = []
        for kind, letter in LETTERS.items():
            microbatch = getattr(table, f"{kind}_microbatch")[tick, stage]
            if microbatch >= 0:
                chunk = getattr(table, f"{kind}_chunk")[tick, stage]
                words.append(f"{letter}{microbatch}.{chunk}")
        return " ".join(words)

    return [
        ",".join(cell(tick, stage) for stage in range(table.stages)) for tick in range(table.ticks)
    ]
