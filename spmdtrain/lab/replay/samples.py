"""Finds the samples of a batch whose loss is far from that of the rest."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from spmdtrain.data.source import Data
from spmdtrain.data.tokenizers.tokenizer import from_spec
from spmdtrain.parallel.context.context_method import zigzag_order
from spmdtrain.train.batch import Batch
from spmdtrain.train.gradients.sums import number_of
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState
from spmdtrain.train.step import make_losses

MOST_GROUPS = 64  # groups of samples whose loss is computed separately
HEALTHY = 5 / 8  # of the samples: the best ones define what is typical, the rest may be bad
FAR = 4.0  # robust deviations above the typical loss
LEAST_SPREAD = 0.1  # nats by which samples of one text differ at least
SHOWN = 60  # characters of a sample


@dataclass(frozen=True)
class FarSamples:
    """The samples far above the rest, as (global index, loss of its group), worst first."""

    samples: Sequence[tuple[int, float]]
    typical: float


def far_samples(setup: Setup, state: TrainState, batch: Batch) -> FarSamples:
    """Returns the samples of a batch whose loss with these weights is far above that of the rest.

    A large batch is judged in `MOST_GROUPS` groups of neighbours.
    """
    losses = jax.jit(make_losses(setup))
    sample = np.asarray(batch["sample"])
    mask = np.asarray(batch["mask"])
    groups = np.array_split(np.sort(sample.ravel()), min(sample.size, MOST_GROUPS))
    group_losses = []
    for group in groups:
        mine = np.isin(sample, group)[..., None].astype(np.float32)
        alone = batch | {"mask": jax.device_put(mask * mine, batch["mask"].sharding)}
        sums = jax.device_get(losses(state.params, alone))
        count = float(number_of(sums))
        group_losses.append(float(sums["loss"]) / count if count else -np.inf)
    by_group = np.array(group_losses)
    best = np.sort(by_group[np.isfinite(by_group)])[: max(int(HEALTHY * len(by_group)), 2)]
    typical = float(np.median(best)) if best.size else 0.0
    spread = 1.4826 * float(np.median(np.abs(best - typical))) + LEAST_SPREAD if best.size else 1.0
    is_far = ~(by_group <= typical + FAR * spread) & (by_group != -np.inf)  # NaN is far, too
    worst = sorted(
        np.flatnonzero(is_far).tolist(), key=lambda at: -np.nan_to_num(by_group[at], nan=1e30)
    )
    return FarSamples([(int(i), float(by_group[at])) for at in worst for i in groups[at]], typical)


def text_of_samples(setup: Setup, data: Data, batch: Batch, samples: Sequence[int]) -> list[str]:
    """Returns the beginning of each of these samples, as text or, without a tokenizer, as ids."""
    tokens = np.asarray(batch["tokens"])
    tokens = tokens.reshape(-1, tokens.shape[-1])
    if setup.zigzag > 1:
        tokens = tokens[:, np.argsort(zigzag_order(tokens.shape[-1], setup.zigzag))]
    sample = np.asarray(batch["sample"]).ravel()
    decode = from_spec(data.tokenizer).decode if data.tokenizer else None
    texts = []
    for index in samples:
        ids = tokens[np.flatnonzero(sample == np.uint32(index))[0]].tolist()
        text = decode(ids[:SHOWN]) if decode else " ".join(map(str, ids))
        texts.append(ascii(text[:SHOWN]))
    return texts
