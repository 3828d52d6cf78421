"""Describes the peaks, memory and links of devices, with the source of each figure. No jax.

Facts about a chip are in pallas_kernels/gpus.py, where a new one is entered; the machine around it
is in BOXES here.

Units: FLOP/s, bytes, bytes/s, seconds, watts. Link figures are one direction per device, as on the
data sheet; software.py has the share of each that software reaches. Network bandwidth belongs to a
cluster, not to a chip: the figure here is that of the vendor's own box, printed with every
estimate, and `--hardware FILE.toml` replaces it.
"""

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pallas_kernels.gpus import GPUS, Gpu
from spmdtrain.config.arguments import shown
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.near import did_you_mean
from spmdtrain.config.toml_file import MOST_EXTENDED, read_toml


@dataclass(frozen=True)
class Hardware:
    """A kind of device, with the machine around it."""

    name: str
    bfloat16: float  # dense matrix FLOP/s
    float32: float  # of float32 matmuls as jax runs them by default on this device (TF32 on NVIDIA)
    cores: int  # across which a matmul's tiles are distributed (streaming multiprocessors)
    memory: float  # bytes the driver offers
    memory_bandwidth: float
    link_bandwidth: float  # inside a host
    network_bandwidth: float  # between hosts
    per_host: int  # devices joined by the fast links
    power: float
    link_latency: float = 3e-6  # of one hop of a collective, software included
    network_latency: float = 8e-6
    power_limit: float = 0.0  # watts, if below `power`
    float8: float = 0.0  # dense matrix FLOP/s; 0: it multiplies no 8-bit floats
    mxfp8: float = 0.0  # the same of 8-bit floats in blocks
    matmul: float = (
        0.75  # measured share of peak of the best shape of a matmul; 0.75 if never measured
    )
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def device_kind(self) -> str:
        """The name that jax has for the device, or its own name if it is not listed."""
        listed = GPUS.get(self.name)
        return listed.device_kinds[0] if listed else self.name

    def peak(self, dtype: str) -> float:
        """Returns the FLOP/s of matmuls at the power limit.

        Under a limit the clock falls: dynamic power goes as f V^2, and near the top of the curve V
        goes about as f^(1/2), hence f as P^(1/2).
        """
        peaks = {"float32": self.float32, "float8": self.float8, "mxfp8": self.mxfp8}
        peak = peaks.get(dtype, self.bfloat16)
        if not peak:
            what = "8-bit floats" if dtype == "float8" else "blocks of 8-bit floats"
            raise ConfigError(
                f"precision.matmul={dtype!r}: no rate of {what} is known for {self.name}",
                fix=f"--set precision.matmul=compute, or {dtype} in the file of the hardware",
            )
        limited = min(1.0, (self.power_limit or self.power) / self.power) ** 0.5
        return limited * peak


MEASURED = (
    "maximum achievable matmul FLOP/s: stas00/ml-engineering, compute/accelerator, at 744d01e1"
)
NDR = "400 Gb/s InfiniBand per device: NVIDIA DGX H100 data sheet"
HDR = "200 Gb/s InfiniBand per device: NVIDIA DGX A100 data sheet"

SMALLEST, LARGEST = 1e-30, 1e30  # of a figure: products and quotients of a few stay finite


@dataclass(frozen=True, kw_only=True)
class Box:
    """The vendor's own machine around a chip, and what was measured in it.

    These are not properties of the chip.
    """

    network_bandwidth: float = 50e9
    per_host: int = 8
    matmul: float = 0.75
    sources: Mapping[str, str] = field(
        default_factory=lambda: {"network_bandwidth": "400 Gb/s, assumed", "per_host": "assumed"}
    )


# By the names of gpus.GPUS; a chip without an entry is assumed to be in a Box().
BOXES: Mapping[str, Box] = {
    "a100-40": Box(
        network_bandwidth=25e9, matmul=0.869, sources={"matmul": MEASURED, "network_bandwidth": HDR}
    ),
    "a100-80": Box(
        network_bandwidth=25e9, matmul=0.869, sources={"matmul": MEASURED, "network_bandwidth": HDR}
    ),
    "h100": Box(matmul=0.803, sources={"matmul": MEASURED, "network_bandwidth": NDR}),
    "h100-pcie": Box(
        network_bandwidth=25e9, sources={"network_bandwidth": "200 Gb/s per device, assumed"}
    ),
    "h200": Box(matmul=0.803, sources={"matmul": MEASURED, "network_bandwidth": NDR}),
    "b200": Box(matmul=0.776, sources={"matmul": MEASURED, "network_bandwidth": NDR}),
    "gb200": Box(
        per_host=72, sources={"network_bandwidth": NDR, "per_host": "one NVLink domain of 72"}
    ),
    **dict.fromkeys(
        ("rtx-4090", "rtx-5090", "l40s", "rtx-6000-ada", "rtx-pro-6000"),
        Box(
            network_bandwidth=12.5e9,
            sources={"network_bandwidth": "100 Gb/s per device, assumed", "per_host": "assumed"},
        ),
    ),
    "mi300x": Box(sources={"network_bandwidth": "400 Gb/s, assumed"}),
}


def _in_its_box(gpu: Gpu) -> Hardware:
    box = BOXES.get(gpu.name, Box())
    figures = [figure.name for figure in fields(Hardware)[1:10]]
    return Hardware(
        name=gpu.name,
        bfloat16=gpu.bfloat16,
        float32=gpu.float32,
        cores=gpu.cores,
        memory=gpu.memory,
        memory_bandwidth=gpu.memory_bandwidth,
        link_bandwidth=gpu.link_bandwidth,
        network_bandwidth=box.network_bandwidth,
        per_host=box.per_host,
        power=gpu.power,
        float8=gpu.float8 or 0.0,
        mxfp8=gpu.mxfp8 or 0.0,
        matmul=box.matmul,
        sources={**dict.fromkeys(figures, gpu.sheet), **gpu.sources, **box.sources},
    )


DEVICES: Mapping[str, Hardware] = {name: _in_its_box(gpu) for name, gpu in GPUS.items()}

# jax's name for a device (its device_kind) -> its name here.
NAME_OF_DEVICE_KIND: Mapping[str, str] = {
    kind: name for name, gpu in GPUS.items() for kind in gpu.device_kinds
}


def devices_per_host(count: int, device: Hardware) -> int:
    """Returns the devices per host if `count` devices fill hosts of equal size."""
    largest = min(count, device.per_host)
    return max(size for size in range(1, largest + 1) if count % size == 0)


def hardware(name: str, above: tuple[Path, ...] = ()) -> Hardware:
    """Looks a device up by name, or reads a .toml file with the fields of `Hardware`.

    Missing fields come from the hardware that `extends = "h100"` names. `above` are the files whose
    `extends` led here. Raises ConfigError for an unknown name or a bad file.
    """
    if name.endswith(".toml"):
        return _read(Path(name), above)
    name = name.lower()
    if name not in DEVICES:
        raise ConfigError(
            f"unknown hardware{did_you_mean(name, DEVICES)}",
            asked=f"{name:.80}",
            fix=f"{', '.join(DEVICES)}, or a .toml file",
        )
    return DEVICES[name]


def described(description: Hardware | str | Path) -> Hardware:
    """Returns hardware as it is, or looks its name or file up. Raises ConfigError for neither."""
    if isinstance(description, Hardware):
        return description
    if not isinstance(description, str | Path):
        what = f"hardware={shown(description)} is not hardware"
        raise ConfigError(what, fix=f"{', '.join(DEVICES)}, or a .toml file")
    return hardware(str(description))


def swept(device: Hardware, key: str, value: float) -> Hardware:
    """Returns the device with `key` (e.g. "memory_bandwidth") set to `value`."""
    return replace(device, **{key: _figure(key, value, f"hardware.{key}")})


def _figure(key: str, value: object, where: str) -> float:
    """Returns `value` as the type of the field `key`."""
    known: dict[str, Any] = {
        figure.name: figure for figure in fields(Hardware) if figure.name not in ("name", "sources")
    }
    if key not in known:
        raise ConfigError(f"{where}: no such figure of a device", fix=", ".join(known))
    whole = known[key].type is int
    in_range = False
    if isinstance(value, int | float) and not isinstance(value, bool):
        in_range = SMALLEST <= value <= LARGEST or value == known[key].default == 0.0
        in_range = in_range and not (whole and value % 1)
    if not in_range:
        kind = "a whole number of at least 1" if whole else "a positive number"
        raise ConfigError(f"{where} must be {kind}", found=f"{value!r:.80}")
    return known[key].type(value)


def _read(path: Path, above: tuple[Path, ...]) -> Hardware:
    if os.path.realpath(path) in map(os.path.realpath, above):
        raise ConfigError(
            f"hardware file {path} extends itself", found=" -> ".join(map(str, (*above, path)))
        )
    if len(above) > MOST_EXTENDED:
        raise ConfigError(f"more than {MOST_EXTENDED} hardware files extend each other")
    settings = read_toml(path, f"hardware file {path}")
    sources = settings.pop("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(text, str) for text in sources.values()):
        raise ConfigError(f"{path}: sources must be a table of strings", found=f"{sources!r:.80}")
    for key in ("name", "extends"):
        if not isinstance(settings.get(key, ""), str):
            raise ConfigError(f"{path}: {key} must be a string", found=f"{settings[key]!r:.80}")
    name = settings.pop("name", path.stem)
    start = None
    if "extends" in settings:
        below = settings.pop("extends")  # a file is looked for next to this one
        start = hardware(
            str(path.parent / below) if below.endswith(".toml") else below, (*above, path)
        )
    settings: dict[str, Any] = {
        key: _figure(key, value, f"{path}: {key}") for key, value in settings.items()
    }
    needed = [
        figure.name
        for figure in fields(Hardware)[1:]
        if figure.default is MISSING and figure.name != "sources"
    ]
    if start is None and (missing := [key for key in needed if key not in settings]):
        raise ConfigError(
            f"hardware file {path} lacks {', '.join(missing)}", fix='extends = "h100"'
        )
    if start is None:
        return Hardware(name, **settings, sources=sources)
    own = dict.fromkeys(settings, str(path))
    return replace(start, name=name, **settings, sources={**start.sources, **own, **sources})
