"""Reports in one line that a step needs more memory than a device has."""

from typing import Any

import jax

from spmdtrain.compiled.step_memory import memory_in
from spmdtrain.config.errors import ConfigError
from spmdtrain.processes.xla_flags import (
    LARGEST_MEMORY_SHARE,
    memory_share,
    memory_share_variable,
)
from spmdtrain.running.guards.host_memory import host_bytes
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import resting_bytes

EXHAUSTED = "RESOURCE_EXHAUSTED"


class OutOfMemoryError(ConfigError):
    """A device has less memory than the run needs.

    `needed` and `available` are in bytes per device; either may be unknown. `setup` is that of the
    run, for callers that can suggest a change.
    """

    def __init__(
        self, setup: Setup, needed: int | None, available: int | None, categories: str, fix: str
    ):
        self.setup = setup
        self.needed = needed
        self.available = available
        self.categories = categories
        if needed:
            what = f"out of memory: the step needs {_size(needed)} of a device"
        else:
            what = "out of memory: the step needs more than a device has"
        has = f"{_size(available)} available" if available else ""
        super().__init__(what, found=", ".join(filter(None, (has, categories))), fix=fix)

    def with_fix(self, fix: str) -> "OutOfMemoryError":
        """Returns the same error with other advice."""
        return OutOfMemoryError(self.setup, self.needed, self.available, self.categories, fix)


class MemoryGuard:
    """A context around a run, which turns jax's errors for lack of memory into one line."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._report: dict[str, Any] | None = None

    def __enter__(self) -> "MemoryGuard":
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, jax.errors.JaxRuntimeError) and EXHAUSTED in str(error):
            raise self._too_little() from None

    def compiled(self, report: dict[str, Any]) -> None:
        """Takes the report of the compiled step. Raises OutOfMemoryError if it does not fit."""
        self._report = report
        available = available_bytes(self._setup.mesh)
        if available is not None and memory_in(report).held > available:
            raise self._too_little()

    def _too_little(self) -> OutOfMemoryError:
        available = available_bytes(self._setup.mesh)
        parameters, optimizer = resting_bytes(self._setup.state, self._setup.items)
        parts: dict[str, int] = {"parameters": parameters, "optimizer": optimizer}
        needed = None
        if self._report is not None:
            needed = memory_in(self._report).held
            parts["activations and the rest of the step"] = needed - sum(parts.values())
        described = [f"{name} {_size(count)}" for name, count in parts.items()]
        fix = "--set train.microbatch=1, --set train.remat=full, or more of mesh.fsdp"
        if not _is_host(self._setup.mesh):
            fix = _larger_share(needed, available) or fix
        return OutOfMemoryError(self._setup, needed, available, ", ".join(described), fix)


def available_bytes(mesh: jax.sharding.Mesh) -> int | None:
    """Returns the bytes that jax may use of a device of this process; None if unknown.

    Devices that are the processors of this host share its memory.
    """
    if _is_host(mesh):
        of_host = host_bytes()
        return None if of_host is None else of_host // len(mesh.local_devices)
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in mesh.local_devices]
    return min((limit for limit in limits if limit), default=None)


def _is_host(mesh: jax.sharding.Mesh) -> bool:
    """Returns True if the devices are the processors of this host."""
    return mesh.local_devices[0].platform == "cpu"


def _larger_share(needed: int | None, available: int | None) -> str:
    """Returns the setting that lets jax use enough of the memory, if that alone is missing."""
    if not needed or not available:
        return ""
    share = memory_share()
    whole = available / share
    if needed > LARGEST_MEMORY_SHARE * whole:
        return ""
    larger = f"{memory_share_variable()}={LARGEST_MEMORY_SHARE}"
    return f"{larger} before the command: jax takes {share:g} of it"


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
