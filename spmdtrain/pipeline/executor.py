"""Runs any schedule table: all stages tick together, in scans, in one manual region.

Every stage runs the same program at every tick. A stage whose cell of the table has no work
computes anyway, on stale buffers, and its result is masked. Nothing branches on the stage, because
a collective inside such a branch would hang or mix up data (seen in jax 0.10 and 0.12). The order
of work within a tick is given by the docstring of schedule.py and by `training_tick`.

The objective is the sum over stages of what each stage computes. All stages run the head of a
microbatch at once, each on its share of the vocabulary, so each counts 1/p of the loss. Then the
transpose of a sum over stages is again a sum over stages. Gradients of the weights that all stages
hold are partial: the caller sums them over `pipeline`.

Memory: the ring buffers have as many slots as the table asks for, for any number of microbatches,
and gradients are accumulated in place.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.parallel.reduce import psum_tree
from spmdtrain.pipeline.layer_vjp import LayerGradient
from spmdtrain.pipeline.phases import Phase, RepeatedPhases, rounds
from spmdtrain.pipeline.schedule import Table
from spmdtrain.pipeline.stage_layout import StageLayout

AXIS = "pipeline"
Tree = Any
Losses = dict[str, jax.Array]  # by name, float32 scalars
Carry = dict[str, Tree]  # carried from tick to tick: buffers, losses, gradients
Cell = Mapping[str, jax.Array]  # one tick's row of the table at this stage's column: scalars
Tick = Callable[[Phase, Carry, Cell], Carry]

# Columns of the table [ticks, stages], of which a stage reads its own.
STAGE_COLUMNS = (
    "forward_microbatch",
    "forward_chunk",
    "forward_slot",
    "backward_microbatch",
    "backward_chunk",
    "backward_slot",
    "weight_microbatch",
    "weight_chunk",
    "weight_slot",
    "arrive_forward_slot",
    "arrive_backward_slot",
    "head_slot",
    "cotangent_slot",
    "defer_slot",
    "resume_slot",
)
# Columns [ticks]. All stages read them: e.g. the head runs on all stages at once.
SHARED_COLUMNS = ("embed_microbatch", "head_microbatch", "embed_backward_microbatch")


def sum_over_stages(x: jax.Array) -> jax.Array:
    """Returns the sum of x over `pipeline`."""
    return psum_tree(x, (AXIS,))


@dataclass(frozen=True)
class StageProgram:
    """The functions that a pipeline runs.

    Losses are float32 scalars by name; training minimises the sum of them all. `shared` are the
    weights outside the layers, `context` the data of a microbatch besides x (tokens, positions,
    noise), and `x` an activation, of one shape throughout.

    - `embed(shared, context) -> x`
    - `layer(weights, x, (number, context)) -> (y, side losses)`: `weights` of one layer, including
      the fixed ones, and its number in the model, an int32 scalar; {} if layers have no side losses
    - `head(shared, x, context) -> losses`, the same values on every stage
    - `context_of(microbatch) -> context`: `microbatch` is a traced index
    - `sum_over_stages(x) -> x`: the sum of an activation over `pipeline`
    - `cotangent`: that of the objective, a float32 scalar by which gradients are scaled; None: 1
    - `frozen`: the first layers, which have no gradients, and neither has the embedding then; the
      table has no backward of chunks that lie wholly among them
    """

    embed: Callable[[Tree, Tree], jax.Array]
    layer: Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Losses]]
    head: Callable[[Tree, jax.Array, Tree], Losses]
    context_of: Callable[[jax.Array], Tree]
    sum_over_stages: Callable[[jax.Array], jax.Array] = sum_over_stages
    cotangent: jax.Array | None = None
    frozen: int = 0


def losses(
    program: StageProgram,
    table: Table,
    layout: StageLayout,
    shared: Tree,
    stack: Tree,
    fixed: Mapping[str, jax.Array] | None = None,
) -> tuple[Losses, Losses]:
    """Runs the forwards of a table; returns (losses of the head, side losses of the layers).

    Both are sums over all microbatches of this batch shard, the same on every stage. Call it in a
    region that is manual over `pipeline`. Leaves of `stack` are this stage's [v, 1, Lc, ...]: v
    chunks of Lc layers (stage_layout.py). So are those of `fixed`, by name as in `stack`: arrays of
    the layers that have no gradient.
    """
    executor = _Executor(program, table, layout, shared, stack, fixed or {})
    carry = executor.scan_table(executor.initial_carry(), executor.evaluation_tick)
    return executor.total_losses(carry)


def gradients(
    program: StageProgram,
    table: Table,
    layout: StageLayout,
    shared: Tree,
    stack: Tree,
    totals: tuple[Tree, Tree],
    keep: bool,
    fixed: Mapping[str, jax.Array] | None = None,
) -> tuple[Losses, Losses, Tree, Tree]:
    """Runs a table; returns (losses, side losses, gradients of `shared`, gradients of `stack`).

    Losses, `stack` and `fixed` are as in `losses`. `totals` are zeros shaped as (`shared`,
    `stack`), in the dtype in which gradients are to be accumulated.

    `keep`: the stash holds each layer's residuals until its backward. Otherwise it holds only the
    input of the chunk, and backward runs the chunk's forward again.

    Gradients of `shared` are this stage's part: sum those of weights that every stage holds.
    """
    executor = _Executor(program, table, layout, shared, stack, fixed or {}, keep)
    carry = executor.initial_carry() | executor.initial_backward_carry(totals)
    carry = executor.scan_table(carry, executor.training_tick)
    if not program.frozen:
        executor.run_embed_backward(carry, int(table.leaving_microbatch[-1]))
    # Back from [v, Lc, ...] to the [v, 1, Lc, ...] of a stage's part of the stack.
    stack_gradients = jax.tree.map(lambda total: total[:, None], carry["stack"])
    return *executor.total_losses(carry), carry["shared"], stack_gradients


class _Executor:
    """One stage's view of a table while it is traced."""

    def __init__(
        self,
        program: StageProgram,
        table: Table,
        layout: StageLayout,
        shared: Tree,
        stack: Tree,
        fixed: Mapping[str, jax.Array],
        keep: bool = False,
    ):
        self.program = program
        self.table = table
        self.layout = layout
        self.shared = shared
        self.keep = keep
        # [v, Lc, ...], both
        self.stack, self.fixed = jax.tree.map(lambda weights: weights[:, 0], (stack, dict(fixed)))
        self.stage = jax.lax.axis_index(AXIS)
        self.last = self.stage == table.stages - 1

        # Shapes only: nothing below is computed.
        context = jax.eval_shape(program.context_of, jnp.int32(0))
        self.x = jax.eval_shape(program.embed, shared, context)
        weights, fixed = jax.eval_shape(_first_layer, (self.stack, self.fixed))
        number = jax.ShapeDtypeStruct((), jnp.int32)
        self.layer_arguments = (weights, self.x, (number, fixed, context))
        _, self.side_losses = jax.eval_shape(self.masked_layer, *self.layer_arguments)
        self.head_losses = jax.eval_shape(program.head, shared, self.x, context)

    @cached_property
    def gradient(self) -> LayerGradient:
        """The layer's gradient, taken apart. Evaluation never uses it, so never traces it."""
        return LayerGradient(self.masked_layer, *self.layer_arguments, split=self.table.split)

    def masked_layer(self, weights: Tree, x: jax.Array, rest: Tree) -> tuple[jax.Array, Losses]:
        """Runs the program's layer. A padding layer passes x on; its side losses are 0.

        `rest` are the layer's number, its fixed arrays, and the context of the microbatch. Padding
        is a copy of the last layer, and runs under its number.
        """
        number, fixed, context = rest
        held = {**fixed, **weights} if fixed else weights
        if not self.layout.padding:
            return self.program.layer(held, x, (number, context))
        last = self.layout.layers - 1
        y, side_losses = self.program.layer(held, x, (jnp.minimum(number, last), context))
        real = number <= last
        return jnp.where(real, y, x), _mask(real, side_losses)

    # The carry

    def zeros(self, like: jax.ShapeDtypeStruct, *leading: int) -> jax.Array:
        return jnp.zeros((*leading, *like.shape), like.dtype)

    def initial_carry(self) -> Carry:
        """Returns the buffers of the forward: zeros, shaped as below.

        A ring has one slot more than the table uses, the trash: stages without work write to it.
        With x the shape of an activation and n the slots of the stash:

        - activation: x, received from the previous stage at the end of the last tick
        - embedded: x, the embedding of the microbatch that enters stage 0 at the next tick; here,
          of the one that enters at the first
        - inputs: [n + 1, x], activations waiting for their forward, if any wait
        - losses, side_losses: by name, this stage's part of the sums
        """
        carry = {
            "activation": self.zeros(self.x),
            "embedded": self.embed(int(self.table.entering_microbatch[0])),
            "losses": jax.tree.map(self.zeros, self.head_losses),
            "side_losses": jax.tree.map(self.zeros, self.side_losses),
        }
        if self.table.activations_wait:
            carry["inputs"] = self.zeros(self.x, self.table.slots + 1)
        return carry

    def initial_backward_carry(self, totals: tuple[Tree, Tree]) -> Carry:
        """Returns the buffers of the backward, and `totals`, in which gradients accumulate.

        With Lc the layers of a chunk and v the chunks:

        - cotangent: x, made in the last tick and not yet sent
        - stash: [n + 1, Lc, ...] for each saved residual, or [n + 1, x], the chunk's input
        - cotangents: [slots + 1, x], those waiting for their backward, if any wait
        - deferred: [slots + 1, Lc, ...], inputs of the weight gradient, if backward is split
        - shared, stack: gradients; those of the stack are [v, Lc, ...]
        """
        table = self.table
        layers = self.layout.per_chunk
        shared_totals, stack_totals = totals
        saved = [self.zeros(leaf, table.slots + 1, layers) for leaf in self.gradient.saved]
        carry = {
            "cotangent": self.zeros(self.x),
            "stash": saved if self.keep else self.zeros(self.x, table.slots + 1),
            "shared": shared_totals,
            "stack": jax.tree.map(lambda total: total[:, 0], stack_totals),
        }
        if table.cotangent_slots:
            carry["cotangents"] = self.zeros(self.x, table.cotangent_slots + 1)
        if table.split:
            slots = table.deferred_slots + 1
            carry["deferred"] = [self.zeros(leaf, slots, layers) for leaf in self.gradient.deferred]
        return carry

    def total_losses(self, carry: Carry) -> tuple[Losses, Losses]:
        """Returns (losses of the head, side losses of the layers), summed over the stages."""
        return jax.lax.psum((carry["losses"], carry["side_losses"]), AXIS)

    # The ticks

    def scan_table(self, carry: Carry, tick: Tick) -> Carry:
        """Runs `tick` on every row of the table and returns the last carry."""
        columns = {}
        # The table is a constant of the program; each stage picks its own column [ticks] of it.
        for name in STAGE_COLUMNS:
            columns[name] = jnp.asarray(getattr(self.table, name))[:, self.stage]
        for name in SHARED_COLUMNS:
            columns[name] = jnp.asarray(getattr(self.table, name))
        for repeated in rounds(self.table):
            carry = self.scan_round(repeated, carry, tick, columns)
        return carry

    def scan_round(self, round: RepeatedPhases, carry: Carry, tick: Tick, columns: Cell) -> Carry:
        """Scans each phase of a round; if the round repeats, scans those scans.

        So the size of the program depends on the number of phases, not of microbatches.
        """
        first = round.phases[0].start
        length = round.ticks * round.repeats
        cells = {name: column[first : first + length] for name, column in columns.items()}

        def run_phases(carry, cells):
            for phase in round.phases:
                own = slice(phase.start - first, phase.stop - first)
                rows = {name: column[own] for name, column in cells.items()}

                def run_tick(carry, cell, phase=phase):
                    return tick(phase, carry, cell), None

                carry, _ = jax.lax.scan(run_tick, carry, rows)
            return carry, None

        if round.repeats == 1:
            carry, _ = run_phases(carry, cells)
            return carry
        folded = {
            name: column.reshape(round.repeats, round.ticks) for name, column in cells.items()
        }
        carry, _ = jax.lax.scan(run_phases, carry, folded)
        return carry

    def evaluation_tick(self, phase: Phase, carry: Carry, cell: Cell) -> Carry:
        """Runs one tick of a forward-only pass."""
        carry = dict(carry)
        self.store_activation(phase, carry, cell)
        if phase.forward:
            y = self.run_forward(phase, carry, cell)
            if phase.head:
                head_losses, _ = self.head_losses_of(self.shared, y, cell)
                carry["losses"] = _accumulate(carry["losses"], head_losses)
        self.embed_next(phase, carry, cell)
        return carry

    def training_tick(self, phase: Phase, carry: Carry, cell: Cell) -> Carry:
        """Runs one tick of training.

        The order is: the embedding's backward, arrivals, forward, head, backward, weight gradient,
        and the next tick's embedding.
        """
        carry = dict(carry)
        table = self.table
        if phase.embed_backward and not self.program.frozen:
            self.run_embed_backward(carry, cell["embed_backward_microbatch"])
        self.store_activation(phase, carry, cell)
        cotangent = self.zeros(self.x)
        if phase.arrive_backward:
            # The cotangent of the last tick is sent here, not where it was made, so that it can
            # travel while this tick's forward computes.
            cotangent = self.send_to_previous(carry["cotangent"])
            if table.cotangent_slots:
                slot = cell["arrive_backward_slot"]
                carry["cotangents"] = _write(carry["cotangents"], slot, cotangent)
        if phase.forward:
            y = self.run_forward(phase, carry, cell)
            if phase.head:
                dy = self.run_head(carry, y, cell)
                if table.cotangent_slots:
                    carry["cotangents"] = _write(carry["cotangents"], cell["head_slot"], dy)
                else:
                    # No cotangent ever waits: the last stage turns round within the tick.
                    turns_round = self.last & (cell["backward_chunk"] == table.chunks - 1)
                    cotangent = jnp.where(turns_round, dy, cotangent)
        if phase.backward:
            if table.cotangent_slots:
                cotangent = _read(carry["cotangents"], cell["cotangent_slot"])
            carry["cotangent"] = self.run_backward(carry, cotangent, cell)
        if phase.weight:
            self.run_weight(carry, cell)
        self.embed_next(phase, carry, cell)
        return carry

    # The work of one tick. Each of these updates the carry in place.

    def store_activation(self, phase: Phase, carry: Carry, cell: Cell) -> None:
        """Puts the activation that has arrived into its slot, if activations wait at all."""
        if self.table.activations_wait and phase.arrive_forward:
            slot = cell["arrive_forward_slot"]
            carry["inputs"] = _write(carry["inputs"], slot, carry["activation"])

    def run_forward(self, phase: Phase, carry: Carry, cell: Cell) -> jax.Array:
        """Runs one chunk's forward, sends its output to the next stage, and returns it.

        Adds the side losses of its layers. In training it stashes what backward will need.
        """
        if self.table.activations_wait:
            x = _read(carry["inputs"], cell["forward_slot"])
        else:
            x = carry["activation"]
        if phase.enter:
            enters = (self.stage == 0) & (cell["forward_chunk"] == 0)
            x = jnp.where(enters, carry["embedded"], x)
        y, side_losses, kept = self.run_layers("forward", x, cell, self.keep)
        if "stash" in carry:
            stashed = kept if self.keep else x
            carry["stash"] = _write(carry["stash"], cell["forward_slot"], stashed)
        side_losses = _mask(cell["forward_microbatch"] >= 0, side_losses)
        carry["side_losses"] = _accumulate(carry["side_losses"], side_losses)
        # Sent now, so that it can travel while this tick's backward computes.
        carry["activation"] = self.send_to_next(y)
        return y

    def head_losses_of(self, shared: Tree, y: jax.Array, cell: Cell) -> tuple[Losses, jax.Array]:
        """Returns (this stage's 1/p of the losses, whether a microbatch leaves the last stage).

        The sum over stages brings the last stage's y to all of them; the others add zeros.
        """
        leaves = cell["head_microbatch"] >= 0
        # A select: y of other stages belongs to other microbatches, or is stale and perhaps NaN.
        x = self.program.sum_over_stages(jnp.where(self.last & leaves, y, 0))
        head_losses = self.program.head(shared, x, self.context(cell["head_microbatch"]))
        share = jax.tree.map(lambda loss: loss / self.table.stages, _mask(leaves, head_losses))
        return share, leaves

    def run_head(self, carry: Carry, y: jax.Array, cell: Cell) -> jax.Array:
        """Adds the head's losses and the gradients of its weights; returns the cotangent of y."""

        def losses_of(shared, y):
            return self.head_losses_of(shared, y, cell)

        head_losses, pull, leaves = jax.vjp(losses_of, self.shared, y, has_aux=True)
        dshared, dy = pull(self.cotangents_of(jax.tree.map(jnp.ones_like, head_losses)))
        carry["losses"] = _accumulate(carry["losses"], head_losses)
        carry["shared"] = _accumulate(carry["shared"], _mask(leaves, dshared))
        return dy

    def cotangents_of(self, counts: Losses) -> Losses:
        """Returns the cotangent of each loss, given how often the loss counts in the sum."""
        cotangent = self.program.cotangent
        if cotangent is None:
            return counts
        return jax.tree.map(lambda count: count * cotangent, counts)

    def run_backward(self, carry: Carry, dy: jax.Array, cell: Cell) -> jax.Array:
        """Runs one chunk's backward and returns the cotangent of its input.

        Adds the gradients of the chunk's weights. If the table splits backward, it stores what the
        weight gradient will need instead.
        """
        has_work = cell["backward_microbatch"] >= 0
        # Side losses are added unscaled: the cotangent of each is that of the sum.
        counts = jax.tree.map(lambda loss: has_work.astype(loss.dtype), self.side_losses)
        dsides = self.cotangents_of(counts)
        saved = _read(carry["stash"], cell["backward_slot"])
        if not self.keep:
            _, _, saved = self.run_layers("backward", saved, cell, keep=True)
        weights, fixed, context = self.chunk_inputs("backward", cell)

        # The chunk's layers in reverse. The carry is the cotangent between two layers; what is
        # stacked up is, for each layer, its weights' gradient or what is deferred.
        def layer_backward(dy, layer):
            weights, fixed, number, saved = layer
            rest = (number, fixed, context)
            if self.table.split:
                return self.gradient.input_gradient(weights, rest, saved, dy, dsides)
            dweights, dx = self.gradient.backward(weights, rest, saved, dy, dsides)
            return dx, dweights

        layers = (weights, fixed, self.layer_numbers(cell["backward_chunk"]), saved)
        dx, made = jax.lax.scan(layer_backward, dy, layers, reverse=True)
        if self.table.split:
            # A stage without work writes garbage to the trash slot, so no mask is needed.
            carry["deferred"] = _write(carry["deferred"], cell["defer_slot"], made)
        else:
            made = _mask(self.learning(has_work, cell["backward_chunk"]), made)
            carry["stack"] = _accumulate_at(carry["stack"], cell["backward_chunk"], made)
        return dx

    def run_weight(self, carry: Carry, cell: Cell) -> None:
        """Adds the weight gradients that one chunk's split backward has put off."""
        weights, fixed, context = self.chunk_inputs("weight", cell)
        saved = _read(carry["stash"], cell["weight_slot"])
        deferred = _read(carry["deferred"], cell["resume_slot"])

        def layer_weight(_, layer):
            weights, fixed, number, saved, deferred = layer
            rest = (number, fixed, context)
            return None, self.gradient.weight_gradient(weights, rest, saved, deferred)

        layers = (weights, fixed, self.layer_numbers(cell["weight_chunk"]), saved, deferred)
        _, made = jax.lax.scan(layer_weight, None, layers)
        made = _mask(self.learning(cell["weight_microbatch"] >= 0, cell["weight_chunk"]), made)
        carry["stack"] = _accumulate_at(carry["stack"], cell["weight_chunk"], made)

    def embed(self, microbatch: jax.Array | int) -> jax.Array:
        """Returns the embedding x of a microbatch; of the first one if there is none (-1)."""
        return self.program.embed(self.shared, self.context(microbatch))

    def embed_next(self, phase: Phase, carry: Carry, cell: Cell) -> None:
        """Embeds the microbatch that enters stage 0 at the next tick.

        Nothing else in this tick needs it, so its sum over the stages can overlap with the layers.
        """
        if phase.embed:
            carry["embedded"] = self.embed(cell["embed_microbatch"])

    def run_embed_backward(self, carry: Carry, microbatch: jax.Array | int) -> None:
        """Adds the embedding's gradients of the microbatch whose backward has just left stage 0."""
        # The embedding runs again for its vjp: cheaper than keeping residuals for a round trip.
        context = self.context(microbatch)
        entered = (self.stage == 0) & (microbatch >= 0)
        _, pull = jax.vjp(lambda shared: self.program.embed(shared, context), self.shared)
        (dshared,) = pull(jnp.where(entered, carry["cotangent"], 0))
        carry["shared"] = _accumulate(carry["shared"], dshared)

    # What the work reads

    def run_layers(
        self, kind: str, x: jax.Array, cell: Cell, keep: bool
    ) -> tuple[jax.Array, Losses, Tree]:
        """Runs, in a scan, the layers of the chunk of this kind of work.

        Returns (y, sum of their side losses, residuals [Lc, ...] if `keep`, else None).
        """
        weights, fixed, context = self.chunk_inputs(kind, cell)

        def run_layer(x, layer):
            weights, fixed, number = layer
            rest = (number, fixed, context)
            if keep:
                y, side_losses, saved = self.gradient.forward(weights, x, rest)
                return y, (side_losses, saved)
            y, side_losses = self.masked_layer(weights, x, rest)
            return y, (side_losses, None)

        layers = (weights, fixed, self.layer_numbers(cell[f"{kind}_chunk"]))
        y, (side_losses, saved) = jax.lax.scan(run_layer, x, layers)
        return y, jax.tree.map(jnp.sum, side_losses), saved

    def chunk_inputs(self, kind: str, cell: Cell) -> tuple[Tree, Tree, Tree]:
        """Returns the inputs of a kind of work.

        These are (weights [Lc, ...] of the chunk, its fixed arrays, context of the microbatch).
        """
        weights, fixed = _read((self.stack, self.fixed), cell[f"{kind}_chunk"])
        return weights, fixed, self.context(cell[f"{kind}_microbatch"])

    def context(self, microbatch: jax.Array | int) -> Tree:
        """Returns the context of a microbatch; that of the first for a stage without work (-1)."""
        return self.program.context_of(jnp.maximum(microbatch, 0))

    def layer_numbers(self, chunk: jax.Array) -> jax.Array:
        """Returns the numbers [Lc] in the model of the layers in this stage's chunk."""
        layers = self.layout.per_chunk
        first = (jnp.maximum(chunk, 0) * self.layout.stages + self.stage) * layers
        return first + jnp.arange(layers, dtype=jnp.int32)

    def learning(self, has_work: jax.Array, chunk: jax.Array) -> jax.Array:
        """Returns whether a chunk's gradients count: [], or [Lc] if some layers are frozen.

        The chunk at the edge runs the backward of all its layers, whose bodies are one.
        """
        if not self.program.frozen:
            return has_work
        return has_work & (self.layer_numbers(chunk) >= self.program.frozen)

    def send_to_next(self, y: jax.Array) -> jax.Array:
        """Sends y to the next stage; returns what the previous stage has sent.

        With several chunks the last stage sends to the first, for the next chunk. With one chunk
        stage 0 receives zeros.
        """
        stages = self.table.stages
        hops = [(stage, (stage + 1) % stages) for stage in range(stages)]
        if self.table.chunks == 1:
            hops = hops[:-1]
        return jax.lax.ppermute(y, AXIS, hops)

    def send_to_previous(self, dx: jax.Array) -> jax.Array:
        """Sends a cotangent the other way; returns what the next stage has sent."""
        stages = self.table.stages
        hops = [(stage, (stage - 1) % stages) for stage in range(stages)]
        if self.table.chunks == 1:
            hops = hops[1:]
        return jax.lax.ppermute(dx, AXIS, hops)


# Ring buffers and totals: trees whose leaves have a leading dim of slots, or of chunks.


def _read(rings: Tree, at: jax.Array) -> Tree:
    """Returns element `at` of each leaf's leading dim; the first for a stage without work (-1)."""

    def read(ring):
        return jax.lax.dynamic_index_in_dim(ring, jnp.maximum(at, 0), 0, keepdims=False)

    return jax.tree.map(read, rings)


def _write(rings: Tree, at: jax.Array, values: Tree) -> Tree:
    """Returns the rings with `values` as element `at`; the first for a stage without work (-1)."""

    def write(ring, value):
        value = value.astype(ring.dtype)
        return jax.lax.dynamic_update_index_in_dim(ring, value, jnp.maximum(at, 0), 0)

    return jax.tree.map(write, rings, values)


def _accumulate(totals: Tree, gradients: Tree) -> Tree:
    """Adds gradients to totals, in the dtype of the totals."""

    def add(total, gradient):
        return total + gradient.astype(total.dtype)

    return jax.tree.map(add, totals, gradients)


def _accumulate_at(totals: Tree, chunk: jax.Array, gradients: Tree) -> Tree:
    """Adds one chunk's gradients [Lc, ...] to the totals [v, Lc, ...] of all chunks.

    Without work (-1) the first chunk is read and written back, so `gradients` must be zero then.
    """
    return _write(totals, chunk, _accumulate(_read(totals, chunk), gradients))


def _mask(has_work: jax.Array, tree: Tree) -> Tree:
    """Returns the tree, or zeros if there is no work: in all of it, or by its leading dim.

    This is a select, not a product: what a stage without work has computed may be NaN.
    """

    def mask(leaf: jax.Array) -> jax.Array:
        inner = range(has_work.ndim, leaf.ndim) if has_work.ndim else ()
        return jnp.where(jnp.expand_dims(has_work, inner), leaf, 0)

    return jax.tree.map(mask, tree)


def _first_layer(stack: Tree) -> Tree:
    """Returns the first chunk's first layer of a stack [v, Lc, ...]."""
    return jax.tree.map(lambda leaf: leaf[0, 0], stack)
