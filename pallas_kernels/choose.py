"""The first implementation that does not refuse a call; what a call is compiled for; the errors.

An implementation is a module with `refusal(...) -> str`: why it cannot run the call, "" where it can. A named
implementation never falls back. "NAME:interpret" runs a kernel's instructions one by one on any machine, for tests.
"""

from collections.abc import Callable, Mapping, Sequence

import jax

from pallas_kernels.gpus import BEFORE_AMPERE, generation, is_nvidia

INTERPRET = ":interpret"


class Refused(NotImplementedError):
    """No implementation runs this call, or the named one does not: `reason` says why."""

    def __init__(self, reason: str, said: str):
        super().__init__(said)
        self.reason = reason


def choose(
    op: str,
    refusals: Mapping[str, Callable[[bool], str]],
    preference: Sequence[str],
    asked: str | None,
) -> str:
    """The name of the implementation to run: `asked` itself, or the first of `preference` that does not refuse.

    `refusals`: name -> `refusal(interpreted)`.
    """
    if asked is None:
        reasons = {}
        for name in preference:
            if not (reason := refusals[name](False)):
                return name
            reasons[name] = reason
        said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise Refused(said, f"{op}: no implementation runs this call. {said}")
    name = asked.removesuffix(INTERPRET)
    if name not in refusals:
        raise ValueError(f"{op}: no implementation {asked!r}; there are {', '.join(refusals)}")
    if reason := refusals[name](asked.endswith(INTERPRET)):
        raise Refused(
            reason, f"{op}: implementation {asked!r} refuses: {reason}; try implementation=None"
        )
    return asked


def device_kind() -> str:
    """What is compiled for, as "NVIDIA H200" or "cpu": the device of the mesh in use, else the default device."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return described.device_kind
    default = jax.config.jax_default_device  # a device, a platform or None
    return (default if isinstance(default, jax.Device) else jax.devices(default)[0]).device_kind


def no_gpu(interpreted: bool) -> str:
    """Why a kernel for NVIDIA GPUs of sm_80 and up cannot run here; "" where it can."""
    if interpreted:
        return ""
    kind = device_kind()
    if not is_nvidia(kind):
        return f"needs an NVIDIA GPU, this is {kind}"
    if generation(kind) == BEFORE_AMPERE:
        return f"needs sm_80 or later, this is {kind}"
    return ""


def no_64_bits() -> str:
    """Why a kernel whose counters are int32 cannot run here; "" where it can."""
    return (
        "no 64 bit numbers (jax_enable_x64): its counters have 32"
        if jax.config.jax_enable_x64
        else ""
    )


def not_interpretable(interpreted: bool) -> str:
    return "has no interpreted form" if interpreted else ""
