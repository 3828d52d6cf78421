"""Arranges devices in the mesh that the user asked for, or says in one line what to type instead.

Axes are ordered slowest link first, devices host by host. So neighbours along `tensor`, the last
axis, sit inside one host, and `pipeline`, the first, is the axis that spans hosts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from spmdtrain.config.arguments import shown
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import MESH_AXES, MeshConfig

AXES = MESH_AXES
MOST_SUGGESTED = 1024  # more simulated devices than this are not worth suggesting

# The drawing has at most this many rows; the next two limit its columns, and the devices listed in
# one place.
MOST_ROWS = 16
MOST_DRAWN = 8


def build_mesh(
    config: MeshConfig,
    devices: Sequence[Any] | None = None,
    where: Mapping[str, str] | None = None,
) -> Mesh:
    """Returns the mesh over `devices` (default: those of all processes); every axis is `Auto`.

    `where` maps "mesh.data" and so on to the origin of the value (`RunConfig.origin`), for
    messages. Raises ConfigError as `arrange` does.
    """
    devices = jax.devices() if devices is None else checked_devices(devices)
    array = arrange(config.sizes, devices, where)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def checked_devices(devices: Any) -> list[Any]:
    """Returns the devices given by a caller. Raises ConfigError if one is invalid or repeated."""
    fix = "devices=jax.devices()[:4]"
    try:
        listed = [] if isinstance(devices, str | bytes | Mapping) else list(devices)
    except TypeError:
        listed = []
    if not listed or not all(hasattr(device, "process_index") for device in listed):
        raise ConfigError(f"devices={shown(devices)} is not a list of devices", fix=fix)
    if len(set(listed)) < len(listed):
        twice = next(device for device in listed if listed.count(device) > 1)
        raise ConfigError(f"devices= has {twice} more than once", fix=fix)
    return listed


def fill(sizes: Mapping[str, int], device_count: int) -> dict[str, int] | None:
    """Replaces -1 in `sizes` so that the product is `device_count`; None if no size does that."""
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if device_count % fixed:
        return None
    if -1 not in sizes.values() and fixed != device_count:
        return None
    return {axis: device_count // fixed if size == -1 else size for axis, size in sizes.items()}


def arrange(
    sizes: Mapping[str, int], devices: Sequence[Any], where: Mapping[str, str] | None = None
) -> np.ndarray:
    """Returns the devices as an array of shape `sizes`, -1 filled, host by host.

    Of a device only `process_index`, `id`, `device_kind` and `platform` are read (and
    `partition_index`, if processes share a host).

    Raises ConfigError if hosts differ in their number of devices, if the sizes do not fit, or if
    `tensor` would cross hosts; the message says what to type instead.
    """
    hosts = group_by_host(devices)
    per_host = len(hosts[0])
    requested = _describe_request(sizes, where or {})
    present = _describe_hosts(hosts)
    if any(len(host) != per_host for host in hosts):
        counts = ", ".join(str(len(host)) for host in hosts)
        raise ConfigError(
            "hosts hold unequal numbers of devices",
            found=f"{counts} {_device_kinds(devices)} on {len(hosts)} hosts",
            fix="showing every process the same number of devices "
            "(CUDA_VISIBLE_DEVICES, --gpus-per-node)",
        )
    filled = fill(sizes, len(devices))
    if filled is None:
        fix = _fitting_settings(sizes, len(devices), per_host)
        if all(device.platform == "cpu" for device in devices):
            count = _fitting_simulation(sizes, len(devices), len(hosts))
            if count:
                fix += f" or --simulate-devices {count}"
                if len(hosts) > 1:
                    fix += " in each process"
        what = f"the mesh does not fit the {_count_devices(len(devices))}"
        raise ConfigError(what, asked=requested, found=present, fix=fix)
    if per_host % filled["tensor"]:
        raise ConfigError(
            f"mesh.tensor={filled['tensor']} would cross hosts: "
            f"it must divide the {per_host} devices of one",
            asked=requested,
            found=present,
            fix=_fitting_settings(sizes, len(devices), per_host),
        )
    array = np.empty(len(devices), dtype=object)
    array[:] = [device for host in hosts for device in host]
    return array.reshape([filled[axis] for axis in AXES])


def group_by_host(devices: Sequence[Any]) -> list[list[Any]]:
    """Returns the devices of each host, ordered by (process, id).

    A host is a process, unless every process has just one device. Then it is the machine that
    processes share, which jax calls a partition.
    """
    devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    processes = {device.process_index for device in devices}
    one_per_process = len(processes) == len(devices)
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        host = device.process_index
        if one_per_process:
            host = getattr(device, "partition_index", host)
        hosts.setdefault(host, []).append(device)
    return list(hosts.values())


def mesh_in_words(sizes: Mapping[str, int]) -> str:
    """Returns the axes that are split, such as "data 4 x tensor 2"."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


# The drawing


def describe_mesh(mesh: Mesh) -> str:
    """Draws a mesh: which devices each axis connects, then all devices in a grid.

    The rows of the grid are the slow axes, its columns the fast ones.
    """
    hosts = group_by_host(list(mesh.devices.flat))
    hardware = _describe_hosts(hosts)
    if mesh.size == 1:
        return f"one device: {hardware}"
    host_of = {device: number for number, host in enumerate(hosts) for device in host}
    active = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    off = [axis for axis in mesh.axis_names if mesh.shape[axis] == 1]
    title = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in active)
    lines = [f"{title}: {hardware}", ""]
    lines += [_axis_line(mesh, axis, host_of) for axis in active]
    if off:
        lines.append(f"{'off':>10}       {', '.join(off)}")
    lines.append("")
    lines += _grid(mesh, active, host_of, many_hosts=len(hosts) > 1)
    return "\n".join(lines)


def _axis_line(mesh: Mesh, axis: str, host_of: Mapping[Any, int]) -> str:
    """Describes an axis by the first group of devices that it connects."""
    size = mesh.shape[axis]
    groups = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, size)
    first = groups[0]
    crosses = len({host_of[device] for device in first}) > 1
    spans = "across hosts" if crosses else "inside a host"
    more = ", ..." if len(groups) > 1 else ""
    return f"{axis:>10} {size:>4}  {spans:<13}  devices {device_ids(first)}{more}"


def _grid(
    mesh: Mesh, active: Sequence[str], host_of: Mapping[Any, int], many_hosts: bool
) -> list[str]:
    """Draws the devices in boxes.

    A box holds the devices along the last axis. With three or more axes, the second to last makes
    the columns; the others make the rows.
    """
    last = active[-1]
    if len(active) > 2:
        column = active[-2]
        columns = mesh.shape[column]
        slow = active[:-2]
    else:
        column = None
        columns = 1
        slow = active[:-1]
    boxes = mesh.devices.reshape(-1, columns, mesh.shape[last])  # [rows, columns, devices]
    shown = range(min(columns, MOST_DRAWN))

    rows = [["", *(f"{column} {at}" if column else last for at in shown)]]
    indices = np.ndindex(*(mesh.shape[axis] for axis in slow))
    for index, row in list(zip(indices, boxes, strict=True))[:MOST_ROWS]:
        label = [f"{axis} {at}" for axis, at in zip(slow, index, strict=True)]
        if many_hosts:
            on = sorted({host_of[device] for device in row.flat})
            label.append(f"host {on[0]}" if len(on) == 1 else f"host {on[0]}..{on[-1]}")
        rows.append([", ".join(label), *(device_ids(row[at]) for at in shown)])

    lines = _ruled(rows)
    hidden = []
    if len(boxes) > MOST_ROWS:
        hidden.append(f"{len(boxes) - MOST_ROWS} more rows")
    if columns > MOST_DRAWN:
        hidden.append(f"{columns - MOST_DRAWN} more columns")
    if hidden:
        lines.append(f"and {' and '.join(hidden)}")
    return lines


def _ruled(rows: Sequence[Sequence[str]]) -> list[str]:
    """Draws cells as a table with lines; the first row is its header."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    rule = ["─" * (width + 2) for width in widths]
    drawn = []
    for row in rows:
        cells = [f" {cell:<{width}} " for cell, width in zip(row, widths, strict=True)]
        drawn.append(f"│{'│'.join(cells)}│")
    head, *body = drawn
    return [
        f"┌{'┬'.join(rule)}┐",
        head,
        f"├{'┼'.join(rule)}┤",
        *body,
        f"└{'┴'.join(rule)}┘",
    ]


def device_ids(devices: Sequence[Any]) -> str:
    """Lists the ids of devices in a few characters: `0 4`, `0..7`, or `0 8 16 .. 248` if many."""
    ids = [device.id for device in devices]
    if len(ids) > 2 and ids == list(range(ids[0], ids[0] + len(ids))):
        return f"{ids[0]}..{ids[-1]}"
    if len(ids) > MOST_DRAWN:
        return " ".join(map(str, [*ids[:3], "..", ids[-1]]))
    return " ".join(map(str, ids))


# Messages


def _count_devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _device_kinds(devices: Sequence[Any]) -> str:
    return " and ".join(sorted({device.device_kind for device in devices}))


def _describe_hosts(hosts: Sequence[Sequence[Any]]) -> str:
    devices = [device for host in hosts for device in host]
    on = "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
    return f"{len(devices)} x {_device_kinds(devices)} on {on}"


def _describe_request(sizes: Mapping[str, int], where: Mapping[str, str]) -> str:
    """Returns text such as `mesh.data=4 (configs/a.toml), mesh.tensor=2 (--set): 8 devices`.

    Names the axes that are set explicitly or differ from 1.
    """
    shown = []
    for axis, size in sizes.items():
        key = f"mesh.{axis}"
        if key in where:
            shown.append(f"{key}={size} ({where[key]})")
        elif size != 1:
            shown.append(f"{key}={size}")
    if not shown:
        return "1 device (no mesh axis is set)"
    total = _count_devices(math.prod(size for size in sizes.values() if size != -1))
    if -1 in sizes.values():
        total = f"a multiple of {total}"
    return f"{', '.join(shown)}: {total}"


def _fitting_simulation(sizes: Mapping[str, int], device_count: int, hosts: int) -> int | None:
    """Returns how many simulated devices per process would fit `sizes`; None if no number does.

    If an axis is to be filled, it is a number close to that of the present devices.
    """
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        step = math.lcm(fixed // math.gcd(fixed, hosts), max(sizes["tensor"], 1))
        count = max(1, round(device_count / hosts / step)) * step
    else:
        count = fixed // hosts
    filled = fill(sizes, count * hosts)
    if filled is None or count % filled["tensor"] or count > MOST_SUGGESTED:
        return None
    return count


def _fitting_settings(sizes: Mapping[str, int], device_count: int, per_host: int) -> str:
    """Returns `--set` arguments that make the mesh fit.

    They change as few axes as possible, each by as little as possible.
    """
    best = dict.fromkeys(AXES, 1) | {"data": device_count}
    for changed in _nearby_sizes(sizes, device_count):
        filled = fill(changed, device_count)
        if filled and per_host % filled["tensor"] == 0:
            best = changed
            break
    return " ".join(f"--set mesh.{axis}={best[axis]}" for axis in AXES if best[axis] != sizes[axis])


def _nearby_sizes(sizes: Mapping[str, int], device_count: int) -> Iterator[dict[str, int]]:
    """Yields `sizes` with one axis changed, then with two, nearest first."""
    divisors = [k for k in range(1, device_count + 1) if device_count % k == 0]

    def nearest(axis):
        return sorted(divisors, key=lambda k: (abs(k - sizes[axis]), k))

    # Unused axes stay unused, except for data and fsdp, which suit any model.
    order = ["data", "fsdp", *(axis for axis in AXES if sizes[axis] != 1)]
    order = list(dict.fromkeys(order))
    for axis in order:
        for size in nearest(axis):
            yield {**sizes, axis: size}
    for second in reversed(order):  # tensor first: the axis that hosts limit
        for second_size in nearest(second):
            for first in order:
                if first == second:
                    continue
                for first_size in nearest(first):
                    yield {**sizes, second: second_size, first: first_size}
