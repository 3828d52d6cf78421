"""Stacks layers of one shape along a leading dim and runs them in one scan, so compile time does
not grow with depth.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import saveable as attention_saveable
from spmdtrain.config.errors import ConfigError
from spmdtrain.models.buffer import refusing_writes
from spmdtrain.models.context import ForwardContext
from spmdtrain.parallel import tensor_matmul
from spmdtrain.parallel.gather import LAYER_AXES


def _all_but_gathered_weights(primitive: jax.extend.core.Primitive, *_, **parameters) -> bool:
    """Keeps all but gathered weights: kept ones would be whole in all layers at once."""
    return not _gathers_weights(primitive, parameters)


def _gathers_weights(primitive: jax.extend.core.Primitive, parameters: dict[str, Any]) -> bool:
    """Returns True for a gather over the layers' axes, or a call of a function that makes one.

    The gather of a frozen weight stays such a call, because nothing differentiates it.
    """
    if primitive.name == "all_gather":
        return set(parameters["axis_name"]) <= set(LAYER_AXES)
    if primitive.name not in ("custom_vjp_call", "shard_map"):
        return False
    called = parameters["call_jaxpr" if "call_jaxpr" in parameters else "jaxpr"]
    program = getattr(called, "jaxpr", called)
    return any(_gathers_weights(eqn.primitive, eqn.params) for eqn in program.eqns)


SideLosses = dict[str, jax.Array]  # by name, float32 scalars

LAYER_INPUT = "layer_input"  # the checkpoint_name of what remat "offload" keeps on the host

POLICIES = {
    "weights": _all_but_gathered_weights,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable, attention_saveable
        ),
        jax.checkpoint_policies.save_only_these_names(tensor_matmul.SAVED),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


MakeBlock = Callable[[nnx.Rngs], nnx.Module]


class Stack(nnx.Module):
    """A stack of `count` blocks made by `make_block(rngs)`, each called as `block(x, ctx)`.

    With several `make_block` there are several kinds of block, repeated in that order; `count` is a
    multiple of their number. Rounds of them are then stacked, and a stage of a pipeline has a whole
    number of rounds.

    A block returns x, or (x, its side losses): a dict of scalars by name, or one scalar, whose name
    is then `side_loss`. A side loss is already weighted, and summed over the tokens of x like their
    losses: training minimises the sum of all losses over the number of tokens.
    """

    any_order = True
    # A module that makes of (x, ctx) a context with what layers read beside x; None: they read no
    # more. The class has None: flax asks for one kind of value in an instance.
    beside: Any = None
    extend: Any = None  # (x, ctx, caches) -> (x, caches), if not layer by layer

    def __init__(self, make_block: MakeBlock | Sequence[MakeBlock], count: int, rngs: nnx.Rngs):
        self.count = count
        kinds = 1
        if not callable(make_block):
            kinds = len(make_block)
            make_block = partial(Round, make_block)
        if not kinds or count % kinds:
            raise ConfigError(
                f"{count} layers are not a whole number of rounds of {kinds} kinds",
                fix="model.layers",
            )
        self.rounds = count // kinds
        stacked = nnx.vmap(make_block, transform_metadata={nnx.PARTITION_NAME: "layer"})
        self.layer = stacked(rngs.split(self.rounds))

    @property
    def stacks(self) -> "Sequence[Stack]":
        """The stacks that run one after another: this one."""
        return (self,)

    def context(self, x: jax.Array, ctx: ForwardContext) -> ForwardContext:
        """Returns the context of the layers of a stack that gets x."""
        return ctx if self.beside is None else self.beside(x, ctx)

    def __call__(self, x: jax.Array, ctx: ForwardContext) -> tuple[jax.Array, SideLosses]:
        """Returns x after the last block, and the side losses summed over the blocks."""
        frozen = frozen_rounds(ctx.frozen_layers, self.count, self.rounds)
        scans = ctx.scan_layers
        # XLA writes a loop of one turn out, and would merge recomputation and forward pass.
        ctx = replace(self.context(x, ctx), scan_layers=scans and self.rounds - frozen > 1)
        graphdef, parameters = nnx.split(self.layer)

        def body(x, layer):
            number, parameters = layer
            if ctx.remat == "offload":
                x = checkpoint_name(x, LAYER_INPUT)  # inside the body: outside it names nothing
            return run_block(nnx.merge(graphdef, ctx.gather_layer(parameters)), x, ctx, number)

        run = rematerialised(body, ctx.remat, ctx.scan_layers)
        if isinstance(self.layer, Round):
            body = run = _of_rounds(self.layer, ctx)
            parameters = [nnx.state(block) for block in self.layer.block]
        side_losses = []
        if frozen:
            x, losses = _run_frozen(body, x, parameters, frozen, scans)
            side_losses.append(losses)
            parameters = jax.tree.map(lambda weight: weight[frozen:], parameters)
        layers = (jnp.arange(frozen, self.rounds), parameters)
        x, losses = jax.lax.scan(run, x, layers, unroll=not scans)
        return x, sum_losses(*side_losses, jax.tree.map(jnp.sum, losses))


def frozen_rounds(frozen: int, layers: int, rounds: int) -> int:
    """Returns how many of a stack's `rounds` are the first `frozen` of its `layers`.

    Raises ConfigError if that is not a whole number.
    """
    count, rest = divmod(frozen * rounds, layers)
    if rest:
        raise ConfigError(
            f"finetune.frozen_layers: {frozen} of the stack's layers are not a whole number of "
            f"rounds of {layers // rounds} kinds",
            fix="another number of layers",
        )
    return count


def _run_frozen(
    body: Callable, x: jax.Array, parameters: Any, count: int, scan: bool
) -> tuple[jax.Array, SideLosses]:
    """Runs the first `count` layers of a stack without a backward pass; returns (x, their side
    losses).

    Each layer takes its weights out of the whole stack, because a part of the stack would be a
    copy.
    """
    x, parameters = jax.lax.stop_gradient((x, parameters))

    def run(x, number):
        layer = jax.tree.map(lambda weight: weight[number], parameters)
        return body(x, (number, layer))

    x, losses = jax.lax.scan(run, x, jnp.arange(count), unroll=not scan)
    return x, jax.tree.map(jnp.sum, losses)


class Round(nnx.Module):
    """A round of blocks: one of each kind, one after another."""

    any_order = True

    def __init__(self, kinds: Sequence[MakeBlock], rngs: nnx.Rngs):
        self.block = nnx.List([make_block(rngs) for make_block in kinds])

    def __call__(self, x: jax.Array, ctx: ForwardContext) -> tuple[jax.Array, SideLosses]:
        total = {}
        for number, block in enumerate(self.block):
            x, side_losses = run_block(block, x, ctx, number, len(self.block))
            total = sum_losses(total, side_losses)
        return x, total


def _of_rounds(layers: Round, ctx: ForwardContext) -> Callable:
    """Returns a function that runs one round: (x, (its number, the weights of its blocks)) -> (x,
    side losses).

    Each block is recomputed by itself: a whole round would keep the activations of all its blocks.
    As outside of a loop, it waits for the gradient of its output: XLA would recompute all blocks at
    once, since the input of each is there.
    """
    ctx = replace(ctx, scan_layers=False)
    graphdefs = [nnx.graphdef(block) for block in layers.block]
    count = len(graphdefs)

    def body(x, round_of_layers):
        number, weights = round_of_layers
        at_round = ctx.at_layer(number)
        total = {}
        for place, (graphdef, parameters) in enumerate(zip(graphdefs, weights, strict=True)):

            def layer(x, ctx, parameters, place=place, graphdef=graphdef):
                if ctx.remat == "offload":
                    x = checkpoint_name(x, LAYER_INPUT)
                block = nnx.merge(graphdef, ctx.gather_layer(parameters))
                return run_block(block, x, ctx, place, count)

            run = rematerialised(layer, ctx.remat, ctx.scan_layers)
            x, side_losses = run(x, at_round, parameters)
            total = sum_losses(total, side_losses)
        return x, total

    return body


def run_block(
    block: nnx.Module, x: jax.Array, ctx: ForwardContext, number: jax.Array | int, count: int = 1
) -> tuple[jax.Array, SideLosses]:
    """Runs layer `number` of a stack, or of a round of `count` layers; returns (x, its side
    losses).

    `block` holds the weights of the layer.
    """
    at_layer = ctx.at_layer(number, count)

    def run(x: jax.Array) -> tuple[jax.Array, SideLosses]:
        with refusing_writes(block):
            out = block(x, at_layer)
        return with_losses(out, block)

    # A round is no layer: each of its blocks is one.
    around = None if isinstance(block, Round) else ctx.around_layer
    y, side_losses = with_losses(around(run, x, at_layer), block) if around else run(x)
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ConfigError(
            f"a {type(block).__name__} turns {x.dtype}{list(x.shape)} "
            f"into {y.dtype}{list(y.shape)}",
            fix="a block that keeps shape and dtype: the next one takes its output",
        )
    return y, side_losses


def with_losses(out: Any, module: nnx.Module) -> tuple[jax.Array, SideLosses]:
    """Returns (y, side losses in float32) from the result of a block or part: y or a pair.

    Raises ConfigError if a side loss is not a scalar; `module` made the result.
    """
    y, returned = out if isinstance(out, tuple) else (out, {})
    losses = returned if isinstance(returned, dict) else {"side_loss": returned}
    for name, loss in losses.items():
        if jnp.shape(loss):
            raise ConfigError(
                f"{name} of a {type(module).__name__} has the shape {list(jnp.shape(loss))}",
                fix="a scalar: the sum over all tokens",
            )
    return y, {name: jnp.asarray(loss, jnp.float32) for name, loss in losses.items()}


def sum_losses(*parts: SideLosses) -> SideLosses:
    """Returns the side losses of several parts, summing those with the same name."""
    total = {}
    for losses in parts:
        for name, loss in losses.items():
            total[name] = total.get(name, 0) + loss
    return total


def rematerialised(layer: Callable, remat: str, scanned: bool = True) -> Callable:
    """Returns `layer` with a backward that recomputes a part of it, as the setting `remat` says.

    The part is nothing (none), gathered weights (weights), all but matmuls and attention (dots),
    everything (full), or everything from layer inputs kept on the host (offload). Outside a loop
    (`scanned` false) XLA would find the forward pass and the recomputation equal, and keep both.
    """
    if remat == "none":
        return layer
    return jax.checkpoint(layer, policy=POLICIES[remat], prevent_cse=not scanned)
