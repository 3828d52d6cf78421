"""Computes the days and the cost of training to N tokens on each kind and number of GPUs.

Days count the steps and what is lost to saves and to failures (checkpoints/intervals.py), but not
the wait for machines or for repairs. Money is the price of a GPU hour times all GPU hours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.planner.cost.hardware import Hardware
from spmdtrain.planner.estimate import with_vocab
from spmdtrain.planner.plan import Plan, plan

SECONDS_A_DAY = 86400.0
# The error of a step time against published runs that no constant was fitted to: the largest mean
# of a table, and the worst row (benchmarks/planner/README.md, the column "blind").
ERROR = {"dense": (0.08, 0.21), "experts": (0.12, 0.30)}


@dataclass(frozen=True)
class Offer:
    """A number of GPUs of one kind, with the best layout on them; None if nothing fits, and why.

    `price` is that of a GPU hour in any currency; None if it is not known.
    """

    hardware: Hardware
    devices: int
    tokens: float
    price: float | None
    best: Plan | None
    refusal: str = ""

    @property
    def steps(self) -> int:
        """The number of steps that see this many tokens."""
        assert self.best is not None, "an offer on which the model fits"
        workload = self.best.workload
        return math.ceil(
            self.tokens / (workload.train.global_batch * workload.train.sequence_length)
        )

    @property
    def days(self) -> float:
        """The time of all steps, with what saves and failures lose."""
        assert self.best is not None, "an offer on which the model fits"
        lost = self.best.estimate.checkpoints.lost_share
        return self.steps * self.best.seconds / (1 - lost) / SECONDS_A_DAY

    @property
    def cost(self) -> float | None:
        """The price of all GPU hours; None if the price of one is not known."""
        return None if self.price is None else 24 * self.days * self.devices * self.price

    @property
    def error(self) -> tuple[float, float]:
        """The relative errors of published steps of such a model: their mean, and the worst."""
        assert self.best is not None, "an offer on which the model fits"
        return ERROR["experts" if self.best.workload.model.experts else "dense"]


def offers(
    config: RunConfig,
    kinds: Sequence[Hardware],
    counts: Sequence[int],
    tokens: float | None = None,
    prices: Mapping[str, float] | None = None,
) -> list[Offer]:
    """Returns an offer for each kind and count of GPUs: the cheapest first, or else the fastest.

    `tokens` default to those of `train.steps`. `prices` are those of a GPU hour by the name of its
    kind; if one is missing, the offers are sorted by days. Those on which nothing fits come last.
    """
    config = with_vocab(config)
    prices = prices or {}
    if tokens is None:
        tokens = tokens_of(config)
    offered = [
        _offer(config, kind, count, tokens, prices.get(kind.name))
        for kind in kinds
        for count in counts
    ]
    by_cost = all(offer.price is not None for offer in offered)

    def order(offer: Offer) -> tuple[bool, float]:
        if offer.best is None:
            return True, 0.0
        return False, (offer.cost or 0.0) if by_cost else offer.days

    return sorted(offered, key=order)


def tokens_of(config: RunConfig) -> float:
    """Returns the tokens of all steps of a run.

    Raises ConfigError if it counts epochs, whose number of steps depends on the data.
    """
    train = config.train
    if train.epochs is not None:
        raise ConfigError(
            f"train.epochs={train.epochs:g} says how many tokens only once the data are read",
            fix=f"--set train.steps={train.steps}",
        )
    return float(train.samples_before(train.steps) * train.sequence_length)


def _offer(
    config: RunConfig, kind: Hardware, count: int, tokens: float, price: float | None
) -> Offer:
    try:
        best = plan(config, count, kind)[0]
    except ConfigError as error:
        return Offer(kind, count, tokens, price, None, str(error))
    return Offer(kind, count, tokens, price, best)
