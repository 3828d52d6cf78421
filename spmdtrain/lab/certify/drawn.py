"""Draws random layouts, with a mesh, rules, a schedule and a microbatch that fit together.

The check is not complete: the trainer may still refuse a drawn layout in one line.
"""

import math
import random
from collections.abc import Mapping
from typing import get_args

from spmdtrain.config import RunConfig
from spmdtrain.config.schema import TrainConfig
from spmdtrain.config.schema.pipeline import PipelineSchedule
from spmdtrain.lab.certify.cover import AXES, COLLECTIVE, DEVICES, Layout, fitted
from spmdtrain.lab.certify.drawn_rules import draw_rules
from spmdtrain.parallel.axes import batch_shards

TRIES = 200
SIZES = (8,) * 6 + (4,) * 3 + (2, 6, 6, 3)  # devices of a layout
ONE_CHUNK = ("gpipe", "1f1b")
REMAT = get_args(TrainConfig.model_fields["remat"].annotation)
SCHEDULES = get_args(PipelineSchedule)


def draw_layouts(small: RunConfig, count: int, seed: int = 0) -> list[Layout]:
    """Returns `count` different layouts for a run, the same for the same seed.

    `small`: the shrunk run (shrink.py), on one device.
    """
    layouts: dict[tuple[str, ...], Layout] = {}
    number = 0
    while len(layouts) < count:
        drawn = random.Random(f"layout {seed} {number}")
        number += 1
        (layout,) = fitted([draw_layout(drawn, small)], small)
        layouts.setdefault(layout.settings, layout)
    return list(layouts.values())


def draw_layout(random: random.Random, small: RunConfig) -> Layout:
    """Returns a layout of at most 8 devices."""
    mesh = _draw_mesh(random, small)
    settings = [f"mesh.{axis}={size}" for axis, size in mesh.items() if size > 1]
    settings += _draw_turns(random, small, mesh)
    if random.random() < 0.4:
        settings.append("train.zero=1")
    if mesh["tensor"] > 1 and random.random() < 0.3 and not small.rules.activations:
        settings += COLLECTIVE
    elif random.random() < 0.5:
        rules = draw_rules(random, small, mesh, unchecked=False)
        settings += [f"{key}={','.join(axes)}" for key, axes in rules.items()]
    return Layout(tuple(settings), "drawn")


def _draw_mesh(random: random.Random, small: RunConfig) -> dict[str, int]:
    """Returns the sizes of all axes; they divide the batch and the sequence."""
    train = small.train
    for _ in range(TRIES):
        mesh = dict.fromkeys(AXES, 1)
        devices = random.choice(SIZES)
        for prime in (2, 2, 2, 3):
            if devices % prime == 0:
                mesh[random.choice(AXES)] *= prime
                devices //= prime
        shards = batch_shards(mesh)
        divides = train.global_batch % shards == 0
        divides &= train.sequence_length % (mesh["context"] * mesh["tensor"]) == 0
        if divides and 1 < math.prod(mesh.values()) <= DEVICES:
            return mesh
    return dict.fromkeys(AXES, 1) | {"data": 2}


def _draw_turns(random: random.Random, small: RunConfig, mesh: Mapping[str, int]) -> list[str]:
    """Returns microbatch, remat, schedule and chunks, which have to be drawn together."""
    here = small.train.global_batch // batch_shards(mesh)
    stages = mesh["pipeline"]
    microbatch = random.choice([size for size in range(1, here + 1) if here % size == 0])
    settings = [f"train.microbatch={microbatch}"]
    remat = random.choice(REMAT)
    if stages > 1:
        turns = here // microbatch
        even = turns % stages == 0
        schedule = random.choice([name for name in SCHEDULES if even or name in ONE_CHUNK])
        chunks = 1 if schedule in ONE_CHUNK else random.choice((1, 2))
        settings += [f"pipeline.schedule={schedule}", f"pipeline.chunks={chunks}"]
        remat = "full" if remat == "offload" else remat  # stages keep their inputs on the device
        remat = "none" if schedule == "zero_bubble" else remat
    return [*settings, f"train.remat={remat}"]
