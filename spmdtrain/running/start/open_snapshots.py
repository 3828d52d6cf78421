"""Opens the snapshots of a run in the slots that its launcher gives it, if there is memory."""

import json
import socket

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.snapshots.snapshots import Snapshots
from spmdtrain.config.errors import ConfigError
from spmdtrain.processes.processes import gather_texts, together
from spmdtrain.processes.snapshots import handed_slots
from spmdtrain.running.guards.host_memory import available_bytes
from spmdtrain.train.setup import Setup

TOO_LITTLE = "a host has too little memory for the snapshots of its processes"


def open_snapshots(setup: Setup, checkpoints: Checkpoints, *, clear: bool) -> Snapshots:
    """Returns the snapshots of this process, every `checkpoint.memory_every` steps.

    With `clear`, those of earlier attempts are forgotten. Raises ConfigError if no launcher keeps
    them, or if a host has too little memory. All processes must call it.
    """
    config = setup.config.checkpoint
    setting = f"checkpoint.memory_every={config.memory_every}"
    slots = handed_slots.slots()
    with together():
        if not slots:
            raise ConfigError(
                "only a launcher on Linux keeps a state in memory when a process dies",
                asked=setting,
                fix="spmdtrain launch train ..., or --set checkpoint.memory_every=0",
            )
        if config.memory_peer and not handed_slots.are_copied():
            raise ConfigError(
                "no other host keeps a copy: this one is alone, or Slurm started the launchers",
                asked="checkpoint.memory_peer=true",
                fix="a launcher on each host, with SPMDTRAIN_HOSTS, SPMDTRAIN_HOST and "
                "SPMDTRAIN_COORDINATOR, or --set checkpoint.memory_peer=false",
            )
    snapshots = Snapshots(slots, setup, checkpoints, on_a_peer=config.memory_peer)
    if clear:
        snapshots.clear()
    wanted = sum(max(snapshots.slot_bytes - slot.reserved, 0) for slot in slots)
    if any(device.platform != "cpu" for device in setup.mesh.local_devices):
        wanted += snapshots.bytes  # a copy on its way from the devices
    if config.memory_peer:
        wanted += handed_slots.PER_PROCESS * snapshots.slot_bytes  # of the host before this one
    _check_room(setting, wanted)
    with together():
        try:
            snapshots.reserve()
        except OSError as error:
            raise ConfigError(TOO_LITTLE, asked=setting, found=error.strerror or "") from None
    return snapshots


def _check_room(setting: str, wanted: int) -> None:
    """Raises ConfigError in all processes if those of one host want more than is available."""
    mine = [socket.gethostname(), wanted, available_bytes()]
    of_all = [json.loads(text) for text in gather_texts(json.dumps(mine))]
    for host in dict.fromkeys(name for name, _, _ in of_all):
        needed = sum(of_one for name, of_one, _ in of_all if name == host)
        available = min((free for name, _, free in of_all if name == host and free), default=None)
        if available is not None and needed > available:
            raise ConfigError(
                f"{TOO_LITTLE}: {needed / 1e9:.1f} GB on {host}",
                asked=setting,
                found=f"{available / 1e9:.1f} GB available",
                fix="checkpoint.memory_every=0, or a mesh with more hosts along fsdp",
            )
