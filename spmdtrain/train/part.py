"""Defines a part: how a feature takes part in the training step.

The step (step.py) and the search for gradients (gradients/) call the hooks of all parts, and know
no feature by name. A feature is one `Part` in a file of its own, and a row in all_parts.py. A
`make_...` returns None for a run that does without this hook.

B: sequences of a microbatch, T: tokens of a sequence, E: width of the stream.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from spmdtrain.models.abstract import Scaling
from spmdtrain.models.context import AroundLayer
from spmdtrain.train.gradients.inputs import StepInputs
from spmdtrain.train.items.item import Item, Value
from spmdtrain.train.setup import Setup

Arrays = Any  # a tree of arrays
Params = dict[str, jax.Array]  # by dotted path
# head_losses(module, x_bte, ctx, microbatch): sums over unmasked tokens, by name.
HeadLosses = Callable[..., dict[str, jax.Array]]

MEASURED = "measured "


def measured(item: str) -> str:
    """Returns the name under which a loss hook returns what is not a loss but a sum over tokens for
    the item of this name: `Taken.made` then has the sum over the whole batch.
    """
    return MEASURED + item


class SumOverData(NamedTuple):
    """A sum of gradients over `data` in place of the plain one.

    `paths(arrays)` are those of the parameters for which it stands in. `sums(own, arrays, step)`
    returns the sums of what each shard has, and the new values of items, by name; `arrays` are
    those of the reading.
    """

    paths: Callable[[Arrays], Any]
    sums: Callable[[Params, Arrays, jax.Array], tuple[Params, dict[str, Value]]]


class Slots(NamedTuple):
    """The arrays by which a loss is differentiated too: in place of their gradients, the backward
    pass returns what it saw. Microbatches are joined by the maximum.

    `zeros(arrays)` makes them, inside the region, given the arrays of the reading.
    `scaling(arrays, slots)` is what the model is bound to, as in `AbstractModel.bind`.
    `seen(slots, cotangent)` returns the new values of items, by name, the same on all devices.
    """

    zeros: Callable[[Arrays], Arrays]
    scaling: Callable[[Arrays, Arrays], Scaling]
    seen: Callable[[Arrays, jax.Array | None], dict[str, Value]]


class Reading(NamedTuple):
    """The arrays that a part brings into the manual region, where gradients are computed, and their
    use there.

    `arrays(params, inputs)` returns them, outside the region; None: there are none. `specs` are
    those at its border. `in_use(arrays)`, once a step, is what hooks find as `ctx.read[NAME]`; if
    it is None, they do not read it. `data_sum`: at most one part of a run has it. `slots`: without
    a pipeline only.
    """

    arrays: Callable[[Params, StepInputs], Arrays | None]
    specs: Any
    in_use: Callable[[Arrays], Arrays] | None = lambda arrays: arrays
    data_sum: SumOverData | None = None
    slots: Slots | None = None


class Graded(NamedTuple):
    """The gradients of a step before the update, for parts that change them; for tracing.

    `gradients`: those of the mean loss over the batch, clipped, at rest. `norm`: before clipping.
    `step`: the 0-based number of the step. `items`: of the state before it.
    """

    gradients: Params
    norm: jax.Array
    step: jax.Array
    items: Mapping[str, Value]


@dataclass(frozen=True)
class Part:
    """A feature of the step, with its hooks, all of them optional.

    `items`: what it keeps in the training state.
    `join(setup)`: the setup with what the feature has to know of the run (`Setup.own`).
    `make_inputs(setup)`: a function of `StepInputs`, which changes the batch or the cotangent.
    `make_reading(setup)`: a `Reading`.
    `make_head_losses(setup, training, table_axes)`: the losses of the head, in place of the others.
    `make_side_losses(setup, table_axes)`: further losses of the head's input, which are added. They
    are sums over tokens: what is not linear in them would depend on how a batch is cut.
    `make_layer(setup)`: `around(run, x, ctx)`, called in place of each layer's `run(x)`. Its losses
    and what it measures are scalars.
    `make_gradients(setup)`: a function of `Graded`, which returns other gradients. Those of a
    router's bias are its load, not a slope: `optimizers.learned` are the paths of the others.
    `shown`: the names of losses that are reported and not minimised.
    """

    name: str
    items: tuple[Item, ...] = ()
    join: Callable[[Setup], Setup] | None = None
    make_inputs: Callable[[Setup], Callable[[StepInputs], StepInputs] | None] | None = None
    make_reading: Callable[[Setup], Reading | None] | None = None
    make_head_losses: Callable[..., HeadLosses | None] | None = None
    make_side_losses: Callable[..., HeadLosses | None] | None = None
    make_layer: Callable[[Setup], AroundLayer | None] | None = None
    make_gradients: Callable[[Setup], Callable[[Graded], Params] | None] | None = None
    shown: tuple[str, ...] = ()


Parts = tuple[Part, ...]
