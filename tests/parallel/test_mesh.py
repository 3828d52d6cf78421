import math
import re
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import MeshConfig
from spmdtrain.parallel.mesh import AXES, arrange, build_mesh, describe_mesh, fill, group_by_host
from spmdtrain.processes.processes import simulate_devices

simulate_devices(8)


@dataclass(frozen=True)
class Device:
    """What `arrange` may know of a device, so that a laptop can arrange 4 hosts of 8 GPUs."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    partition_index: int = 0


@dataclass(frozen=True)
class FakeMesh:
    devices: np.ndarray
    axis_names = AXES

    @property
    def shape(self):
        return dict(zip(AXES, self.devices.shape, strict=True))

    @property
    def size(self):
        return self.devices.size


def box(hosts, per_host, **device):
    """Devices in an order that nothing may rely on; ids of a process start far from those of
    another.
    """
    devices = [
        Device(2048 * host + index, host, **device)
        for host in range(hosts)
        for index in range(per_host)
    ]
    return devices[1::2] + devices[::2]


def sizes(**axes):
    return dict.fromkeys(AXES, 1) | axes


def groups_along(array, axis):
    return np.moveaxis(array, AXES.index(axis), -1).reshape(-1, array.shape[AXES.index(axis)])


def hosts_of(group):
    return {device.process_index for device in group}


def test_mesh_axes_are_those_of_the_config_in_the_same_order():
    assert tuple(MeshConfig.model_fields) == (*AXES, "collective_matmul", "elastic")
    assert tuple(MeshConfig().sizes) == AXES


@given(st.lists(st.integers(1, 6), min_size=6, max_size=6), st.sampled_from([None, *AXES]))
def test_fill_makes_the_product_the_device_count(numbers, filled):
    wanted = dict(zip(AXES, numbers, strict=True))
    asked = wanted | ({filled: -1} if filled else {})
    assert fill(asked, math.prod(numbers)) == wanted


@pytest.mark.parametrize(
    "asked, count", [({"data": 4}, 8), ({"data": 16}, 8), ({"data": -1, "fsdp": 3}, 8), ({}, 2)]
)
def test_fill_has_no_answer_for_too_few_too_many_or_a_remainder(asked, count):
    assert fill(sizes(**asked), count) is None


@given(st.data(), st.sampled_from([2, 4]))
def test_tensor_groups_stay_inside_a_host_and_hosts_are_contiguous(data, hosts):
    per_host = 8
    tensor = data.draw(st.sampled_from([1, 2, 4, 8]))
    rest = hosts * per_host // tensor
    chosen = {"tensor": tensor}
    for axis in ("pipeline", "data", "fsdp", "context"):
        chosen[axis] = data.draw(
            st.sampled_from([size for size in range(1, rest + 1) if rest % size == 0])
        )
        rest //= chosen[axis]
    array = arrange(sizes(**chosen, expert=rest), box(hosts, per_host))
    assert all(len(hosts_of(group)) == 1 for group in groups_along(array, "tensor"))
    keys = [(device.process_index, device.id) for device in array.flat]
    assert keys == sorted(keys)


@pytest.mark.parametrize("hosts", [2, 4])
def test_pipeline_spans_hosts_and_everything_else_stays_inside(hosts):
    array = arrange(sizes(pipeline=hosts, fsdp=4, tensor=2), box(hosts, 8))
    assert all(len(hosts_of(group)) == hosts for group in groups_along(array, "pipeline"))
    assert all(
        len(hosts_of(group)) == 1
        for axis in ("fsdp", "tensor")
        for group in groups_along(array, axis)
    )


def test_processes_of_one_device_each_share_the_host_that_jax_says():
    # Ranks dealt out round robin.
    devices = [Device(rank, rank, partition_index=rank % 2) for rank in range(8)]
    assert [[device.id for device in host] for host in group_by_host(devices)] == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]
    array = arrange(sizes(data=2, tensor=4), devices)
    assert all(
        len({device.partition_index for device in group}) == 1
        for group in groups_along(array, "tensor")
    )
    with pytest.raises(ConfigError, match="mesh.tensor=8 would cross hosts"):
        arrange(sizes(tensor=8), devices)


CPU = {"platform": "cpu", "device_kind": "cpu"}
FIT = "the mesh does not fit the"
REFUSALS = {
    "too few devices": (
        (box(1, 4), {"data": 4, "tensor": 2}),
        f"{FIT} 4 devices; asked mesh.data=4 (a.toml), mesh.tensor=2 (--set): 8 devices; "
        "found 4 x NVIDIA H200 on 1 host; try --set mesh.data=2",
    ),
    "too many devices": (
        (box(1, 8), {"fsdp": 4}),
        f"{FIT} 8 devices; asked mesh.fsdp=4: 4 devices; found 8 x NVIDIA H200 on 1 host; "
        "try --set mesh.data=2",
    ),
    "nothing set on a box of GPUs": (
        (box(1, 8), {}),
        f"{FIT} 8 devices; asked 1 device (no mesh axis is set); found 8 x NVIDIA H200 on 1 host; "
        "try --set mesh.data=8",
    ),
    "on CPU another number of devices is a way out": (
        (box(1, 1, **CPU), {"data": 2, "fsdp": 2}),
        f"{FIT} 1 device; asked mesh.data=2 (a.toml), mesh.fsdp=2: 4 devices; "
        "found 1 x cpu on 1 host; try --set mesh.data=1 --set mesh.fsdp=1 or --simulate-devices 4",
    ),
    "several CPU processes": (
        (box(2, 4, **CPU), {"fsdp": 16}),
        f"{FIT} 8 devices; asked mesh.fsdp=16: 16 devices; found 8 x cpu on 2 hosts; "
        "try --set mesh.fsdp=8 or --simulate-devices 8 in each process",
    ),
    "a fill that leaves a remainder": (
        (box(1, 8, **CPU), {"data": -1, "tensor": 3}),
        f"{FIT} 8 devices; asked mesh.data=-1 (a.toml), mesh.tensor=3 (--set): "
        "a multiple of 3 devices; found 8 x cpu on 1 host; "
        "try --set mesh.tensor=2 or --simulate-devices 9",
    ),
    "an absurd size suggests nothing absurd": (
        (box(1, 8, **CPU), {"data": 10**12}),
        f"{FIT} 8 devices; asked mesh.data=1000000000000 (a.toml): 1000000000000 devices; "
        "found 8 x cpu on 1 host; try --set mesh.data=8",
    ),
    "tensor over two hosts": (
        (box(2, 8), {"tensor": 16}),
        "mesh.tensor=16 would cross hosts: it must divide the 8 devices of one; "
        "asked mesh.tensor=16 (--set): 16 devices; found 16 x NVIDIA H200 on 2 hosts; "
        "try --set mesh.data=2 --set mesh.tensor=8",
    ),
    "tensor that straddles hosts names the nearest": (
        (box(2, 6), {"data": 3, "tensor": 4}),
        "mesh.tensor=4 would cross hosts: it must divide the 6 devices of one; "
        "asked mesh.data=3 (a.toml), mesh.tensor=4 (--set): 12 devices; "
        "found 12 x NVIDIA H200 on 2 hosts; try --set mesh.data=4 --set mesh.tensor=3",
    ),
    "tensor filled over hosts": (
        (box(4, 8), {"tensor": -1}),
        "mesh.tensor=32 would cross hosts: it must divide the 8 devices of one; "
        "asked mesh.tensor=-1 (--set): a multiple of 1 device; found 32 x NVIDIA H200 on 4 hosts; "
        "try --set mesh.data=4",
    ),
    "unequal hosts": (
        (box(2, 8)[:-1], {"data": -1}),
        "hosts hold unequal numbers of devices; found 8, 7 NVIDIA H200 on 2 hosts; "
        "try showing every process the same number of devices "
        "(CUDA_VISIBLE_DEVICES, --gpus-per-node)",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_mesh_that_does_not_fit_is_refused_in_one_line(case):
    (devices, asked), message = REFUSALS[case]
    origin = {"data": "a.toml", "tensor": "--set"}
    with pytest.raises(ConfigError) as refusal:
        arrange(
            sizes(**asked),
            devices,
            {f"mesh.{axis}": origin[axis] for axis in asked if axis in origin},
        )
    assert str(refusal.value) == message


@given(
    st.lists(st.sampled_from([1, 1, 2, 3, 4, 5, 8, 16]), min_size=6, max_size=6),
    st.sampled_from([None, *AXES]),
    st.sampled_from([(1, 1), (1, 6), (1, 8), (2, 8), (3, 4), (4, 8)]),
)
def test_what_a_refusal_suggests_works(numbers, filled, shape):
    hosts, per_host = shape
    asked = dict(zip(AXES, numbers, strict=True)) | ({filled: -1} if filled else {})
    try:
        arrange(asked, box(hosts, per_host, **CPU))
    except ConfigError as refusal:
        suggested = dict(re.findall(r"--set mesh\.(\w+)=(\d+)", str(refusal)))
        assert arrange(
            asked | {axis: int(size) for axis, size in suggested.items()}, box(hosts, per_host)
        ).size
        for count in re.findall(r"--simulate-devices (\d+)", str(refusal)):
            assert arrange(asked, box(hosts, int(count), **CPU)).size


def test_build_mesh_covers_the_devices_of_this_process_with_auto_axes():
    mesh = build_mesh(MeshConfig(data=2, fsdp=-1, tensor=2))
    assert dict(mesh.shape) == sizes(data=2, fsdp=2, tensor=2)
    assert mesh.axis_types == (AxisType.Auto,) * 6
    assert list(mesh.devices.flat) == jax.devices()


def test_the_drawing_of_two_hosts():
    drawing = describe_mesh(
        FakeMesh(arrange(sizes(data=2, fsdp=4, tensor=2), [Device(i, i // 8) for i in range(16)]))
    )
    assert [line.rstrip() for line in drawing.splitlines()] == [
        "data 2 x fsdp 4 x tensor 2: 16 x NVIDIA H200 on 2 hosts",
        "",
        "      data    2  across hosts   devices 0 8, ...",
        "      fsdp    4  inside a host  devices 0 2 4 6, ...",
        "    tensor    2  inside a host  devices 0 1, ...",
        "       off       pipeline, expert, context",
        "",
        "┌────────────────┬────────┬────────┬────────┬────────┐",
        "│                │ fsdp 0 │ fsdp 1 │ fsdp 2 │ fsdp 3 │",
        "├────────────────┼────────┼────────┼────────┼────────┤",
        "│ data 0, host 0 │ 0 1    │ 2 3    │ 4 5    │ 6 7    │",
        "│ data 1, host 1 │ 8 9    │ 10 11  │ 12 13  │ 14 15  │",
        "└────────────────┴────────┴────────┴────────┴────────┘",
    ]


@given(st.data(), st.sampled_from([1, 2, 3, 8, 64]))
def test_a_drawing_up_to_64_devices_shows_every_device_or_says_what_it_left_out(data, hosts):
    rest = {1: 8, 2: 16, 3: 18, 8: 64, 64: 512}[hosts]
    per_host, chosen = rest // hosts, {}
    for axis in ("tensor", "fsdp", "data", "pipeline"):
        limit = math.gcd(rest, per_host) if axis == "tensor" else rest
        chosen[axis] = data.draw(
            st.sampled_from([size for size in range(1, limit + 1) if limit % size == 0])
        )
        rest //= chosen[axis]
    devices = [Device(i, i // per_host) for i in range(hosts * per_host)]
    drawing = describe_mesh(FakeMesh(arrange(sizes(**chosen, context=rest), devices)))
    assert max(map(len, drawing.splitlines())) <= 150
    assert len(drawing.splitlines()) <= 30
    boxes = [
        cell.strip()
        for row in drawing.split("├")[-1].splitlines()[1:]
        for cell in row.split("│")[2:-1]
    ]
    drawn = [
        number
        for part in " ".join(boxes).replace(" .. ", "..").split()
        for number in (range(int(part.split("..")[0]), int(part.split("..")[-1]) + 1))
    ]
    assert len(drawn) == len(set(drawn)) and set(drawn) <= set(range(len(devices)))
    assert len(drawn) == len(devices) or re.search(r"^and \d+ more (rows|columns)", drawing, re.M)


def test_one_device_needs_no_drawing():
    assert (
        describe_mesh(FakeMesh(arrange(sizes(), [Device(0, 0)])))
        == "one device: 1 x NVIDIA H200 on 1 host"
    )
