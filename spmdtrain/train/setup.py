"""Defines the setup of a run: mesh, rules, abstract model, abstract state, and what follows from
them.

It is one frozen value, which `shard` (shard.py) makes once. Steps, gradients, restore, the run and
the planner take it; no other code derives a spec.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.models.choose import MakeModel
from spmdtrain.parallel.axes import Rules
from spmdtrain.parallel.copies import Copies
from spmdtrain.parallel.padding import Padding
from spmdtrain.parallel.reduce import Reduction
from spmdtrain.train.batch import (
    Batch,
    BatchArrays,
    BatchShape,
    Samples,
    abstract_batch,
    to_devices,
)
from spmdtrain.train.items.item import Specs
from spmdtrain.train.items.items import Items
from spmdtrain.train.joined import Joined
from spmdtrain.train.layer_loop import scans_layers
from spmdtrain.train.state import TrainState
from spmdtrain.train.token_loss import TokenLoss
from spmdtrain.train.updates import optimizers
from spmdtrain.train.updates.learning_rates import LearningRate

if TYPE_CHECKING:
    from spmdtrain.parallel.context.context_method import ContextMethod
    from spmdtrain.pipeline.schedule import Table


@dataclass(frozen=True)
class Setup:
    """Everything that a training step consists of.

    Specs and reductions are by dotted parameter path.
    """

    config: RunConfig  # with its vocabulary resolved
    make: MakeModel
    mesh: Mesh
    rules: Rules
    model: AbstractModel
    batch_shape: BatchShape
    # How attention reaches the keys of other devices; None if each has whole sequences.
    context_method: "ContextMethod | None"
    update_rules: optimizers.UpdateRules  # the rule of each parameter that is not frozen
    learning_rate: LearningRate  # of a 0-based step, a float32 scalar
    loss: TokenLoss | None  # None: cross-entropy, as the settings shape it
    pipeline: "Table | None"  # its schedule; None if the mesh has one stage
    specs: Specs  # specs of parameters at rest, and of their reduced gradients, moments and updates
    padding: Padding  # of the parameters, if the mesh does not divide a dim
    reductions: Mapping[str, Reduction]  # of the gradients that a shard has accumulated
    copies: Mapping[str, Copies]  # of the weights, if several devices share one sequence
    gathered: Mapping[str, tuple[str, ...]]  # the axes over which a layer gathers each weight
    items: Items  # that states may have besides weights and optimizer state
    state: TrainState  # abstract: shapes, dtypes and shardings
    own: Mapping[str, Joined] = field(default_factory=dict)  # what parts know of the run, by part
    batch_arrays: BatchArrays = field(default_factory=dict)  # what parts add to a batch

    @property
    def frozen(self) -> int:
        """The first layers of the stack that have no gradient; with several kinds, its rounds."""
        return self.model.frozen_rounds(self.config)

    @property
    def gathers_by_layer(self) -> bool:
        """True if layers gather weights for their own use, one layer at a time.

        They do without a pipeline. With one, a weight is gathered once for all ticks.
        """
        return any(self.gathered.values()) and self.pipeline is None

    @property
    def platform(self) -> str:
        """The platform of the devices, as jax names it."""
        return self.mesh.devices.flat[0].platform

    @property
    def scans_layers(self) -> bool:
        """True if stacks run their layers as one loop; otherwise each layer is written out."""
        return scans_layers(self.config, self.rules.sizes, self.mesh.devices.flat[0].device_kind)

    @property
    def context_line(self) -> str:
        """The line that a run prints about `context_method`; "" if there is none."""
        return self.context_method.line if self.context_method else ""

    @property
    def zigzag(self) -> int:
        """The number of devices for which tokens are in zigzag order; 1: they keep theirs."""
        return self.context_method.zigzag if self.context_method else 1

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """An abstract training batch."""
        return abstract_batch(
            self.batch_shape, self.config, self.mesh, self.rules, self.zigzag, self.batch_arrays
        )

    def to_devices(self, samples: Samples, ids: np.ndarray) -> Batch:
        """Returns the samples `ids` [global_batch] as a batch of this run: see `to_devices`."""
        method = self.context_method
        return to_devices(samples, ids, self.batch_shape, self.mesh, self.rules, method)


def check_setup(setup: Any) -> None:
    """Raises ConfigError if a caller passes anything but a setup."""
    if not isinstance(setup, Setup):
        kind = type(setup).__name__
        raise ConfigError("setup= takes a Setup", found=kind, fix="st.shard(config)")
