"""Predicts the strategies on a cluster that need not be present, as `estimate` does."""

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
    """A strategy on a cluster. If it cannot run, `offer` has no plan, and says why."""

    name: str
    offer: Offer

    @property
    def sent(self) -> dict[str, float]:
        """The bytes that a device has to send in a step, by mesh axis. Needs a plan."""
        assert self.offer.best is not None, "a strategy that can run"
        return needed_traffic(self.offer.best.workload)


def predict(
    config: RunConfig, names: Sequence[str], hardware: Hardware, devices: int
) -> list[PredictedStrategy]:
    """Returns a prediction for each strategy, with the days that `train.steps` steps take."""
    config = with_vocab(config)
    cluster = Cluster(devices, devices_per_host(devices, hardware))
    tokens = tokens_of(config)
    predictions = []
    for name in names:
        count = used_devices(name, cluster)
        best, refusal = None, ""
        try:
            best = Plan(estimate(laid_out(name, config, cluster), count, hardware))
        except UserError as error:
            refusal = str(error)
        predictions.append(
            PredictedStrategy(name, Offer(hardware, count, tokens, None, best, refusal))
        )
    return predictions
