"""Takes snapshots of a training state, and restores the newest one that all processes hold whole.

Each process copies its parts of the state into memory that its launcher keeps
(processes/snapshots). There are two slots: one is whole while the other is written. A snapshot has
the meta of a checkpoint (meta.py), with the fingerprint of every leaf. Taking the fingerprints
needs all processes, so none writes its second slot before all have written their first: there is
always a step that all of them hold.

A snapshot counts only if its arrays are laid out as this run needs them. A run on another mesh
reads the disk.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

import jax

from spmdtrain.checkpoints.checkpoints import Checkpoints, step_counter
from spmdtrain.checkpoints.leaves.fingerprint import fingerprints
from spmdtrain.checkpoints.leaves.stored_items import arrays_of, from_note, is_in
from spmdtrain.checkpoints.meta import (
    FORMAT,
    Meta,
    describe,
    digest,
    leaf_name,
    named_leaves,
    prefix,
)
from spmdtrain.checkpoints.newest import LoadedState
from spmdtrain.checkpoints.snapshots.array_parts import as_document, parts_of, read, write
from spmdtrain.config.errors import PeerLostError
from spmdtrain.processes.processes import gather_texts
from spmdtrain.processes.snapshots.slot import PAGE, Head, Slot, newest_of
from spmdtrain.train.all_parts import with_items
from spmdtrain.train.fresh import with_initial_items
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState

DOCUMENT = 2**20  # bytes reserved for the document of a snapshot; a longer one takes more
POLL_SECONDS = 0.002
ARRIVAL_SECONDS = 300.0  # that a snapshot may take to another host


class Snapshots:
    """The snapshots of a run in this process's slots. All processes must call each method.

    With `on_a_peer`, the next one waits until the one before it has arrived on another host: if
    this host is lost, the others still hold the step that has arrived.
    """

    def __init__(
        self, slots: list[Slot], setup: Setup, checkpoints: Checkpoints, *, on_a_peer: bool = False
    ):
        self._slots = slots
        self._setup = setup
        self._checkpoints = checkpoints
        self._on_a_peer = on_a_peer
        self._parts, self.bytes = parts_of(named_leaves(arrays_of(setup.state)))

    @property
    def slot_bytes(self) -> int:
        """The memory of one slot of this process."""
        return PAGE + self.bytes + DOCUMENT

    @property
    def is_empty(self) -> bool:
        """True if this process holds no whole snapshot."""
        return newest_of(self._slots) is None

    def reserve(self) -> None:
        """Takes the memory of all slots from the system. Raises OSError if there is none."""
        for slot in self._slots:
            slot.reserve(self.slot_bytes)

    def take(self, step: int, state: TrainState, meta: Meta) -> None:
        """Copies the state after `step` into the older slot; it may be donated afterwards."""
        newest = newest_of(self._slots)
        head = newest.head() if newest else None
        if newest and head and self._on_a_peer:
            _wait_until_arrived(newest, head)
        # Its fingerprints are sums over all devices: no process continues before all are here.
        whole = self._checkpoints.whole_meta(step, state, meta)
        slot = next(slot for slot in self._slots if slot is not newest)
        memory = slot.begin(self.bytes)
        write(named_leaves(arrays_of(state)), self._parts, memory)
        document = {"meta": whole, "parts": as_document(self._parts)}
        # No number comes twice, not even after all have been forgotten.
        number = max(time.time_ns(), head.number + 1 if head else 0)
        slot.finish(number, step, self.bytes, document)

    def clear(self) -> None:
        """Forgets all snapshots of this process."""
        for slot in self._slots:
            slot.clear()

    def newest(self, least: int) -> LoadedState | None:
        """Returns the newest state of which all processes hold an intact snapshot.

        None if no snapshot of step `least` or later fits this run; all are then forgotten.
        """
        held = {head.step: slot for slot in self._slots if (head := slot.head())}
        documents = {step: self._fitting(slot) for step, slot in held.items()}
        mine = {
            step: document["meta"]["digest"] for step, document in documents.items() if document
        }
        digests = [json.loads(text) for text in gather_texts(json.dumps(mine))]
        common = set.intersection(*({*of_process.items()} for of_process in digests))
        for step in sorted((int(step) for step, _ in common), reverse=True):
            document = documents[step]
            if step < least or document is None:
                continue
            if snapshot := self._read(step, held[step], document["meta"]):
                return snapshot
        self.clear()
        return None

    def _fitting(self, slot: Slot) -> dict[str, Any] | None:
        """Returns the document of a snapshot that this run can read; None if there is none."""
        document = slot.document()
        if document is None or document["meta"]["format"] != FORMAT:
            return None
        meta = document["meta"]
        state = self._setup.state
        fits = (
            document["parts"] == as_document(self._parts)
            and meta["leaves"] == describe(named_leaves(arrays_of(state)))
            and meta["layout"] == self._setup.model.stage_layout.describe()
            and all(is_in(meta, item) for item, _ in with_items(state.items) if item.note)
        )
        return document if fits else None

    def _read(self, step: int, slot: Slot, meta: Meta) -> LoadedState | None:
        """Returns a snapshot; None if it is damaged in any process."""
        meta = dict(meta)
        is_whole = meta.pop("digest") == digest(meta)
        head = slot.head()
        assert head is not None  # nobody else writes it
        trees = arrays_of(self._setup.state)
        abstract = named_leaves(trees)
        arrays = read(abstract, self._parts, slot.contents(head))
        saved = {name: tuple(sums) for name, sums in meta["fingerprints"].items()}
        if not is_whole or fingerprints(arrays) != saved:
            return None
        return LoadedState(step, self._state(step, trees, arrays, meta), meta, from_memory=True)

    def _state(
        self, step: int, trees: Mapping[str, Any], arrays: Mapping[str, jax.Array], meta: Meta
    ) -> TrainState:
        """Returns the state with these leaves, by their names in the meta."""

        def filled(item: str, tree: Any) -> Any:
            def leaf(path: tuple, _: Any) -> jax.Array:
                return arrays[prefix(item) + leaf_name(path)]

            return jax.tree_util.tree_map_with_path(leaf, tree)

        abstract = self._setup.state
        values = {item: filled(item, tree) for item, tree in trees.items()}
        params, opt_state = values.pop("params"), values.pop("state")
        for item, abstract_value in with_items(abstract.items):
            if item.note:
                values[item.name] = from_note(item, abstract_value, meta)
        state = TrainState(step_counter(step, abstract), params, opt_state, values)
        return with_initial_items(self._setup, state, abstract.items.keys() - values)


def _wait_until_arrived(slot: Slot, head: Head) -> None:
    """Waits for a snapshot to arrive on another host. Raises PeerLostError if it does not."""
    deadline = time.monotonic() + ARRIVAL_SECONDS
    while slot.arrived != head.number:
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"the snapshot of step {head.step} has not arrived on another host",
                found=f"{ARRIVAL_SECONDS:.0f} s of waiting",
                fix="a network in which launchers reach each other, or a larger "
                "checkpoint.memory_every",
            )
        time.sleep(POLL_SECONDS)
