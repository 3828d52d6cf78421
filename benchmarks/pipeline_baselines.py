"""What a pipeline in JAX usually is: one scan over ticks, and `jax.vjp` of the whole scan. The best
we can write of it.

Stages lie on the mesh axis `pipeline`; in every tick each of them runs a chunk of layers and passes
the result on. With one chunk per stage this is GPipe. With several, v, it is the circular pipeline
of praxis and MaxText: m v + p - 1 ticks, in which all microbatches pass the first chunks, then all
the second; what comes back to stage 0 too early waits there, in a delay line. In `groups` of p
microbatches instead, as interleaved 1F1B counts, nothing comes back early: better than what praxis
and MaxText do, so it is measured too.

What those do well is done here too: microbatches enter and leave through a buffer that is split
over the stages and shifts by one stage per round; embedding and head run outside the loop, where
each stage has m / p microbatches; the weights of a chunk are picked inside what is rematerialised,
so that no tick keeps a copy. And better: all axes of the batch are manual, so that gradients cross
`data` once; the head takes its gradient as it goes, so that there are logits of one microbatch at a
time and none is computed twice.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.models.stack import POLICIES, run_block
from spmdtrain.parallel.axes import BATCH_AXES, Rules, drop_axes, keep_axes
from spmdtrain.parallel.reduce import psum_tree
from spmdtrain.parallel.regions import MANUAL_AXES, manual_region
from spmdtrain.train.gradients.forward import make_context, make_head_losses
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import parameter_specs

AXIS = "pipeline"


def whole_vocabulary(rules: Rules) -> Rules:
    """The rules that the baselines want: stages share out microbatches, not the vocabulary."""
    return replace(rules, parameters={**rules.parameters, "vocab": ("tensor",)})


def make_gradients(setup: Setup, rules: Rules, groups: bool) -> Callable[..., Any]:
    """As `grad_pipeline.make_gradients`, under other `rules`. No dropout, no side losses, no fsdp;
    stages divide the microbatches.
    """
    config, model = setup.config, setup.model
    context = make_context(replace(setup, rules=rules))
    head_losses = make_head_losses(replace(setup, rules=rules), training=True)
    specs = parameter_specs(model, rules)
    rest = {path: drop_axes(MANUAL_AXES, spec) for path, spec in specs.items()}

    def embedded(shared, parts):
        """[m / p, b, t, e] of the microbatches `parts`."""
        tokens = parts["tokens"].reshape(-1, parts["tokens"].shape[-1])
        x = model.bind(shared).embed(tokens, context({"tokens": tokens}))
        return x.reshape(*parts["tokens"].shape, -1)

    def head(shared, x, parts):
        """(loss, gradient of shared, of x), one microbatch after the other."""

        def one(sums, given):
            x, part = given

            def loss_of(shared, x):
                return head_losses(model.bind(shared), x, context(part), part)["loss"]

            loss, (dshared, dx) = jax.value_and_grad(loss_of, argnums=(0, 1))(shared, x)
            return jax.tree.map(jnp.add, sums, (loss, dshared)), dx

        zeros = {
            path: jax.lax.with_sharding_constraint(jnp.zeros_like(w), rest[path])
            for path, w in shared.items()
        }
        (loss, dshared), dx = jax.lax.scan(one, (jnp.float32(0), zeros), (x, parts))
        return loss, dshared, dx

    def local(params, _, batch):
        stack = {path: x for path, x in params.items() if model.in_stack(path)}
        shared = {path: x for path, x in params.items() if path not in stack}
        stages, stage = rules.sizes[AXIS], jax.lax.axis_index(AXIS)
        each = batch["tokens"].shape[0] // stages
        parts = {
            name: jax.lax.dynamic_slice_in_dim(x, stage * each, each) for name, x in batch.items()
        }

        def body(shared, stack):
            return through(config, model, stack, embedded(shared, parts), batch, context, groups)

        y, pull = jax.vjp(body, shared, stack)
        loss, from_head, dy = head(
            shared, y, {name: jnp.roll(x, stages, axis=0) for name, x in parts.items()}
        )
        dshared, dstack = pull(dy)
        axes = [axis for axis in BATCH_AXES if rules.sizes[axis] > 1]
        grads = psum_tree(jax.tree.map(jnp.add, dshared, from_head), [AXIS, *axes]) | psum_tree(
            dstack, axes
        )
        tokens = psum_tree(batch["mask"].astype(jnp.float32).sum(), axes)
        sums = {"loss": psum_tree(loss, [AXIS, *axes]), "tokens": tokens}
        return {path: (g / tokens).astype(g.dtype) for path, g in grads.items()}, sums

    params = {path: keep_axes(MANUAL_AXES, spec) for path, spec in specs.items()}
    return manual_region(
        local, setup.mesh, MANUAL_AXES, (params, P(), P(None, BATCH_AXES)), (params, P())
    )


def through(
    config: RunConfig, model: AbstractModel, stack, x, batch, context: Callable, groups: bool
) -> jax.Array:
    """All microbatches through all layers. `stack`: [v, 1, Lc, ...]; x: [m / p, b, t, e], place i
    of stage s holding microbatch s m / p + i. In the result each stage has the same microbatches, p
    places further round.
    """
    layout, stage, each = model.stage_layout, jax.lax.axis_index(AXIS), len(x)
    chunks, stages, microbatches = layout.chunks, layout.stages, each * layout.stages
    groups = groups or chunks == 1
    delay = 0 if groups else microbatches - stages
    stack = {path: weights[:, 0] for path, weights in stack.items()}

    def unit(number):
        """(microbatch, chunk)."""
        if not groups:
            return number % microbatches, number // microbatches
        return number // (stages * chunks) * stages + number % stages, number % (
            stages * chunks
        ) // stages

    def shifted(buffer, y, tick):
        """The buffer with what entered at stage 0 gone and y, that left the last stage, there; and
        what entered.
        """
        visit, visited = (tick, True) if not groups else (unit(tick)[0], unit(tick)[1] == 0)
        place = visit % each
        entering = jax.lax.dynamic_index_in_dim(buffer, place, keepdims=False)
        behind = jax.lax.ppermute(entering, AXIS, [(at, at - 1) for at in range(1, stages)])
        put = jnp.where(visited, jnp.where(stage == stages - 1, y, behind), entering)
        return jax.lax.dynamic_update_index_in_dim(buffer, put, place, 0), entering

    def picked(stack, chunk):
        if chunks == 1:
            return {path: weights[0] for path, weights in stack.items()}
        return {
            path: jax.lax.dynamic_index_in_dim(weights, chunk, keepdims=False)
            for path, weights in stack.items()
        }

    def layers(weights, x, microbatch, chunk):
        part = {
            name: jax.lax.dynamic_index_in_dim(x, microbatch, keepdims=False)
            for name, x in batch.items()
        }
        ctx = context(part)

        def layer(x, given):
            number, weights = given
            return run_block(model.bind(weights).blocks.layer, x, ctx, number)

        numbers = (chunk * stages + stage) * layout.per_chunk + jnp.arange(layout.per_chunk)
        return jax.lax.scan(layer, x, (numbers, weights))[0]

    chunk_of_layers = rematerialised(picked, layers, config.train.remat)

    def one(carry, tick):
        y, buffer, line = carry
        buffer, entering = shifted(buffer, y, tick)
        x = jax.lax.ppermute(
            y, AXIS, [(at, (at + 1) % stages) for at in range(stages - (chunks == 1))]
        )
        back = x
        if delay:
            line, back = delayed(line, x, tick)
        first = jnp.where(unit(tick)[1] == 0, entering, back)
        number = jnp.clip(tick - stage, 0, microbatches * chunks - 1)
        y = chunk_of_layers(stack, jnp.where(stage == 0, first, x), *unit(number))
        return (y, buffer, line), None

    ticks = microbatches * chunks + stages - 1
    line = jnp.zeros((delay + 1, *x.shape[1:]), x.dtype) if delay else None
    (y, buffer, _), _ = jax.lax.scan(
        one, (jnp.zeros_like(x[0]), x, line), jnp.arange(ticks, dtype=jnp.int32)
    )
    return shifted(buffer, y, ticks)[0]


@jax.custom_vjp
def delayed(line: jax.Array, x: jax.Array, tick: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The line with x in it, and what went in len(line) - 1 ticks ago. Gradients wait in a line of
    the same kind: XLA would copy the one that it makes of this at every tick.
    """
    line = jax.lax.dynamic_update_index_in_dim(line, x, tick % len(line), 0)
    return line, jax.lax.dynamic_index_in_dim(line, (tick + 1) % len(line), keepdims=False)


def undelayed(tick, cotangents):
    line, back = cotangents
    line = jax.lax.dynamic_update_index_in_dim(line, back, (tick + 1) % len(line), 0)
    return line, jax.lax.dynamic_index_in_dim(line, tick % len(line), keepdims=False), None


delayed.defvjp(lambda line, x, tick: (delayed(line, x, tick), tick), undelayed)


def rematerialised(picked: Callable, layers: Callable, remat: str) -> Callable[..., jax.Array]:
    """`run(stack, x, microbatch, chunk)`: the layers with the picked weights, of which no copy
    waits for backward.
    """
    if remat != "none":

        def run(stack, x, microbatch, chunk):
            return layers(picked(stack, chunk), x, microbatch, chunk)

        return jax.checkpoint(run, policy=POLICIES[remat], prevent_cse=False)

    # A policy that saves all but the weights would also save what the layers themselves
    # rematerialise.
    @jax.custom_vjp
    def run(stack, x, microbatch, chunk):
        return layers(picked(stack, chunk), x, microbatch, chunk)

    traced = []

    def forward(stack, x, microbatch, chunk):
        weights = picked(stack, chunk)
        y, pull = jax.vjp(lambda weights, x: layers(weights, x, microbatch, chunk), weights, x)
        residuals, structure = jax.tree.flatten(pull)
        path_of = {id(value): path for path, value in weights.items()}
        paths = [path_of.get(id(residual)) for residual in residuals]
        traced.append((structure, paths))
        return y, (
            [x for x, path in zip(residuals, paths, strict=True) if path is None],
            stack,
            chunk,
        )

    def backward(kept, dy):
        others, stack, chunk = kept
        (structure, paths), others = traced[-1], iter(others)
        weights, put = jax.vjp(lambda stack: picked(stack, chunk), stack)
        pull = jax.tree.unflatten(
            structure, [next(others) if path is None else weights[path] for path in paths]
        )
        dweights, dx = pull(dy)
        return *put(dweights), dx, None, None

    run.defvjp(forward, backward)
    return run
