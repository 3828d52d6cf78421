"""Estimates the seconds of single collectives on one device: rings over a mesh axis, and sends
between stages.

A ring collective takes bytes / bandwidth for the data and one latency per hop. `Group` says which
devices take part: the members on one host share fast links, and a ring that leaves its host uses
the network.
"""

import math
from typing import NamedTuple

from spmdtrain.planner.cost.hardware import Hardware
from spmdtrain.planner.cost.software import LINK_SHARE, SEND_SHARE
from spmdtrain.planner.cost.workload import Group, Workload


def ring_bandwidth(group: Group, hardware: Hardware, all_cards: bool = True) -> float:
    """Returns the bytes/s that each member of a ring gets.

    A ring over several hosts uses one network card per member on a host (only one per host without
    `all_cards`).
    """
    on_a_host = members_on_a_host(group, hardware)
    if on_a_host == group.size:
        return LINK_SHARE * hardware.link_bandwidth
    cards = on_a_host if all_cards else 1
    return LINK_SHARE * min(hardware.link_bandwidth, cards * hardware.network_bandwidth)


def ring_latency(group: Group, hardware: Hardware) -> float:
    """Returns the seconds of all hops of a ring, one after another.

    One of the members on a host sends to the next host.
    """
    on_a_host = members_on_a_host(group, hardware)
    if on_a_host == group.size:
        across_hosts = 0
    else:
        across_hosts = min(group.size - 1, group.size / on_a_host)
    inside_hosts = group.size - 1 - across_hosts
    return inside_hosts * hardware.link_latency + across_hosts * hardware.network_latency


def members_on_a_host(group: Group, hardware: Hardware) -> int:
    """Returns how many members of the group share a host."""
    # Hosts hold consecutive devices, so members that are far apart share no host.
    return max(1, min(group.size, hardware.per_host // group.stride))


def all_gather_seconds(
    moved: float,
    group: Group,
    hardware: Hardware,
    *,
    all_cards: bool = True,
    pieces: int = 1,
) -> float:
    """Returns the seconds of an all-gather or reduce-scatter of `moved` bytes in `pieces`.

    The pieces follow each other. `moved` counts the whole array, as each member has it after the
    all-gather.
    """
    if group.size == 1:
        return 0.0
    bandwidth = ring_bandwidth(group, hardware, all_cards)
    # Each member has 1 / size of the bytes already, and receives the rest.
    sending = (group.size - 1) / group.size * moved / bandwidth
    return sending + pieces * ring_latency(group, hardware)


class DataSum(NamedTuple):
    """One collective of the sum of gradients over `data`: a scatter or a gather over a group."""

    group: Group
    element_bytes: float  # of the whole array, for one element of a gradient
    is_exchange: bool = False  # an all-to-all instead of a ring

    def seconds(self, elements: float, hardware: Hardware, all_cards: bool) -> float:
        """Returns the seconds for gradients of this many elements."""
        moved = self.element_bytes * elements
        if not self.is_exchange or self.group.size == 1:
            return all_gather_seconds(moved, self.group, hardware, all_cards=all_cards)
        sent = (self.group.size - 1) / self.group.size * moved
        return all_to_all_seconds(sent, self.group, hardware)


def data_sums(workload: Workload, wide: float, gathered: float = 0) -> list[DataSum]:
    """Returns the collectives that sum gradients over `data`, once a step: scatters, then gathers.

    `wide` are the bytes of an uncompressed element. `gathered`, unless 0, are those of an element
    that is gathered in place of the sum.
    """
    whole = workload.mesh.group("data")
    sent, within = workload.sent_gradient_bytes, workload.data_within
    if sent is None or within >= whole.size:
        scatters = gathers = [DataSum(whole, wide)]
    else:
        inside = Group(within, whole.stride)
        across = Group(whole.size // within, within * whole.stride)
        crossing = DataSum(across, sent / within, workload.data_exchanges)
        scatters = [DataSum(inside, wide), crossing]
        gathers = [crossing._replace(is_exchange=False), DataSum(inside, sent)]
    gathered = gathered or (workload.compute_bytes if workload.zero else 0)
    return scatters + ([DataSum(whole, gathered)] if gathered else gathers)


def all_to_all_seconds(sent: float, group: Group, hardware: Hardware) -> float:
    """Returns the seconds of an all-to-all in which each member sends `sent` bytes to the others.

    Each has a message for every other member. Messages inside the host take the links, while the
    others take the network card.
    """
    if group.size == 1:
        return 0.0
    on_a_host = members_on_a_host(group, hardware)
    inside, across = on_a_host - 1, group.size - on_a_host
    message = sent / (group.size - 1)
    links = inside * (message / (LINK_SHARE * hardware.link_bandwidth) + hardware.link_latency)
    network = LINK_SHARE * hardware.network_bandwidth
    return max(links, across * (message / network + hardware.network_latency))


def relayed_seconds(sent: float, across: float, group: Group, hardware: Hardware) -> float:
    """Returns the seconds of an all-to-all whose messages are passed on inside their host.

    A member sends `sent` bytes in all, of which `across` cross the network, once for each host.
    Links and network work at the same time (DeepEP; Hybrid-EP of NVIDIA).
    """
    if group.size == 1:
        return 0.0
    on_a_host = members_on_a_host(group, hardware)
    hosts = group.size // on_a_host
    over_links = (on_a_host - 1) / on_a_host * sent * group.size / (group.size - 1)
    links = over_links / (LINK_SHARE * hardware.link_bandwidth)
    links += (on_a_host - 1) * hardware.link_latency
    network = across / (LINK_SHARE * hardware.network_bandwidth)
    return max(links, network + (hosts - 1) * hardware.network_latency)


def all_reduce_seconds(moved: float, group: Group, hardware: Hardware) -> float:
    """Returns the seconds of a reduce-scatter and an all-gather, along a ring or a tree of hosts.

    NCCL takes whichever is quicker. Both send the same `moved` bytes, but the latency of a tree
    grows with the logarithm of the number of hosts (S. Jeaugey, Massively Scale Your Deep Learning
    Training with NCCL 2.4, 2019).
    """
    ring = ring_latency(group, hardware)
    saved = max(0.0, ring - _tree_latency(group, hardware))
    return 2 * (all_gather_seconds(moved, group, hardware) - saved)


def _tree_latency(group: Group, hardware: Hardware) -> float:
    """Returns the seconds from the leaves of a binary tree of hosts to its root.

    The members on a host form a chain.
    """
    on_a_host = members_on_a_host(group, hardware)
    hosts = math.ceil(group.size / on_a_host)
    levels = math.ceil(math.log2(hosts))
    return (on_a_host - 1) * hardware.link_latency + levels * hardware.network_latency


def send_seconds(moved: float, stride: int, hardware: Hardware) -> float:
    """Returns the seconds of sending `moved` bytes to the next stage, `stride` devices away.

    Stages form a ring, so the slowest send decides: it goes over the network as soon as a neighbour
    is on another host.
    """
    if stride < hardware.per_host:
        bandwidth = SEND_SHARE * hardware.link_bandwidth
        latency = hardware.link_latency
    else:
        bandwidth = hardware.network_bandwidth
        latency = hardware.network_latency
    return moved / (LINK_SHARE * bandwidth) + latency
