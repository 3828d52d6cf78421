"""Chooses the implementation that runs a call, or raises `Refused` if none can.

An implementation is a module with `refusal(...) -> str`: why it cannot run a call, "" if it can. A
named one never falls back. "NAME:interpret" runs a kernel's instructions one by one on any machine,
for tests.
"""

from collections.abc import Callable, Mapping, Sequence

import jax

from pallas_kernels.calls import Call
from pallas_kernels.chosen import in_force
from pallas_kernels.gpus import BEFORE_AMPERE, generation, is_nvidia

INTERPRET = ":interpret"
VARIANT = "/"  # before the name of a tiling: "triton/narrow"


class Refused(NotImplementedError):
    """The named implementation does not run this call, or none does: `reason` says why."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def choose(
    op: str,
    refusals: Mapping[str, Callable[[bool], str]],
    order: Sequence[str],
    requested: str | None,
    call: Call,
) -> str:
    """Returns the implementation to run: `requested`, the chosen one, or else the first that can.

    `refusals` maps a name to `refusal(interpreted)`; `order` is the order in which they are tried.
    `call` is the one that chosen.py decides about. Raises `Refused` if none can, and ValueError for
    an unknown name.
    """
    if requested is None:
        return _automatic(op, refusals, order, call)
    name = requested.removesuffix(INTERPRET) if isinstance(requested, str) else ""
    if name not in refusals:
        names = ", ".join(refusals)
        raise ValueError(f"{op}: no implementation {requested!r}; there are {names}")
    reason = refusals[name](requested.endswith(INTERPRET))
    if reason:
        message = f"{op}: implementation {requested!r} refuses: {reason}; try implementation=None"
        raise Refused(reason, message)
    return requested


def _automatic(op, refusals, order, call) -> str:
    decisions = in_force()
    if decisions is None:
        return _first_willing(op, refusals, order)
    name = decisions.chosen.get(call.name)
    if name is not None:
        plain = name.removesuffix(INTERPRET)
        reason = f"there is no {name}"
        if plain in refusals:
            reason = refusals[plain](name != plain)
        if reason:
            decisions.missed[call.name] = f"{name}: {reason}"
            name = None
    name = name or _first_willing(op, refusals, order)
    decisions.record(call, name)
    return name


def _first_willing(op, refusals, order) -> str:
    reasons = []
    for name in order:
        reason = refusals[name](False)
        if not reason:
            return name
        reasons.append(f"{name}: {reason}")
    all_reasons = "; ".join(reasons)
    raise Refused(all_reasons, f"{op}: no implementation runs this call. {all_reasons}")


def device_kind() -> str:
    """Returns jax's name for the device that is compiled for: "NVIDIA H200", "cpu".

    That is the device of the mesh in use, or else the default device.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device  # None without a mesh
    if device is None:
        device = jax.config.values["jax_default_device"]  # a device, a platform or None
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    return device.device_kind


def no_gpu(interpreted: bool) -> str:
    """Says why a kernel for NVIDIA GPUs of sm_80 and later cannot run here; "" if it can."""
    if interpreted:
        return ""
    kind = device_kind()
    if not is_nvidia(kind):
        return f"needs an NVIDIA GPU, this is {kind}"
    if generation(kind) == BEFORE_AMPERE:
        return f"needs sm_80 or later, this is {kind}"
    return ""


def no_64_bits() -> str:
    """Says why a kernel whose counters are int32 cannot run here; "" if it can."""
    if jax.config.read("jax_enable_x64"):
        return "no 64 bit numbers (jax_enable_x64): its counters have 32"
    return ""


def not_interpretable(interpreted: bool) -> str:
    """Refuses to interpret an implementation that has no kernels of ours."""
    return "has no interpreted form" if interpreted else ""
