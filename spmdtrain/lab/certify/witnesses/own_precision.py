"""Compares the gradients of a run in its own precision with those in float32, leaf by leaf.

Layouts that agree with each other prove nothing about their precision: a sum that loses half of its
terms in bfloat16 loses them in every layout. So the narrow run is compared with a wide one that has
the same weights and the same batch.

Narrow formats fail where many numbers are added. The batch is made to show that: three tokens in
four are the same one, and a device has thousands of them in one microbatch.
"""

from dataclasses import dataclass

import jax
import numpy as np

from spmdtrain.config.schema import PrecisionConfig, RunConfig
from spmdtrain.lab.certify.compare import GRADIENT, norm, rounding_of
from spmdtrain.lab.certify.cover import Layout
from spmdtrain.lab.certify.noise import rounded_otherwise
from spmdtrain.lab.certify.stepper import HostBatch, Own, Stepper
from spmdtrain.lab.certify.witnesses.resume import with_settings
from spmdtrain.lab.certify.witnesses.witness import Witness
from spmdtrain.parallel.axes import batch_shards
from spmdtrain.train.compared.in_order import WEIGHT, Leaf, Plain

# How far a gradient may be from the one in float32, relative to its size. Measured: at most 0.8 %
# in 16 bits where no expert is chosen otherwise, and 7.2 % in 8 bits.
BOUND_16_BITS, BOUND_8_BITS = 0.02, 0.15
# A leaf may be moved further by what rounding its weights does: twice as far as the larger of
# `SIBLINGS` such roundings. Measured: 0.8 times.
MARGIN = 2.0
SIBLINGS = (1, 2)
TOKENS = 8192  # of a device, in one microbatch
COMMON = 1  # the token that takes the place of others
ONE_IN = 4  # tokens that stay what they are
# The scale of the loss in float16. A run that begins higher overflows, and halves it by itself.
LOSS_SCALE = 256


@dataclass(frozen=True)
class NarrowLeaf:
    """The gradient of one weight in a narrow precision.

    `off` is its distance from the gradient in float32, and `moved` how far rounding the weights
    moves that gradient; both are relative to its norm. Up to `bound` any distance is accepted.
    """

    path: str
    off: float
    moved: float
    bound: float

    @property
    def limit(self) -> float:
        """The largest distance that counts as rounding."""
        return max(self.bound, MARGIN * self.moved)

    @property
    def is_wrong(self) -> bool:
        return not self.off <= self.limit

    def __str__(self) -> str:
        return f"{self.path} is {self.off:.2%} off, {self.limit:.2%} allowed"


def narrow_gradients(
    wide: RunConfig, narrow: RunConfig, layout: Layout, own: Own, tokens: int = TOKENS
) -> Witness:
    """Returns the witness that gradients in the run's own precision are those of float32.

    `wide` and `narrow` are the run on one device, in float32 and in its own precision; the narrow
    one runs in `layout`. A device has `tokens` tokens in one microbatch.
    """
    name = f"gradients in {precision_name(narrow.precision)} are those of float32 ({layout.name})"
    in_place = with_settings(narrow, layout.overrides)
    shards = batch_shards(in_place.mesh.sizes)
    train = in_place.train
    microbatches = train.global_batch // (shards * train.microbatch) if train.microbatch else 1
    sequences = -(-tokens // train.sequence_length)
    batch = f"train.global_batch={sequences * shards * microbatches}"
    devices = jax.devices()
    on_one_device = Stepper(with_settings(wide, (batch,)), devices[:1], own)
    cut = [batch, f"train.microbatch={sequences}"]
    if narrow.precision.loss_scale is not None:
        cut.append(f"precision.loss_scale={LOSS_SCALE}")
    in_layout = Stepper(with_settings(in_place, cut), devices[: layout.devices], own)
    leaves = compared(on_one_device, in_layout)
    wrong = [leaf for leaf in leaves if leaf.is_wrong]
    worst = max(wrong or leaves, key=lambda leaf: leaf.off)
    count = f"{len(wrong)} of {len(leaves)} leaves" if wrong else f"{len(leaves)} leaves, worst"
    return Witness(name, not wrong, f"{count}: {worst}")


def compared(wide: Stepper, narrow: Stepper) -> list[NarrowLeaf]:
    """Compares the gradients of the narrow run with those of the wide one, worst first.

    Both take the same first batch of the run, with repeated tokens. A gradient of exactly 0 in
    float32 must be 0 in the narrow run.
    """
    precision = narrow.setup.config.precision
    begun = narrow.begin()
    state = _with_weights_of(wide.begin(), begun)
    want = _gradients(wide, state)
    got = _gradients(narrow, begun)
    rounding = rounding_of(np.dtype(precision.compute))
    siblings = [_gradients(wide, rounded_otherwise(state, rounding, seed)) for seed in SIBLINGS]
    bound = BOUND_16_BITS if precision.matmul == "compute" else BOUND_8_BITS
    leaves = []
    for leaf, gradient in want.items():
        size = norm(gradient)
        apart = norm(got[leaf] - gradient)
        if not size:
            leaves.append(NarrowLeaf(leaf.path, float("inf") if apart else 0.0, 0.0, bound))
            continue
        moved = max(norm(sibling[leaf] - gradient) for sibling in siblings)
        leaves.append(NarrowLeaf(leaf.path, apart / size, moved / size, bound))
    return sorted(leaves, key=lambda leaf: -leaf.off)


def precision_name(precision: PrecisionConfig) -> str:
    """Returns the narrowest precision of a run's multiplications."""
    return precision.compute if precision.matmul == "compute" else precision.matmul


def is_narrow(precision: PrecisionConfig) -> bool:
    """Returns True if a run multiplies anything in 16 or 8 bits."""
    return precision_name(precision) != "float32"


def repeated(batch: HostBatch) -> HostBatch:
    """Returns the batch with most tokens replaced by the same one.

    Only the token itself decides whether it is replaced, so two layouts still have the same batch.
    """

    def mostly_one(ids: np.ndarray) -> np.ndarray:
        return np.where(ids % ONE_IN == 0, ids, np.asarray(COMMON, ids.dtype))

    return batch | {name: mostly_one(batch[name]) for name in ("tokens", "targets")}


def _gradients(stepper: Stepper, state: Plain) -> dict[Leaf, np.ndarray]:
    with stepper.batches() as ahead:
        batch = repeated(next(ahead))
    _, figures = stepper.take(state, batch)
    return {leaf: x for leaf, x in figures.arrays.items() if leaf.kind == GRADIENT}


def _with_weights_of(state: Plain, narrow: Plain) -> Plain:
    """Returns a wide state with the weights of a narrow one, which may be rounded at rest."""
    return {
        leaf: narrow[leaf].astype(x.dtype) if leaf.kind == WEIGHT else x
        for leaf, x in state.items()
    }
