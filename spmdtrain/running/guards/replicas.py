"""Checks that devices holding copies of one array hold the same bits; if not, one is broken.

Every `guard.replica_check` steps, and before each save, each device sums its part of every leaf of
the state (fingerprint.py). If copies differ, the device whose sums stand alone is named, and the
run ends before it saves, so the newest checkpoint precedes the fault. The answer is read one step
later, so asking costs no wait; only before a save is it awaited.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmdtrain.checkpoints.leaves.fingerprint import replica_axes, sums_of_each
from spmdtrain.config.errors import CorruptedError
from spmdtrain.parallel.regions import manual_region
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.train.state import TrainState


class ReplicaCheck:
    """The comparison of the copies of a state. `every`: steps between comparisons; 0: never.

    Raises CorruptedError in all processes if copies differ.
    """

    def __init__(self, mesh: Mesh, every: int, reporter: Reporter):
        self._mesh = mesh
        self._every = every if mesh.size > 1 else 0
        self._reporter = reporter
        self._asked: tuple[int, list[str], tuple[P, ...], jax.Array, jax.Array] | None = None

    def after_step(self, step: int, state: TrainState) -> None:
        """Reads the answer for the last step checked, and starts a check of this one if due."""
        self._hear()
        if self._every and step % self._every == 0:
            self._ask(step, state)

    def before_save(self, step: int, state: TrainState) -> None:
        """Starts a check and waits for its answer."""
        self._hear()
        if self._every:
            self._ask(step, state)
            self._hear()

    def _ask(self, step: int, state: TrainState) -> None:
        self._asked = step, *begin_sums(self._mesh, state)

    def _hear(self) -> None:
        if self._asked is None:
            return
        step, names, specs, differ, sums = self._asked
        self._asked = None
        if not bool(differ):
            return
        difference = compare(
            read_sums(sums), [replica_axes(self._mesh, spec) for spec in specs], self._mesh.shape
        )
        devices = self._mesh.devices.flat
        who = " or ".join(_named(devices[at]) for at in difference.devices)
        leaf = names[difference.leaf]
        more = f" and {difference.leaves - 1} more" if difference.leaves > 1 else ""
        self._reporter.event(
            "corrupted", step, devices=[int(devices[at].id) for at in difference.devices], leaf=leaf
        )
        raise CorruptedError(
            f"after step {step} {who} holds a copy of {leaf}{more} that differs from the others",
            fix="the same command, which resumes from the newest checkpoint; without that device, "
            "if it happens again",
        )


def begin_sums(
    mesh: Mesh, state: TrainState
) -> tuple[list[str], tuple[P, ...], jax.Array, jax.Array]:
    """Starts summing what each device holds of each leaf of a state.

    Returns the names and specs of the leaves, whether copies differ, and the sums for `read_sums`.
    """
    trees = (state.params, state.opt_state, state.items)
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    names = [jax.tree_util.keystr(path[1:], simple=True, separator=".") for path, _ in leaves]
    specs = tuple(leaf.sharding.spec for _, leaf in leaves)
    differ, sums = _program(mesh, specs)([leaf for _, leaf in leaves])
    return names, specs, differ, sums


def read_sums(sums: jax.Array) -> np.ndarray:
    """Returns the sums of all devices, uint32 [devices, leaves, 2]. All processes must call it."""
    if jax.process_count() > 1:
        sums = multihost_utils.process_allgather(sums, tiled=True)
    return np.asarray(sums)


@dataclass(frozen=True)
class Difference:
    """The devices that may be broken, and the leaf that shows it.

    `devices` are positions in the mesh: just one, if the copies tell which is wrong. `leaf` is the
    first of the `leaves` leaves that differ.
    """

    devices: Sequence[int]
    leaf: int
    leaves: int


def compare(
    sums: np.ndarray, copies: Sequence[tuple[str, ...]], shape: Mapping[str, int]
) -> Difference:
    """Finds the devices whose sums differ from those of their copies, given that some do.

    `sums`: uint32 [devices, leaves, 2]. `copies`: the mesh axes along which devices hold copies of
    each leaf. `shape`: that of the mesh. Of two copies either may be wrong; other leaves, copied
    along other axes, may decide.
    """
    places = np.arange(len(sums)).reshape(tuple(shape.values()))
    axes = list(shape)
    suspects: list[set[int]] = []
    different = []
    for leaf, along in enumerate(copies):
        last = [axes.index(axis) for axis in along]
        size = int(np.prod([shape[axis] for axis in along], dtype=int))
        groups = np.moveaxis(places, last, range(-len(last), 0)).reshape(-1, size) if last else []
        for group in groups:
            sums_in_group = [tuple(sums[at, leaf].tolist()) for at in group]
            counts = Counter(sums_in_group).most_common(2)
            if len(counts) == 1:
                continue
            different.append(leaf)
            tie = counts[0][1] == counts[1][1]
            right = None if tie else counts[0][0]
            suspects.append(
                {int(at) for at, sum_ in zip(group, sums_in_group, strict=True) if sum_ != right}
            )
    common = functools.reduce(set.intersection, suspects)
    either = functools.reduce(set.union, suspects)
    return Difference(sorted(common or either), different[0], len(set(different)))


@functools.cache
def _program(mesh: Mesh, specs: tuple[P, ...]) -> Callable[[list[jax.Array]], tuple]:
    """Returns `leaves -> (do copies differ, each device's sums uint32 [devices, leaves, 2])`."""
    copies = [replica_axes(mesh, spec) for spec in specs]

    def local(leaves: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        sums = sums_of_each(leaves, mesh, specs)
        differ = jnp.bool_(False)
        for along in dict.fromkeys(copies):
            if along:
                these = sums[np.array([axes == along for axes in copies])]
                differ |= (lax.pmax(these, along) != lax.pmin(these, along)).any()
        return lax.psum(differ.astype(jnp.int32), mesh.axis_names) > 0, sums[None]

    out = (P(), P(mesh.axis_names))
    return jax.jit(manual_region(local, mesh, mesh.axis_names, (list(specs),), out))


def _named(device: jax.Device) -> str:
    where = f" of process {device.process_index}" if jax.process_count() > 1 else ""
    return f"device {device.id}{where} ({device.device_kind})"
