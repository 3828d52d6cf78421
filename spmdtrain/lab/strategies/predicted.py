"""Predicts the same strategies on a cluster that need not be present, as `estimate` does."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmdtrain.config import RunConfig
from spmdtrain.config.errors import UserError
from spmdtrain.lab.strategies.layouts import Cluster, laid_out, used_devices
from spmdtrain.planner.cost.hardware import Hardware, devices_per_host
from spmdtrain.planner.estimate import estimate, with_vocab
from spmdtrain.planner.offers.offers import Offer, tokens_of
from spmdtrain.planner.plan import Plan
from spmdtrain.planner.traffic import needed_traffic


@dataclass(frozen=True)
class PredictedStrategy:
    """A strategy on a cluster: its `offer` has no plan if it cannot run, and says why."""

    name: str
    offer: Offer

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a device has to send in a step, by mesh axis; of an offer with a plan."""
        assert self.offer.best is not None, "a strategy that can run"
        return needed_traffic(self.offer.best.workload)


def predict(
    config: RunConfig, names: Sequence[str], hardware: Hardware, devices: int
) -> list[PredictedStrategy]:
    """Returns the prediction for each strategy; days are those of `train.steps`."""
    config = with_vocab(config)
    cluster = Cluster(devices, devices_per_host(devices, hardware))
    tokens = tokens_of(config)
    found = []
    for name in names:
        count = used_devices(name, cluster)
        best, refusal = None, ""
        try:
            best = Plan(estimate(laid_out(name, config, cluster), count, hardware))
        except UserError as error:
            refusal = str(error)
        found.append(PredictedStrategy(name, Offer(hardware, count, tokens, None, best, refusal)))
    return found
