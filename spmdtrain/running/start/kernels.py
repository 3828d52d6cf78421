"""Chooses the kernels of a run: those of its checkpoint, or those that this machine has
measured.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from pallas_kernels.calls import Call
from pallas_kernels.chosen import in_force, using
from pallas_kernels.gpus import generation
from pallas_kernels.tuning import Table
from spmdtrain.checkpoints.meta import Meta
from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.processes.processes import gather_texts
from spmdtrain.train.setup import Setup
from spmdtrain.train.step import make_step

Names = dict[str, str]  # class of a call -> its implementation


@contextlib.contextmanager
def decided(setup: Setup) -> Iterator[None]:
    """Makes the calls inside run what process 0's table says, in all processes.

    Raises ConfigError if the devices are of several generations.
    """
    chosen = {}
    kinds = sorted({device.device_kind for device in setup.mesh.devices.flat})
    if len({generation(kind) for kind in kinds}) > 1:
        raise ConfigError(
            "the devices of this run are of several generations",
            found=", ".join(kinds),
            fix="devices of one kind, by CUDA_VISIBLE_DEVICES",
        )
    if setup.config.kernels.tune != "off" and len(kinds) == 1:
        table = Table()
        chosen = table.chosen(kinds[0])
        setup.config.notes.extend(table.remarks)
    with using(json.loads(gather_texts(json.dumps(chosen))[0])):
        yield


def calls_of_step(setup: Setup) -> list[Call]:
    """Returns the calls of the training step that name no implementation, traced on any device."""
    with using({}) as decisions:
        make_step(setup).trace(setup.state, setup.batch)
    return list(decisions.calls.values())


def keep(meta: Meta, setup: Setup) -> Names:
    """Makes calls run what they ran up to a checkpoint with this meta, and returns it.

    Nothing is kept on another kind of device, whose numbers differ anyway, or if `kernels.tune` is
    "again".
    """
    decisions = in_force()
    if decisions is None or setup.config.kernels.tune == "again":
        return {}
    match meta.get("kernels"):
        case {"device": str() as device, "calls": dict() as calls} if device == _device(setup):
            decisions.chosen = dict(decisions.chosen) | calls
            return calls
        case _:
            return {}


def check_kept(earlier: Names, where: str) -> None:
    """Raises CheckpointError if a call cannot run what it ran before; call it after the trace.

    `where` names the checkpoint.
    """
    decisions = in_force()
    if decisions is None:
        return
    for call, reason in decisions.missed.items():
        if call in earlier:
            raise CheckpointError(
                f"a kernel of {where} cannot run here: {reason}",
                asked=call,
                fix="the jax and the libraries of that run, or --set kernels.tune=again for "
                "other kernels, which changes the last bits",
            )


def document(setup: Setup) -> dict[str, Any]:
    """Returns the implementations of the traced step's calls, as checkpoints and config.json record
    them.
    """
    decisions = in_force()
    taken = {} if decisions is None else dict(sorted(decisions.taken.items()))
    return {"kernels": {"device": _device(setup), "calls": taken}}


def _device(setup: Setup) -> str:
    return setup.mesh.devices.flat[0].device_kind
