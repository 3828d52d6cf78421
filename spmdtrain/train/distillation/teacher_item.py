"""Keeps the weights of the teacher of [distill] with the state: no step changes them.

They rest like the weights of a run of the teacher, by dotted path of its own parameters. A
checkpoint leaves them out, since they are on disk already: a state gets them from the teacher in
`Setup.own` (fresh.py), and never from its own weights.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from spmdtrain.train.distillation.run_teacher import NAME
from spmdtrain.train.items.item import Item, Start, Taken

Weights = dict[str, jax.Array]  # by dotted path of the teacher's parameters


def _begin(start: Start) -> None:
    """Returns no initial value: `shard` adds the shapes, and `fresh` the weights."""
    del start


def _rests(start: Start, weights: Any) -> dict[str, P]:
    del start
    return {path: x.sharding.spec for path, x in weights.items()}


def _update(weights: Weights, taken: Taken) -> Weights:
    del taken
    return weights


ITEM = Item(NAME, begin=_begin, rests=_rests, update=_update, when_skipped="update", is_saved=False)
