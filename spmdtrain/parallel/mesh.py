"""From the sizes a person asked for and the devices there are to a `Mesh`, or one line that says what to type instead.

Axes are ordered slowest link first. Devices are ordered host by host, so that neighbours along `tensor`, the last
axis, sit inside one host and `pipeline`, the first, is the axis that spans hosts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import MeshConfig

AXES = tuple(MeshConfig.model_fields)  # slowest link first
MOST_ROWS, MOST_DRAWN = 16, 8  # of the drawing: rows; columns, and devices in a box
MOST_SIMULATED = 1024  # more simulated devices than this are not worth suggesting


def build_mesh(
    config: MeshConfig, devices: Sequence[Any] | None = None, where: Mapping[str, str] | None = None
) -> Mesh:
    """The mesh over all devices (default: those of all processes); every axis is `Auto`.

    `where` maps "mesh.data" and so on to where the value came from (`RunConfig.origin`), for the messages.
    """
    arranged = arrange(config.sizes, jax.devices() if devices is None else devices, where)
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def fill(sizes: Mapping[str, int], device_count: int) -> dict[str, int] | None:
    """`sizes` with -1 replaced so that the product is `device_count`; None if no size does that."""
    rest = math.prod(size for size in sizes.values() if size != -1)
    if device_count % rest or (rest != device_count and -1 not in sizes.values()):
        return None
    return {axis: device_count // rest if size == -1 else size for axis, size in sizes.items()}


def arrange(sizes: Mapping[str, int], devices: Sequence[Any], where: Mapping[str, str] | None = None) -> np.ndarray:
    """The devices as an array of `sizes`, -1 filled, host by host; ConfigError when they do not fit.

    Needs `process_index`, `id`, `device_kind` and `platform` of a device, nothing else.
    """
    hosts = group_by_host(devices)
    per_host = len(hosts[0])
    asked, found = _asked(sizes, where or {}), _found(hosts)
    if any(len(host) != per_host for host in hosts):
        counts = ", ".join(str(len(host)) for host in hosts)
        raise ConfigError(
            "hosts hold unequal numbers of devices",
            found=f"{counts} {_kind(devices)} on {len(hosts)} hosts",
            fix="showing every process the same number of devices (CUDA_VISIBLE_DEVICES, --gpus-per-node)",
        )
    filled = fill(sizes, len(devices))
    if filled and per_host % filled["tensor"]:
        raise ConfigError(
            f"mesh.tensor={filled['tensor']} would cross hosts: it must divide the {per_host} devices of one",
            asked=asked,
            found=found,
            fix=_instead(sizes, len(devices), per_host),
        )
    if filled is None:
        fix = _instead(sizes, len(devices), per_host)
        if all(device.platform == "cpu" for device in devices):
            count = _simulated(sizes, len(devices), len(hosts))
            fix += f" or --simulate-devices {count}" + " in each process" * (len(hosts) > 1) if count else ""
        raise ConfigError(f"the mesh does not fit the {_devices(len(devices))}", asked=asked, found=found, fix=fix)
    array = np.empty(len(devices), dtype=object)
    array[:] = [device for host in hosts for device in host]
    return array.reshape([filled[axis] for axis in AXES])


def group_by_host(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices of each host in (process, id) order. A host is a process, unless every process has one device:
    then it is the machine that those processes share, which jax calls a partition."""
    devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    one_each = len({device.process_index for device in devices}) == len(devices)

    def host(device):
        return getattr(device, "partition_index", device.process_index) if one_each else device.process_index

    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(host(device), []).append(device)
    return list(hosts.values())


def describe_mesh(mesh: Mesh) -> str:
    """A drawing: which devices each axis connects, and all devices in a grid (rows: slow axes, columns: fast ones)."""
    hosts = group_by_host(list(mesh.devices.flat))
    if mesh.size == 1:
        return f"one device: {_found(hosts)}"
    host_of = {device: number for number, host in enumerate(hosts) for device in host}
    active = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    title = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in active)
    lines = [f"{title}: {_found(hosts)}", ""]
    for axis in active:
        first, *others = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
        spans = "across hosts" if len({host_of[device] for device in first}) > 1 else "inside a host"
        lines.append(f"{axis:>10} {len(first):>4}  {spans:<13}  devices {device_ids(first)}{', ...' if others else ''}")
    off = [axis for axis in mesh.axis_names if axis not in active]
    lines += [f"{'off':>10}       {', '.join(off)}"] if off else []
    return "\n".join([*lines, "", *_grid(mesh, active, host_of, many=len(hosts) > 1)])


def _grid(mesh: Mesh, active: Sequence[str], host_of: Mapping[Any, int], many: bool) -> list[str]:
    """A box holds the devices along the last axis; with three axes and more the one before it makes the columns."""
    *slow, column = active[:-1] if len(active) > 2 else [*active[:-1], None]
    columns = mesh.shape[column] if column else 1
    table = mesh.devices.reshape(-1, columns, mesh.shape[active[-1]])
    shown = range(min(columns, MOST_DRAWN))
    rows = [["", *(f"{column} {at}" if column else active[-1] for at in shown)]]
    for index, row in list(zip(np.ndindex(*(mesh.shape[axis] for axis in slow)), table, strict=True))[:MOST_ROWS]:
        label = [f"{axis} {at}" for axis, at in zip(slow, index, strict=True)]
        on = sorted({host_of[device] for device in row.flat})
        label += [f"host {on[0]}" + (f"..{on[-1]}" if len(on) > 1 else "")] if many else []
        rows.append([", ".join(label), *(device_ids(row[at]) for at in shown)])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    rule = ["─" * (width + 2) for width in widths]
    drawn = ["│".join(f" {cell:<{width}} " for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines = ["┌" + "┬".join(rule) + "┐", f"│{drawn[0]}│", "├" + "┼".join(rule) + "┤"]
    lines += [f"│{row}│" for row in drawn[1:]] + ["└" + "┴".join(rule) + "┘"]
    hidden = [f"{len(table) - MOST_ROWS} more rows"] * (len(table) > MOST_ROWS)
    hidden += [f"{columns - MOST_DRAWN} more columns"] * (columns > MOST_DRAWN)
    return lines + [f"and {' and '.join(hidden)}"] * bool(hidden)


def device_ids(devices: Sequence[Any]) -> str:
    """Their numbers in a few characters: `0 4`, `0..3`, or `0 2 4 .. 30` where there are many."""
    ids = [device.id for device in devices]
    if len(ids) > 2 and ids == list(range(ids[0], ids[0] + len(ids))):
        return f"{ids[0]}..{ids[-1]}"
    return " ".join(map(str, ids if len(ids) <= MOST_DRAWN else [*ids[:3], "..", ids[-1]]))


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def _kind(devices: Sequence[Any]) -> str:
    return " and ".join(sorted({device.device_kind for device in devices}))


def _found(hosts: Sequence[Sequence[Any]]) -> str:
    devices = [device for host in hosts for device in host]
    return f"{len(devices)} x {_kind(devices)} on {len(hosts)} host{'s' * (len(hosts) != 1)}"


def _asked(sizes: Mapping[str, int], where: Mapping[str, str]) -> str:
    """`mesh.data=4 (configs/a.toml), mesh.tensor=2 (--set)`: the axes that are set or not 1, and the product."""
    keys = {f"mesh.{axis}": size for axis, size in sizes.items() if size != 1 or f"mesh.{axis}" in where}
    if not keys:
        return "1 device (no mesh axis is set)"
    shown = ", ".join(f"{key}={size}" + (f" ({where[key]})" if key in where else "") for key, size in keys.items())
    fixed = math.prod(size for size in keys.values() if size != -1)
    return f"{shown}: " + (f"a multiple of {_devices(fixed)}" if -1 in keys.values() else _devices(fixed))


def _simulated(sizes: Mapping[str, int], device_count: int, hosts: int) -> int | None:
    """Simulated devices per process, close to what there is now, with which `sizes` fit; None if no number does."""
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 not in sizes.values():
        count = fixed // hosts
    else:
        step = math.lcm(fixed // math.gcd(fixed, hosts), max(sizes["tensor"], 1))
        count = max(1, round(device_count / hosts / step)) * step
    filled = fill(sizes, count * hosts)
    return count if filled and count % filled["tensor"] == 0 and count <= MOST_SIMULATED else None


def _instead(sizes: Mapping[str, int], device_count: int, per_host: int) -> str:
    """`--set` arguments that make the mesh fit: the fewest axes changed, each by as little as possible."""
    for changed in _nearby(sizes, device_count):
        filled = fill(changed, device_count)
        if filled and per_host % filled["tensor"] == 0:
            break
    else:
        changed = dict.fromkeys(AXES, 1) | {"data": device_count}
    return " ".join(f"--set mesh.{axis}={changed[axis]}" for axis in AXES if changed[axis] != sizes[axis])


def _nearby(sizes: Mapping[str, int], device_count: int) -> Iterator[dict[str, int]]:
    divisors = [k for k in range(1, device_count + 1) if device_count % k == 0]

    def near(axis):
        return sorted(divisors, key=lambda k: (abs(k - sizes[axis]), k))

    order = [axis for axis in ("data", "fsdp", *AXES) if axis in ("data", "fsdp") or sizes[axis] != 1]
    order = list(dict.fromkeys(order))
    yield from (dict(sizes) | {axis: k} for axis in order for k in near(axis))
    for second in reversed(order):  # tensor first: the axis that hosts limit
        yield from (
            dict(sizes) | {second: k, first: j}
            for k in near(second)
            for first in order
            if first != second
            for j in near(first)
        )
