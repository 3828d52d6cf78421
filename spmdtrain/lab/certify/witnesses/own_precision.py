"""Holds a step in a run's own precision against one in float32, leaf by leaf: gradients, and what
the optimizer keeps of them. The average of a weight is held against that weight.

Updates are not compared: many divide a gradient by its own size, so that rounding which is no
smaller than the gradient decides the sign of a whole step.

Layouts that agree with each other prove nothing about their precision: a sum that loses half of its
terms in bfloat16 loses them in every layout. So the narrow run is compared with a wide one that has
the same weights and the same batch.

Narrow formats fail where many numbers are added. The batch is made to show that: three tokens in
four are the same one, and a device has thousands of them in one microbatch.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.config.schema import PrecisionConfig, RunConfig
from spmdtrain.lab.certify.compare import GRADIENT, Figures, norm, rounding_of
from spmdtrain.lab.certify.cover import Layout
from spmdtrain.lab.certify.noise import rounded_otherwise
from spmdtrain.lab.certify.stepper import HostBatch, Own, Stepper
from spmdtrain.lab.certify.witnesses.resume import with_settings
from spmdtrain.lab.certify.witnesses.witness import AVERAGE, Witness, averages_off
from spmdtrain.parallel.axes import batch_shards
from spmdtrain.train.compared.in_order import OPTIMIZER, WEIGHT, Leaf, Plain
from spmdtrain.train.updates.transformations.small_moments import MOMENTA, SQUARES, Few, decoded

# How far a gradient may be from the one in float32, relative to its size. Measured: at most 0.8 %
# in 16 bits where no expert is chosen otherwise, and 7.2 % in 8 bits.
BOUND_16_BITS, BOUND_8_BITS = 0.02, 0.15
HELD = {GRADIENT: 1, OPTIMIZER: 2}  # times the bound: squares of gradients are twice as far off
# Fields of an optimizer's state that are means of gradients, of their squares or their products.
MEANS = MOMENTA | SQUARES | {"v", "v_row", "v_col", "factor"}
BOUND_8_BIT_MOMENTS = 0.1  # each is rounded once, by up to 1/254 of its block or 4.4 %
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
    """The gradient of one weight in a narrow precision, or what the step makes of it.

    `off`: its distance from the one in float32. `moved`: how far rounding the weights moves that
    one. Both are relative to its size. `bound`: the largest distance that needs no excuse.
    """

    leaf: Leaf
    off: float
    moved: float
    bound: float

    @property
    def path(self) -> str:
        """The name of the leaf: of a gradient, the path of its weight."""
        return self.leaf.path if self.leaf.kind == GRADIENT else str(self.leaf)

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
    """Returns the witness that a step in the precision of a run is that of float32.

    `wide` and `narrow` are the run on one device, in float32 and in its own precision; the narrow
    one runs in `layout`. A device has `tokens` tokens in one microbatch.
    """
    name = f"a step in {precision_name(narrow.precision)} is that of float32 ({layout.name})"
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
    gradients = [leaf for leaf in wrong or leaves if leaf.leaf.kind == GRADIENT]
    worst = max(gradients or wrong, key=lambda leaf: leaf.off)
    count = f"{len(wrong)} of {len(leaves)} leaves" if wrong else f"{len(leaves)} leaves, worst"
    return Witness(name, not wrong, f"{count}: {worst}")


def compared(wide: Stepper, narrow: Stepper) -> list[NarrowLeaf]:
    """Returns the leaves of the first step of the narrow run, held against the wide one's.

    Both take the same first batch of the run, with repeated tokens. A leaf that is exactly 0 in
    float32 must be 0 in the narrow run.
    """
    config = narrow.setup.config
    begun = narrow.begin()
    state = _with_weights_of(wide.begin(), begun)
    want = _held(wide, state)[0]
    got, averages = _held(narrow, begun)
    rounding = rounding_of(np.dtype(config.precision.compute))
    rounded = [rounded_otherwise(state, rounding, seed) for seed in SIBLINGS]
    siblings = [_held(wide, sibling)[0] for sibling in rounded]
    leaves = []
    for leaf, x in want.items():
        size = norm(x)
        apart = norm(got[leaf] - x)
        if not size:
            leaves.append(NarrowLeaf(leaf, float("inf") if apart else 0.0, 0.0, 0.0))
            continue
        moved = max(norm(sibling[leaf] - x) for sibling in siblings)
        leaves.append(NarrowLeaf(leaf, apart / size, moved / size, _bound(config, leaf)))
    return leaves + averages


def _bound(config: RunConfig, leaf: Leaf) -> float:
    """Returns how far a leaf may be off relative to its size."""
    narrow = BOUND_16_BITS if config.precision.matmul == "compute" else BOUND_8_BITS
    bound = HELD[leaf.kind] * narrow
    if leaf.kind == OPTIMIZER and config.optimizer.moment_dtype == "8bit":
        bound += BOUND_8_BIT_MOMENTS
    return bound


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


def _held(stepper: Stepper, state: Plain) -> tuple[dict[Leaf, np.ndarray], list[NarrowLeaf]]:
    """Returns the gradients of the first step and what is kept of them, and its averages."""
    with stepper.batches() as ahead:
        batch = repeated(next(ahead))
    later, figures = stepper.take(state, batch)
    held = {leaf: x for leaf, x in _in_float32(figures).items() if _is_held(leaf)}
    averages = averages_off(stepper.setup.config, state, later)
    return held, [NarrowLeaf(leaf, off, 0.0, AVERAGE) for leaf, off in averages]


def _is_held(leaf: Leaf) -> bool:
    """Returns True for gradients and means of them: what else a state has may follow updates."""
    return leaf.kind == GRADIENT or (
        leaf.kind == OPTIMIZER and leaf.place.rpartition(".")[2] in MEANS
    )


def _in_float32(figures: Figures) -> dict[Leaf, np.ndarray]:
    """Returns the floating arrays of a step, with moments in 8 bits by their names in float32."""
    arrays = dict(figures.arrays)
    for leaf, codes in figures.whole.items():
        field, _, part = leaf.place.rpartition(".")
        if leaf.kind != OPTIMIZER or part != "codes":
            continue
        scales = arrays.pop(leaf._replace(place=f"{field}.scales"))
        name = field.rpartition(".")[2]
        moment = decoded(name, Few(jnp.asarray(codes), jnp.asarray(scales, jnp.float32)))
        place = field.replace(".inner", "", 1)
        arrays[leaf._replace(place=place)] = np.asarray(moment, np.float64)
    return {
        leaf._replace(place=leaf.place.replace(".inner", "", 1)): x for leaf, x in arrays.items()
    }


def _with_weights_of(state: Plain, narrow: Plain) -> Plain:
    """Returns a wide state with the weights of a narrow one, which may be rounded at rest."""
    return {
        leaf: narrow[leaf].astype(x.dtype) if leaf.kind == WEIGHT else x
        for leaf, x in state.items()
    }
