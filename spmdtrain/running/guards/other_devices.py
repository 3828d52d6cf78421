"""Takes every n-th step twice, the second time with its shards on other devices.

This reveals a device that computes wrongly without an error, even if no other device holds a copy
of its shard: the same step from the same state gives other bits once the device holds another
shard. The step of the run is compared with one in which every device holds its neighbour's shards.
If they differ, it is taken again with only some devices exchanged: the bits change if and only if
the faulty device is among them, so halving names it in a handful of steps.

Meta found such devices by hand in the training of Llama 3 (Grattafiori et al. 2024, section 3.3.4);
Dixit et al. 2021, "Silent data corruptions at scale", measure how common they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from spmdtrain.config.errors import ConfigError, CorruptedError
from spmdtrain.running.guards.replicas import begin_sums, read_sums
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.train.batch import Batch
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard_on
from spmdtrain.train.state import TrainState
from spmdtrain.train.step import make_step

Step = Callable[[TrainState, Batch], tuple[TrainState, Any]]
Order = tuple[int, ...]  # for each position in the mesh: the position whose device takes its shards
Bits = tuple[bytes, dict[str, bytes]]  # sums of the state by position, and the figures


class OtherDevices:
    """A step that checks itself: call it like the compiled step `step` of `setup`.

    Every `every`-th call is taken again, with a copy of the state from before it. Raises
    CorruptedError if the results differ, and ConfigError if a process has only one device.
    `make(setup)` makes the step of a setup on a mesh whose devices stand in another order.
    """

    def __init__(
        self,
        setup: Setup,
        step: Step,
        every: int,
        reporter: Reporter,
        make: Callable[[Setup], Step] | None = None,
    ):
        self._setup = setup
        self._step = step
        self._every = every
        self._reporter = reporter
        self._make = make or _compiled
        self._steps: dict[Order, tuple[Mesh, Step]] = {}
        self._calls = 0
        self._groups = _positions_by_process(setup.mesh)
        if min(map(len, self._groups)) < 2:
            raise ConfigError(
                f"guard.replay_check={every} needs two devices in each process, which exchange "
                "their shards",
                found="a process with one",
                fix="--set guard.replay_check=0",
            )

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        """Takes the step, and repeats it on other devices if a check is due."""
        self._calls += 1
        if self._calls % self._every:
            return self._step(state, batch)
        before = _moved((state, batch), self._setup.mesh, self._setup.mesh)
        after, metrics = self._step(state, batch)
        here = _bits(after, metrics, self._setup.mesh)
        everybody = self._rotated(range(self._setup.mesh.size))
        assert everybody is not None, "each process has two devices or more"
        if self._taken(before, everybody) != here:
            self._accuse(before, here, int(after.step))
        return after, metrics

    def _taken(self, before: tuple[TrainState, Batch], order: Order) -> Bits:
        """Returns the bits of the step from the kept state and batch, with shards exchanged as in
        `order`.
        """
        if order not in self._steps:
            mesh = _reordered(self._setup.mesh, order)
            self._steps[order] = mesh, self._make(_on(self._setup, mesh))
        mesh, step = self._steps[order]
        state, batch = _moved(before, self._setup.mesh, mesh)
        return _bits(*step(state, batch), mesh)

    def _accuse(self, before: tuple[TrainState, Batch], here: Bits, number: int) -> None:
        """Finds the faulty device, and raises CorruptedError."""
        positions = [at for group in self._groups for at in group]
        if self._taken(before, tuple(range(len(positions)))) != here:
            self._raise(number, [], "a device computed what it does not compute again")
        suspects = positions
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            moved = self._rotated(self._with_partner(half, suspects))
            if moved is None:
                break
            same = self._taken(before, moved) == here
            suspects = [at for at in suspects if at not in half] if same else half
        self._raise(
            number, suspects, "computes something else from the same shards than other devices"
        )

    def _with_partner(self, half: Sequence[int], suspects: Sequence[int]) -> list[int]:
        """Returns positions that exchange shards: `half`, and a healthy one if a process has only
        one.
        """
        chosen = list(half)
        for group in self._groups:
            mine = [at for at in group if at in half]
            if len(mine) == 1:
                healthy = [at for at in group if at not in suspects]
                chosen += healthy[:1]
        return chosen

    def _rotated(self, positions: Sequence[int]) -> Order | None:
        """Returns the order in which these positions rotate their shards within each process.

        None if one of them has none to exchange with.
        """
        order = list(range(self._setup.mesh.size))
        for group in self._groups:
            mine = [at for at in group if at in positions]
            if len(mine) == 1:
                return None
            for at, neighbour in zip(mine, mine[1:] + mine[:1], strict=True):
                order[at] = neighbour
        return tuple(order)

    def _raise(self, step: int, suspects: Sequence[int], what: str) -> None:
        devices = [self._setup.mesh.devices.flat[at] for at in suspects]
        self._reporter.event("corrupted", step, devices=[int(device.id) for device in devices])
        named = " or ".join(f"device {device.id} ({device.device_kind})" for device in devices)
        raise CorruptedError(
            f"step {step} gives other bits with its shards on other devices: "
            f"{f'{named} ' if named else ''}{what}",
            fix="the same command, which resumes from the newest checkpoint; without that device, "
            "if it happens again",
        )


def _positions_by_process(mesh: Mesh) -> list[list[int]]:
    """Returns the positions in the flattened mesh that the devices of each process have."""
    groups: dict[int, list[int]] = {}
    for at, device in enumerate(mesh.devices.flat):
        groups.setdefault(device.process_index, []).append(at)
    return list(groups.values())


def _reordered(mesh: Mesh, order: Order) -> Mesh:
    devices = mesh.devices.ravel()[np.array(order)].reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _on(setup: Setup, mesh: Mesh) -> Setup:
    """Returns the same setup on another mesh of the same shape."""
    rules = setup.update_rules
    moved = shard_on(
        setup.config,
        mesh,
        setup.make,
        optimizer=lambda path, parameter: rules.get(path),  # noqa: ARG005
        loss=setup.loss,
    )
    return replace(moved, learning_rate=setup.learning_rate)


def _compiled(setup: Setup) -> Step:
    return make_step(setup).lower(setup.state, setup.batch).compile()


def _moved(tree: Any, mesh: Mesh, to: Mesh) -> Any:
    """Returns copies of arrays of `mesh`, each shard on the device at its position in `to`."""
    target = dict(zip(mesh.devices.flat, to.devices.flat, strict=True))

    def move(x: jax.Array) -> jax.Array:
        shards = [
            jax.device_put(shard.data, target[shard.device], may_alias=False)
            for shard in x.addressable_shards
        ]
        assert isinstance(x.sharding, NamedSharding), "a run shards its arrays over its mesh"
        sharding = NamedSharding(to, x.sharding.spec)
        return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)

    return jax.tree.map(move, tree)


def _bits(state: TrainState, metrics: Any, mesh: Mesh) -> Bits:
    """Returns what each position in the mesh holds of each leaf, as sums, and the figures."""
    *_, sums = begin_sums(mesh, state)
    figures = {name: np.asarray(value).tobytes() for name, value in metrics.items()}
    return read_sums(sums).tobytes(), figures
