"""One microbatch through the model to its loss, and what both ways to gradients end with.

B: sequences of a microbatch, T: tokens of a sequence, E: width of the stream, V: rows of the head's
table.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config.errors import ConfigError
from spmdtrain.models.abstract import make_manual_gather
from spmdtrain.models.context import ForwardContext, sample_noise
from spmdtrain.models.model import LanguageModel
from spmdtrain.parallel.axes import BATCH_AXES, Rules
from spmdtrain.parallel.reduce import psum_tree, reduce_gradients
from spmdtrain.parallel.regions import MANUAL_AXES, Name, Whole, make_constrain, make_local_map
from spmdtrain.parallel.specs import axes_of_dim, drop_axes
from spmdtrain.parallel.tensor_matmul import (
    make_column_parallel,
    make_find_ring,
    make_row_parallel,
    no_ring,
    stream_is_split,
)
from spmdtrain.parallel.vocabulary import make_lookup
from spmdtrain.train.batch import Batch
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses, make_sum_losses, of_the_step


def make_context(setup: Setup) -> Callable[..., ForwardContext]:
    """`context(microbatch, step) -> ForwardContext`; with `step` given, dropout is on."""
    train = setup.config.train
    dropout = setup.config.model.dropout
    rules = setup.rules
    constrain = make_constrain(rules, MANUAL_AXES)
    local_map = make_local_map(rules, MANUAL_AXES)
    lookup = make_lookup(rules, MANUAL_AXES)
    gather = make_layer_gather(setup)
    remat = train.remat
    if remat == "none" and setup.gathers_by_layer:
        remat = "weights"

    find_ring = no_ring
    if setup.config.mesh.collective_matmul:
        find_ring = make_find_ring(rules, MANUAL_AXES)
    gathers_again = stream_is_split(rules) and remat in ("none", "weights")
    copies = max(each.ways for each in setup.copies.values())
    column_parallel = make_column_parallel(
        constrain, find_ring, gathers_again=gathers_again, copies=copies
    )
    row_parallel = make_row_parallel(constrain, find_ring, copies=copies)

    def context(microbatch: Batch, step: jax.Array | None = None) -> ForwardContext:
        tokens_bt = microbatch["tokens"]
        positions_bt = microbatch.get("positions")
        if positions_bt is None:
            from_zero = jnp.arange(tokens_bt.shape[1], dtype=jnp.int32)
            positions_bt = jnp.broadcast_to(from_zero, tokens_bt.shape)
        noise_b = None
        if step is not None and dropout > 0:
            noise_b = sample_noise(train.seed, step, microbatch["sample"])
        return ForwardContext(
            positions_bt=positions_bt,
            segment_ids_bt=microbatch.get("segment_ids"),
            constrain=constrain,
            local_map=local_map,
            lookup=lookup,
            gather=gather,
            remat=remat,
            column_matmul=column_parallel,
            row_matmul=row_parallel,
            dropout_rate=dropout,
            noise_b=noise_b,
        )

    return context


def make_layer_gather(setup: Setup) -> Callable[[nnx.State], nnx.State]:
    """`gather(state)`: the weights of a layer whole and in compute precision.

    It leaves them as they are where layers need not gather.
    """
    if not setup.gathers_by_layer:
        return lambda state: state
    return make_manual_gather(setup.rules, setup.config.precision)


def make_head_losses(
    setup: Setup, *, training: bool, table_axes: tuple[str, ...] = ()
) -> Callable[..., Losses]:
    """`head_losses(module, x_bte, ctx, microbatch)`: sums over the unmasked tokens, by name.

    They are float32 scalars; of a mixture in training also vectors, as `means` takes them.
    `table_axes`: the manual mesh axes that the rows of the head's table are split over.
    """
    rules = setup.rules
    # A table of more rows is padded.
    sum_losses = make_sum_losses(
        setup.config.train, setup.loss, vocab=setup.model.rows, training=training
    )
    token = ("batch", "time")

    def automatic_axes(*names: str) -> tuple[str, ...]:
        axes = [axis for name in names for axis in rules.activations[name]]
        return tuple(axis for axis in axes if rules.sizes[axis] > 1 and axis not in MANUAL_AXES)

    axis_name = (*table_axes, *automatic_axes("vocab"))
    token_axes = automatic_axes(*token)

    def local(hidden_bte, table_ve, targets_bt, mask_bt, part_bn=None):
        losses = sum_losses(hidden_bte, table_ve, targets_bt, mask_bt, axis_name, part_bn)
        return jax.lax.psum(losses, token_axes) if token_axes else losses

    def head_losses(
        module: LanguageModel, x_bte: jax.Array, ctx: ForwardContext, microbatch: Batch
    ) -> Losses:
        hidden_bte, table_ve = module.head(x_bte, ctx)
        # All logits never exist; their spec refuses a mesh axis that would split tokens and
        # vocabulary.
        logits_shape = (*microbatch["targets"].shape, table_ve.shape[0])
        rules.activation_spec((*token, "vocab"), logits_shape, drop=MANUAL_AXES)
        mask_bt = microbatch["mask"].astype(jnp.float32)
        arrays = (hidden_bte, table_ve, microbatch["targets"], mask_bt)
        names = (("batch", hidden_time(rules), None), ("vocab", None), token, token)
        if training and "source" in microbatch:
            arrays = (*arrays, _by_source(setup, microbatch))
            names = (*names, ("batch", None))
        return ctx.local_map(local, arrays, names, ())

    return head_losses


def hidden_time(rules: Rules) -> Name:
    """How the tokens of the head's input come to the loss.

    Where the stream is split further than the targets (sequence parallelism), they are gathered
    there, and their gradient, a sum over the parts of the vocabulary, is scattered. Summed whole,
    it would be twice the traffic.
    """
    (stream,) = rules.activation_spec(("stream_time",), (0,))
    (targets,) = rules.activation_spec(("time",), (0,))
    outer = axes_of_dim(targets)
    if axes_of_dim(stream)[: len(outer)] == outer:
        return Whole("stream_time", but_for="time")
    return "time"


def join_losses(of_head: Losses, of_layers: Losses) -> Losses:
    """The losses of the head and the side losses of the layers. ConfigError for a name of both."""
    for name in sorted(of_layers):
        if name in of_head or name in of_the_step():
            what = f"a side loss of a block is called {name!r}, as another figure of a step is"
            raise ConfigError(what, fix="another name")
    return of_head | of_layers


def objective(losses: Losses) -> Any:
    """The scalar that training minimises: the sum of all losses."""
    return sum(total_of(loss) for loss in losses.values())


def count_tokens(setup: Setup, batch: Batch, *, training: bool) -> dict[str, jax.Array]:
    """{"tokens": the unmasked ones of a batch}, float32; of a mixture in training a vector as the
    losses are.
    """
    mask = batch["mask"].astype(jnp.float32)
    if not training or "source" not in batch:
        return {"tokens": mask.sum()}
    of_sequence = mask.sum(-1)[..., None]  # first: time may be split, and is to be summed once
    each = (of_sequence * _by_source(setup, batch)).sum(tuple(range(mask.ndim - 1)))
    return {"tokens": jnp.concatenate([of_sequence.sum()[None], each])}


def means(setup: Setup, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Each loss over the number of tokens, and both numbers of tokens, scalars by name.

    `sums`: scalars, or of a mixture vectors [1 + sources] that become NAME and NAME/SOURCE. A
    source without tokens has a loss of 0: its number of tokens says that there is none.
    """
    sources = ["", *(f"/{source.name}" for source in setup.config.data.mix)]
    tokens = sums["tokens"]
    found = {}
    for name, total in sums.items():
        over = tokens if total.ndim else total_of(tokens)
        mean = total if name == "tokens" else total / jnp.maximum(over, 1)
        if mean.ndim:
            found |= {name + source: mean[at] for at, source in enumerate(sources)}
        else:
            found[name] = mean
    return found


def total_of(sums: jax.Array) -> jax.Array:
    """The sum over all sources, which stands before those of each."""
    return sums[0] if sums.ndim else sums


def _by_source(setup: Setup, batch: Batch) -> jax.Array:
    """Marks the source of each sequence: float32 [..., sources], 1 at its source, else 0."""
    sources = jnp.arange(len(setup.config.data.mix))
    return (batch["source"][..., None] == sources).astype(jnp.float32)


def sum_over_shards(sums: dict[str, jax.Array], rules: Rules) -> dict[str, jax.Array]:
    """Losses and numbers of tokens, summed over the shards of the batch."""
    axes = [axis for axis in BATCH_AXES if rules.sizes[axis] > 1]
    return psum_tree(sums, axes)


def mean_gradients(
    setup: Setup,
    gradients: dict[str, jax.Array],
    tokens: jax.Array,
    cotangent: jax.Array | None,
) -> dict[str, jax.Array]:
    """Accumulated gradients reduced over the manual axes, then divided by the number of `tokens`
    (unmasked, of the whole batch), and by the cotangent that the objective had, if it was not 1."""
    reduced = _reduce(setup, gradients)
    count = jnp.maximum(tokens, 1)
    if cotangent is not None:
        count = count * cotangent
    return {path: (gradient / count).astype(gradient.dtype) for path, gradient in reduced.items()}


def _reduce(setup: Setup, gradients: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Accumulated gradients summed over all devices that share a weight, and scattered where it
    rests split. Copies are summed last, when their slices are small.
    """
    padded, reductions, automatic = {}, {}, {}
    for path, gradient in gradients.items():
        copies = setup.copies[path]
        padded[path] = copies.each(partial(setup.padding.use_to_rest, path), gradient)
        reductions[path] = copies.reduction(setup.reductions[path])
        automatic[path] = drop_axes(MANUAL_AXES, copies.spec(setup.specs[path]))
    reduced = reduce_gradients(padded, reductions, automatic)
    return {path: setup.copies[path].sum(x, setup.specs[path]) for path, x in reduced.items()}


def zero_gradients(setup: Setup, weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Zeros to accumulate gradients in, inside the manual region, of `add_copies`' weights."""
    dtype = setup.config.precision.accumulate

    def zeros(path: str, x: jax.Array) -> jax.Array:
        spec = drop_axes(MANUAL_AXES, setup.copies[path].spec(setup.specs[path]))
        return jax.lax.with_sharding_constraint(jnp.zeros(x.shape, dtype), spec)

    return {path: zeros(path, x) for path, x in weights.items()}


def add_copies(setup: Setup, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The parameters inside the manual region, the weights of matmuls as copies."""
    return {path: setup.copies[path].add(x, setup.specs[path]) for path, x in params.items()}
