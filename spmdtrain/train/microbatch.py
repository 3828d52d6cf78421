"""One microbatch through the model: its flow, its losses, and the manual region that both ways of training share.

A batch is a dict of arrays [accumulation, sequences, time] (`sample`: [accumulation, sequences]); a part is one
microbatch of it, [sequences, time].
"""

from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.loss import linear_cross_entropy
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.blueprint import gathering
from spmdtrain.models.flow import Flow, sample_noise
from spmdtrain.parallel.axes import Rules, localisation, manual_axes, placement
from spmdtrain.parallel.vocabulary import lookup

Batch = dict[str, jax.Array]


def make_flow(config: RunConfig, rules: Rules) -> Callable[..., Flow]:
    """`flow(part, step) -> Flow` of a microbatch; with `step` given, dropout is on."""
    manual = manual_axes(rules.sizes)
    place, local = placement(rules, manual), localisation(rules, manual)
    look, gather = lookup(rules, manual), gathering(rules, manual)

    def flow(part: Batch, step: jax.Array | None = None) -> Flow:
        tokens_bt = part["tokens"]
        positions = part.get("positions")
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens_bt.shape[1], dtype=jnp.int32), tokens_bt.shape)
        noisy = step is not None and config.model.dropout > 0
        return Flow(
            positions_bt=positions,
            segments_bt=part.get("segment_ids"),
            place=place,
            local=local,
            lookup=look,
            gather=gather,
            remat=config.train.remat,
            dropout=config.model.dropout,
            noise_b=sample_noise(config.train.seed, step, part["sample"]) if noisy else None,
        )

    return flow


def head_loss(
    model: nnx.Module, x_bte: jax.Array, flow: Flow, part: Batch, rules: Rules, by_hand: tuple[str, ...] = ()
) -> jax.Array:
    """Sum of the losses of the unmasked tokens, float32. `by_hand`: the manual mesh axes that the rows of the head's
    table are split over."""
    hidden_bte, table_ve = model.head(x_bte, flow)
    manual, of_token = manual_axes(rules.sizes), ("batch", "time")
    # Of the logits, which never exist: refuses a mesh axis that would split both tokens and vocabulary.
    rules.activation_spec((*of_token, "vocab"), (*part["targets"].shape, table_ve.shape[0]), drop=manual)

    def axes(*names):
        of = [axis for name in names for axis in rules.activations[name]]
        return tuple(axis for axis in of if rules.sizes[axis] > 1 and axis not in manual)

    def local(hidden_bte, table_ve, targets_bt, mask_bt):
        split = (*by_hand, *axes("vocab"))
        loss = linear_cross_entropy(hidden_bte, table_ve, targets_bt, mask=mask_bt, axis_name=split)
        over = axes(*of_token)
        return jax.lax.psum(loss, over) if over else loss

    arrays = hidden_bte, table_ve, part["targets"], part["mask"].astype(jnp.float32)
    return flow.local(local, arrays, ((*of_token, None), ("vocab", None), of_token, of_token), ())


def manually(function: Callable, mesh: Mesh, manual: Collection[str], in_specs, out_specs) -> Callable:
    """`function` on the local values of the `manual` mesh axes.

    check_vma is off: gradients are taken inside, where parameters must not be summed over `data` again.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(manual), check_vma=False
    )


def only(axes: Collection[str], spec: P) -> P:
    """`spec` with nothing but `axes`."""
    return P(*(_filtered(part, lambda axis: axis in axes) for part in spec))


def without(axes: Collection[str], spec: P) -> P:
    return P(*(_filtered(part, lambda axis: axis not in axes) for part in spec))


def _filtered(part, keep):
    names = tuple(axis for axis in (part if isinstance(part, tuple) else (part,)) if axis and keep(axis))
    return names if len(names) > 1 else names[0] if names else None
