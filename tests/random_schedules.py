"""Legal schedules at random, in which activations, cotangents and weight gradients wait."""

import random
from itertools import product

import numpy as np

from spmdtrain.pipeline.schedule import Table, assign_slots


def some_waiting_table(seed: int) -> Table:
    """One of them, of two or four stages, in which something does wait."""
    choose = random.Random(seed)
    while True:
        table = waiting_table((2, 4)[seed % 2], choose.randint(1, 2), 4, seed % 4 < 2, choose)
        if (
            table.activations_wait
            and table.cotangent_slots
            and (table.deferred_slots or not table.split)
        ):
            return table


def waiting_table(
    stages: int, chunks: int, microbatches: int, split: bool, choose: random.Random
) -> Table:
    """Each tick every stage runs some of the units that are ready, or none."""
    kinds = ("forward", "backward", "weight") if split else ("forward", "backward")
    ran = {kind: {} for kind in kinds}
    rows = {kind: [] for kind in ("forward", "backward", "weight")}

    def ready(kind, stage, microbatch, chunk, tick):
        if kind == "weight":
            return ran["backward"].get((stage, microbatch, chunk), tick + 1) <= tick
        if kind == "forward" and (stage, chunk) == (0, 0):
            return True
        if kind == "backward" and (stage, chunk) == (stages - 1, chunks - 1):
            return ran["forward"].get((stage, microbatch, chunk), tick + 1) <= tick
        step = -1 if kind == "forward" else 1
        source = divmod(chunk * stages + stage + step, stages)
        return ran[kind].get((source[1], microbatch, source[0]), tick) < tick

    while any(len(ran[kind]) < stages * chunks * microbatches for kind in kinds):
        tick = len(rows["forward"])
        row = {kind: [(-1, -1)] * stages for kind in rows}
        for kind, stage in product(kinds, range(stages)):
            units = [
                (microbatch, chunk)
                for microbatch, chunk in product(range(microbatches), range(chunks))
                if (stage, microbatch, chunk) not in ran[kind]
                and ready(kind, stage, microbatch, chunk, tick)
            ]
            if units and choose.random() < 0.7:
                row[kind][stage] = choose.choice(units)
                ran[kind][stage, *row[kind][stage]] = tick
        if any(unit != (-1, -1) for cells in row.values() for unit in cells):
            for kind in rows:
                rows[kind].append(row[kind])
    units = (np.array(rows[kind], np.int32) for kind in rows)
    return assign_slots("random", microbatches, chunks, *units)
