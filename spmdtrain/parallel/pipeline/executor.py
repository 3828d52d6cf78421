"""Runs any schedule table: the stages of a pipeline tick together, in scans, inside one manual region.

Every stage runs the same program at every tick; a cell without work computes on what lies about and its results are
masked. No branch depends on the stage: a collective inside one would hang or mix up data (jax 0.10 and 0.12). The order
of one tick is that of `schedule`'s docstring and of `_Pipeline.tick`.

The objective is the sum over stages of what each stage computes. The head runs on all stages at once, each with its
share of the vocabulary, so every stage counts 1/p of its loss; the transpose of a sum over stages is then a sum over
stages, and gradients of weights that all stages hold are partial until they are summed over `pipeline`.

Memory: the rings of the table, of its slots and not of its microbatches. Gradients accumulate in place.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.parallel.pipeline.layer_vjp import LayerGradient
from spmdtrain.parallel.pipeline.layout import Layout
from spmdtrain.parallel.pipeline.phases import Phase, rounds
from spmdtrain.parallel.pipeline.schedule import Table
from spmdtrain.parallel.reduce import psum_tree

AXIS = "pipeline"
Tree = Any
Cell = Mapping[str, jax.Array]  # a tick's row of the table, this stage's column
COLUMNS = (
    *("forward_microbatch", "forward_chunk", "forward_slot"),
    *("backward_microbatch", "backward_chunk", "backward_slot"),
    *("weight_microbatch", "weight_chunk", "weight_slot"),
    *("arrive_forward_slot", "arrive_backward_slot", "head_slot", "cotangent_slot", "defer_slot", "resume_slot"),
)
OF_ALL_STAGES = ("embed_microbatch", "head_microbatch", "embed_backward_microbatch")


@dataclass(frozen=True)
class Program:
    """What a pipeline runs. `shared`: the weights outside the layers; `context`: what a microbatch brings along.

    `embed(shared, context) -> x`; `layer(weights, x, (number, context)) -> (y, side loss or None)`; `head(shared, x,
    context) -> sum of the losses`, the same on every stage. `context_of(microbatch)`. Losses are float32 scalars.
    """

    embed: Callable[[Tree, Tree], jax.Array]
    layer: Callable[[Tree, jax.Array, Tree], tuple[jax.Array, jax.Array | None]]
    head: Callable[[Tree, jax.Array, Tree], jax.Array]
    context_of: Callable[[jax.Array], Tree]


def losses(
    program: Program, table: Table, layout: Layout, shared: Tree, stack: Tree
) -> tuple[jax.Array, jax.Array | None]:
    """(sum of the head's losses, of side losses if layers have any) over all microbatches of this batch shard, forward
    only.

    Inside a region manual over `pipeline`; `stack` leaves are this stage's [v, 1, Lc, ...].
    """
    pipeline = _Pipeline(program, table, layout, shared, stack)
    return pipeline.sums(pipeline.run(pipeline.start(), pipeline.forward_tick))


def gradients(
    program: Program, table: Table, layout: Layout, shared: Tree, stack: Tree, totals: tuple[Tree, Tree], keep: bool
) -> tuple[jax.Array, jax.Array | None, Tree, Tree]:
    """(loss, side loss or None, gradients of `shared`, of `stack`), losses as `losses` has them.

    `totals`: zeros to accumulate the gradients in. `keep`: residuals wait for their backward; otherwise the chunk's
    input does and its forward runs again. Gradients of `shared` are this stage's part: sum those of weights that every
    stage holds.
    """
    pipeline = _Pipeline(program, table, layout, shared, stack, keep)
    carry = pipeline.run(pipeline.start() | pipeline.start_backward(totals), pipeline.tick)
    dstack = jax.tree.map(lambda total: total[:, None], carry["stack"])
    return *pipeline.sums(carry), carry["shared"], dstack


class _Pipeline:
    def __init__(self, program: Program, table: Table, layout: Layout, shared: Tree, stack: Tree, keep: bool = False):
        self.program, self.table, self.layout, self.shared, self.keep = program, table, layout, shared, keep
        self.stack = jax.tree.map(lambda weights: weights[:, 0], stack)
        self.stage = jax.lax.axis_index(AXIS)
        self.last = self.stage == table.stages - 1
        context = jax.eval_shape(program.context_of, jnp.int32(0))
        self.x = jax.eval_shape(program.embed, shared, context)
        weights = jax.eval_shape(lambda stack: jax.tree.map(lambda leaf: leaf[0, 0], stack), self.stack)
        self.of_a_layer = weights, self.x, (jax.ShapeDtypeStruct((), jnp.int32), context)
        self.sided = jax.eval_shape(program.layer, *self.of_a_layer)[1] is not None

    @cached_property
    def gradient(self) -> LayerGradient:
        """Training's; evaluation has none."""
        return LayerGradient(self.layer, *self.of_a_layer, split=self.table.split)

    def layer(self, weights: Tree, x: jax.Array, rest: Tree) -> tuple[jax.Array, jax.Array]:
        """The program's layer; where padding lies there is none, and x passes. No side loss is one of 0."""
        y, side = self.program.layer(weights, x, rest)
        side = jnp.float32(0) if side is None else side
        if not self.layout.padding:
            return y, side
        real = rest[0] < self.layout.layers
        return jnp.where(real, y, x), jnp.where(real, side, 0)

    # What is carried from tick to tick

    def zeros(self, shape: jax.ShapeDtypeStruct, *leading: int) -> jax.Array:
        return jnp.zeros((*leading, *shape.shape), shape.dtype)

    def start(self) -> dict[str, Tree]:
        """A ring has one place more than slots: the trash, which cells without work write to."""
        carry = {"activation": self.zeros(self.x), "loss": jnp.float32(0), "side": jnp.float32(0)}
        if self.table.activations_wait:
            carry["inputs"] = self.zeros(self.x, self.table.slots + 1)
        return carry

    def start_backward(self, totals: tuple[Tree, Tree]) -> dict[str, Tree]:
        table, layers = self.table, self.layout.per_chunk
        kept = [self.zeros(leaf, table.slots + 1, layers) for leaf in self.gradient.kept]
        carry = {
            "cotangent": self.zeros(self.x),
            "stash": kept if self.keep else self.zeros(self.x, table.slots + 1),
            "shared": totals[0],
            "stack": jax.tree.map(lambda total: total[:, 0], totals[1]),
        }
        if table.cotangent_slots:
            carry["cotangents"] = self.zeros(self.x, table.cotangent_slots + 1)
        if table.split:
            leading = table.deferred_slots + 1, layers
            carry["deferred"] = [self.zeros(leaf, *leading) for leaf in self.gradient.deferred]
        return carry

    def sums(self, carry: dict[str, Tree]) -> tuple[jax.Array, jax.Array | None]:
        """(loss, side loss or None) of all stages."""
        loss, side = jax.lax.psum((carry["loss"], carry["side"]), AXIS)
        return loss, side if self.sided else None

    # The ticks

    def run(self, carry: dict[str, Tree], tick: Callable[..., dict[str, Tree]]) -> dict[str, Tree]:
        """All rounds of the table: a scan for each phase, and one around the phases of a round that repeats."""
        columns = {name: jnp.asarray(getattr(self.table, name))[:, self.stage] for name in COLUMNS}
        columns |= {name: jnp.asarray(getattr(self.table, name)) for name in OF_ALL_STAGES}

        def ticking(phase, carry, cell):
            return tick(phase, carry, cell), None

        for each in rounds(self.table):
            first, length = each.phases[0].start, each.ticks * each.repeats
            cells = {name: column[first : first + length] for name, column in columns.items()}

            def once(carry, cells, each=each, first=first):
                for phase in each.phases:
                    own = {name: column[phase.start - first : phase.stop - first] for name, column in cells.items()}
                    carry, _ = jax.lax.scan(partial(ticking, phase), carry, own)
                return carry, None

            if each.repeats == 1:
                carry, _ = once(carry, cells)
            else:
                folded = {name: cell.reshape(each.repeats, each.ticks) for name, cell in cells.items()}
                carry, _ = jax.lax.scan(once, carry, folded)
        return carry

    def forward_tick(self, phase: Phase, carry: dict[str, Tree], cell: Cell) -> dict[str, Tree]:
        """A tick of evaluation."""
        carry = self.arrived(phase, carry, cell)
        if phase.forward:
            y = self.forward(phase, carry, cell)
            if phase.head:
                carry["loss"] += self.head_loss(self.shared, y, cell)[0]
        return carry

    def tick(self, phase: Phase, carry: dict[str, Tree], cell: Cell) -> dict[str, Tree]:
        """A tick of training."""
        carry, table, cotangent = self.arrived(phase, carry, cell), self.table, self.zeros(self.x)
        if phase.arrive_backward:  # sent now, not when it was made: it can pass during the forward
            cotangent = self.to_previous(carry["cotangent"])
            if table.cotangent_slots:
                carry["cotangents"] = _put(carry["cotangents"], cell["arrive_backward_slot"], cotangent)
        if phase.forward:
            y = self.forward(phase, carry, cell)
        if phase.head:
            dy = self.head(carry, y, cell)
            if table.cotangent_slots:
                carry["cotangents"] = _put(carry["cotangents"], cell["head_slot"], dy)
            else:
                cotangent = jnp.where(self.last & (cell["backward_chunk"] == table.chunks - 1), dy, cotangent)
        if phase.backward:
            if table.cotangent_slots:
                cotangent = _take(carry["cotangents"], cell["cotangent_slot"])
            carry["cotangent"] = self.backward(carry, cotangent, cell)
            if phase.embed_backward:
                self.embed_backward(carry, cell)
        if phase.weight:
            self.weight(carry, cell)
        return carry

    # The work of one tick

    def arrived(self, phase: Phase, carry: dict[str, Tree], cell: Cell) -> dict[str, Tree]:
        """With the activation that has come in its slot, where activations wait."""
        if not (self.table.activations_wait and phase.arrive_forward):
            return dict(carry)
        return carry | {"inputs": _put(carry["inputs"], cell["arrive_forward_slot"], carry["activation"])}

    def forward(self, phase: Phase, carry: dict[str, Tree], cell: Cell) -> jax.Array:
        """y, which is sent on; the side loss is added; in training what backward needs goes into the stash."""
        waits = self.table.activations_wait
        x = _take(carry["inputs"], cell["forward_slot"]) if waits else carry["activation"]
        if phase.embed:
            embedded = self.program.embed(self.shared, self.context(cell["embed_microbatch"]))
            x = jnp.where((self.stage == 0) & (cell["forward_chunk"] == 0), embedded, x)
        y, side, kept = self.layers("forward", x, cell, self.keep)
        if "stash" in carry:
            carry["stash"] = _put(carry["stash"], cell["forward_slot"], kept if self.keep else x)
        carry["side"] += jnp.where(cell["forward_microbatch"] >= 0, side, 0)
        carry["activation"] = self.to_next(y)
        return y

    def head_loss(self, shared: Tree, y: jax.Array, cell: Cell) -> tuple[jax.Array, jax.Array]:
        """This stage's part of the loss of the microbatch that leaves the last stage, and whether one does."""
        leaves = cell["head_microbatch"] >= 0
        x = psum_tree(jnp.where(self.last & leaves, y, 0), (AXIS,))
        loss = self.program.head(shared, x, self.context(cell["head_microbatch"]))
        return jnp.where(leaves, loss, 0) / self.table.stages, leaves

    def head(self, carry: dict[str, Tree], y: jax.Array, cell: Cell) -> jax.Array:
        """The gradient of y; loss and gradients of the shared weights are added."""
        loss, pull, leaves = jax.vjp(lambda shared, y: self.head_loss(shared, y, cell), self.shared, y, has_aux=True)
        dshared, dy = pull(jnp.float32(1))
        carry["loss"] += loss
        carry["shared"] = _added(carry["shared"], _where(leaves, dshared))
        return dy

    def backward(self, carry: dict[str, Tree], dy: jax.Array, cell: Cell) -> jax.Array:
        """The gradient of the chunk's input; those of its weights are added, or what they need is deferred."""
        there = cell["backward_microbatch"] >= 0
        dside = there.astype(jnp.float32)
        kept = _take(carry["stash"], cell["backward_slot"])
        if not self.keep:
            _, _, kept = self.layers("backward", kept, cell, keep=True)
        weights, rest = self.chunk("backward", cell)

        def layer(dy, given):
            weights, number, kept = given
            rest_of = (number, rest)
            if self.table.split:
                return self.gradient.input_gradient(weights, rest_of, kept, dy, dside)
            return self.gradient.backward(weights, rest_of, kept, dy, dside)[::-1]

        given = (weights, self.numbers(cell["backward_chunk"]), kept)
        dx, made = jax.lax.scan(layer, dy, given, reverse=True)
        if self.table.split:
            carry["deferred"] = _put(carry["deferred"], cell["defer_slot"], made)
        else:
            carry["stack"] = self.added(carry["stack"], _where(there, made), cell["backward_chunk"])
        return dx

    def weight(self, carry: dict[str, Tree], cell: Cell) -> None:
        """The weight gradients that were put off."""
        weights, rest = self.chunk("weight", cell)
        kept, deferred = _take(carry["stash"], cell["weight_slot"]), _take(carry["deferred"], cell["resume_slot"])

        def layer(_, given):
            weights, number, kept, deferred = given
            return None, self.gradient.weight_gradient(weights, (number, rest), kept, deferred)

        given = (weights, self.numbers(cell["weight_chunk"]), kept, deferred)
        _, made = jax.lax.scan(layer, None, given)
        made = _where(cell["weight_microbatch"] >= 0, made)
        carry["stack"] = self.added(carry["stack"], made, cell["weight_chunk"])

    def embed_backward(self, carry: dict[str, Tree], cell: Cell) -> None:
        context = self.context(cell["embed_backward_microbatch"])
        entered = (self.stage == 0) & (cell["embed_backward_microbatch"] >= 0)
        _, pull = jax.vjp(lambda shared: self.program.embed(shared, context), self.shared)
        carry["shared"] = _added(carry["shared"], pull(jnp.where(entered, carry["cotangent"], 0))[0])

    # What the work needs

    def layers(self, kind: str, x: jax.Array, cell: Cell, keep: bool) -> tuple[jax.Array, jax.Array, Tree]:
        """(y, sum of side losses, residuals [Lc, ...] if to keep) of the chunk that `kind` of work is at."""
        weights, rest = self.chunk(kind, cell)

        def layer(x, given):
            weights, number = given
            if keep:
                y, side, kept = self.gradient.forward(weights, x, (number, rest))
                return y, (side, kept)
            y, side = self.layer(weights, x, (number, rest))
            return y, (side, None)

        y, (sides, kept) = jax.lax.scan(layer, x, (weights, self.numbers(cell[f"{kind}_chunk"])))
        return y, sides.sum(), kept

    def chunk(self, kind: str, cell: Cell) -> tuple[Tree, Tree]:
        """(the weights [Lc, ...] of the chunk, the context of the microbatch) that `kind` of work is at."""
        return _take(self.stack, cell[f"{kind}_chunk"]), self.context(cell[f"{kind}_microbatch"])

    def context(self, microbatch: jax.Array) -> Tree:
        return self.program.context_of(jnp.maximum(microbatch, 0))

    def numbers(self, chunk: jax.Array) -> jax.Array:
        """[Lc] of the layers of this stage's chunk."""
        layers = self.layout.per_chunk
        return (jnp.maximum(chunk, 0) * self.layout.stages + self.stage) * layers + jnp.arange(layers, dtype=jnp.int32)

    def added(self, totals: Tree, gradients: Tree, chunk: jax.Array) -> Tree:
        """Gradients [Lc, ...] added to those of all chunks."""
        return _put(totals, chunk, _added(_take(totals, chunk), gradients))

    def to_next(self, y: jax.Array) -> jax.Array:
        stages = self.table.stages
        ring = self.table.chunks > 1  # the last stage sends to the first, for the next chunk
        return jax.lax.ppermute(y, AXIS, [(at, (at + 1) % stages) for at in range(stages - (not ring))])

    def to_previous(self, dx: jax.Array) -> jax.Array:
        stages = self.table.stages
        ring = self.table.chunks > 1
        return jax.lax.ppermute(dx, AXIS, [(at, (at - 1) % stages) for at in range(not ring, stages)])


def _take(rings: Tree, at: jax.Array) -> Tree:
    """Element `at` (-1: the first) of each leaf's leading dim."""
    return jax.tree.map(lambda ring: jax.lax.dynamic_index_in_dim(ring, jnp.maximum(at, 0), 0, keepdims=False), rings)


def _put(rings: Tree, at: jax.Array, values: Tree) -> Tree:
    def one(ring, value):
        return jax.lax.dynamic_update_index_in_dim(ring, value.astype(ring.dtype), jnp.maximum(at, 0), 0)

    return jax.tree.map(one, rings, values)


def _added(totals: Tree, gradients: Tree) -> Tree:
    return jax.tree.map(lambda total, gradient: total + gradient.astype(total.dtype), totals, gradients)


def _where(there: jax.Array, tree: Tree) -> Tree:
    """The tree, or zeros: what a cell without work has computed may be anything, even NaN."""
    return jax.tree.map(lambda leaf: jnp.where(there, leaf, 0), tree)
