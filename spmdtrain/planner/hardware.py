"""What a device can do, and where the figure comes from: peaks, memory, links. No jax.

Units: FLOP/s, bytes, bytes/s, seconds, watts. Link figures are one direction per device, as the data sheet says them;
what of a figure software reaches is the business of software.py. Network bandwidth belongs to a cluster, not to a chip:
the figure here is that of the vendor's own box, printed beside every estimate, and `--hardware FILE.toml` replaces it.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path

from spmdtrain.config.errors import ConfigError


@dataclass(frozen=True)
class Hardware:
    """One kind of device in its box."""

    name: str
    bfloat16: float  # dense matrix FLOP/s
    float32: float  # of float32 matmuls as jax runs them by default on this device (TF32 on NVIDIA)
    cores: int  # what a matmul's tiles are dealt out to (streaming multiprocessors)
    memory: float  # bytes the driver offers
    memory_bandwidth: float
    link_bandwidth: float  # inside a host
    network_bandwidth: float  # between hosts
    per_host: int  # devices joined by the fast links
    power: float
    link_latency: float = 3e-6  # of one hop of a collective, software included
    network_latency: float = 8e-6
    power_limit: float = 0.0  # watts, if below `power`
    matmul: float = 0.75  # share of peak that the best shape of a matmul was measured at; 0.75 where nobody did
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def peak(self, dtype: str) -> float:
        """FLOP/s of matmuls at the power it may draw.

        Under a limit the clock falls: dynamic power goes as f V^2, and near the top of the curve V goes about as
        f^(1/2), hence f as P^(1/2).
        """
        limited = min(1.0, (self.power_limit or self.power) / self.power) ** 0.5
        return limited * (self.float32 if dtype == "float32" else self.bfloat16)


def _device(name: str, *figures: float, sheet: str, **more) -> Hardware:
    names = [each.name for each in fields(Hardware)[1:10]]
    sources = dict.fromkeys(names, sheet) | more.pop("sources", {})
    return Hardware(name, *figures, sources=sources, **more)


SPECS = "device_memory_size of openxla/xla, xla/backends/gpu/target_config/specs"
MEASURED = "maximum achievable matmul FLOP/s: stas00/ml-engineering, compute/accelerator, at 744d01e1"
NDR = "400 Gb/s InfiniBand per device: NVIDIA DGX H100 data sheet"
HDR = "200 Gb/s InfiniBand per device: NVIDIA DGX A100 data sheet"

SMALLEST, LARGEST = 1e-30, 1e30  # of a figure: products and quotients of a few stay finite

# name: bfloat16, float32 (TF32), cores, memory, memory bandwidth, link, network, per host, power
DEVICES: Mapping[str, Hardware] = {
    device.name: device
    for device in (
        _device(
            *("a100-40", 312e12, 156e12, 108, 42.3e9, 1555e9, 300e9, 25e9, 8, 400),
            matmul=0.869,
            sheet="NVIDIA A100 data sheet (SXM4 40 GB)",
            sources={"matmul": MEASURED, "network_bandwidth": HDR, "link_bandwidth": "NVLink 3: 600 GB/s both ways"},
        ),
        _device(
            *("a100-80", 312e12, 156e12, 108, 85_100_068_864, 2039e9, 300e9, 25e9, 8, 400),
            matmul=0.869,
            sheet="NVIDIA A100 data sheet (SXM4 80 GB)",
            sources={
                "matmul": MEASURED,
                "memory": SPECS,
                "network_bandwidth": HDR,
                "link_bandwidth": "NVLink 3: 600 GB/s both ways",
            },
        ),
        _device(
            *("h100", 989.4e12, 494.7e12, 132, 84_942_979_072, 3352e9, 450e9, 50e9, 8, 700),
            matmul=0.803,
            sheet="NVIDIA H100 data sheet (SXM5), dense",
            sources={
                "matmul": MEASURED,
                "memory": SPECS,
                "network_bandwidth": NDR,
                "link_bandwidth": "NVLink 4: 900 GB/s both ways",
            },
        ),
        _device(
            *("h100-pcie", 756e12, 378e12, 114, 84.9e9, 2039e9, 64e9, 25e9, 8, 350),
            sheet="NVIDIA H100 data sheet (PCIe), dense",
            sources={"link_bandwidth": "PCIe 5 x16, no bridge", "network_bandwidth": "200 Gb/s per device, assumed"},
        ),
        _device(
            *("h200", 989.4e12, 494.7e12, 132, 151_397_597_184, 4800e9, 450e9, 50e9, 8, 700),
            matmul=0.803,
            sheet="NVIDIA H200 data sheet (SXM), dense",
            sources={
                "matmul": MEASURED,
                "memory": SPECS,
                "network_bandwidth": NDR,
                "link_bandwidth": "NVLink 4: 900 GB/s both ways",
            },
        ),
        _device(
            *("b200", 2250e12, 1125e12, 148, 191.5e9, 7672e9, 900e9, 50e9, 8, 1000),
            matmul=0.776,
            sheet="NVIDIA Blackwell (HGX B200) data sheet, dense",
            sources={
                "matmul": MEASURED,
                "memory_bandwidth": SPECS,
                "network_bandwidth": NDR,
                "link_bandwidth": "NVLink 5: 1800 GB/s",
            },
        ),
        _device(
            *("gb200", 2500e12, 1250e12, 148, 197.5e9, 8000e9, 900e9, 50e9, 72, 1200),
            sheet="NVIDIA GB200 NVL72 data sheet, dense, per GPU",
            sources={"network_bandwidth": NDR, "per_host": "one NVLink domain of 72"},
        ),
        _device(
            *("mi300x", 1307.4e12, 653.7e12, 304, 205.8e9, 5300e9, 448e9, 50e9, 8, 750),
            sheet="AMD Instinct MI300X data sheet, dense",
            sources={
                "link_bandwidth": "7 Infinity Fabric links of 64 GB/s",
                "network_bandwidth": "400 Gb/s, assumed",
            },
        ),
    )
}


KINDS: Mapping[str, str] = {  # what jax calls a device -> its name here
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "AMD Instinct MI300X": "mi300x",
}


def hardware(name: str, above: tuple[Path, ...] = ()) -> Hardware:
    """By name, or from a .toml file: the fields of `Hardware`, those of `extends = "h100"` where not given. `above`:
    the files whose `extends` led here."""
    if name.endswith(".toml"):
        return _read(Path(name), above)
    if name not in DEVICES:
        raise ConfigError("unknown hardware", asked=name, fix=f"{', '.join(DEVICES)}, or a .toml file")
    return DEVICES[name]


def swept(device: Hardware, key: str, value: float) -> Hardware:
    """The device with `key` (e.g. "memory_bandwidth") at another value."""
    return replace(device, **{key: _figure(key, value, f"hardware.{key}")})


def _figure(key: str, value: object, where: str) -> float:
    """`value` as the type of the field `key`."""
    known = {each.name: each for each in fields(Hardware) if each.name not in ("name", "sources")}
    if key not in known:
        raise ConfigError(f"{where}: no such figure of a device", fix=", ".join(known))
    whole = known[key].type is int
    number = isinstance(value, int | float) and not isinstance(value, bool)
    in_range = number and (SMALLEST <= value <= LARGEST or value == known[key].default == 0.0)
    if not in_range or (whole and value % 1):
        kind = "a whole number of at least 1" if whole else "a positive number"
        raise ConfigError(f"{where} must be {kind}", found=f"{value!r:.80}")
    return known[key].type(value)


def _read(path: Path, above: tuple[Path, ...]) -> Hardware:
    if os.path.realpath(path) in map(os.path.realpath, above):
        raise ConfigError(f"hardware file {path} extends itself", found=" -> ".join(map(str, (*above, path))))
    try:
        given = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"hardware file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"hardware file {path} is not TOML: {error}") from None
    sources = given.pop("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(text, str) for text in sources.values()):
        raise ConfigError(f"{path}: sources must be a table of strings", found=f"{sources!r:.80}")
    for key in ("name", "extends"):
        if not isinstance(given.get(key, ""), str):
            raise ConfigError(f"{path}: {key} must be a string", found=f"{given[key]!r:.80}")
    name = given.pop("name", path.stem)
    start = None
    if "extends" in given:
        below = given.pop("extends")  # a file is looked for beside this one
        start = hardware(str(path.parent / below) if below.endswith(".toml") else below, (*above, path))
    given = {key: _figure(key, value, f"{path}: {key}") for key, value in given.items()}
    needed = [each.name for each in fields(Hardware)[1:] if each.default is MISSING and each.name != "sources"]
    if start is None and (missing := [key for key in needed if key not in given]):
        raise ConfigError(f"hardware file {path} lacks {', '.join(missing)}", fix='extends = "h100"')
    if start is None:
        return Hardware(name, **given, sources=sources)
    own = dict.fromkeys(given, str(path))
    return replace(start, name=name, **given, sources={**start.sources, **own, **sources})
