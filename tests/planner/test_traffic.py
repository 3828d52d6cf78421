"""What a layout has to send, against sums done by hand."""

import pytest
from workloads import workload_with

from spmdtrain.config.schema import Llama
from spmdtrain.planner.cost.collective_time import data_sums
from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.cost.workload import MeshShape, Workload
from spmdtrain.planner.traffic import needed_traffic

MODEL = Llama(layers=4, embed=8, heads=2, kv_heads=1, ffn=16, vocab=32, mlp="gelu")
LAYER = 8 * (8 + 8 + 8 + 16 + 16)  # queries, keys with values, output, up, down
TABLES = 2 * 32 * 8
NORMS = 2 * 8
ALL = 4 * (LAYER + NORMS) + TABLES + NORMS


def workload(mesh: MeshShape, **changes) -> Workload:
    settings = {"model": MODEL, "sequence_length": 16, "global_batch": 16, "microbatch": 2}
    return workload_with(**settings | changes, mesh=mesh)


def test_one_device_sends_nothing():
    assert needed_traffic(workload(MeshShape())) == {}


def test_fsdp_gathers_layers_twice_and_tables_once_per_microbatch():
    gathered = 2 * (2 * ALL - TABLES)
    scattered = 4 * ALL
    assert needed_traffic(workload(MeshShape(fsdp=4))) == {
        "fsdp": 2 * 3 / 4 * (gathered + scattered)
    }


def test_zero_scatters_float32_and_gathers_what_it_computes_with():
    assert needed_traffic(workload(MeshShape(data=2))) == {"data": ALL * 8 / 2}
    assert needed_traffic(workload(MeshShape(data=2), zero=1)) == {"data": ALL * 6 / 2}


def test_neighbours_scatter_float32_and_send_others_their_share_of_eight_bits():
    coded = {"sent_gradient_bytes": 1.25, "compression": {"codec": "int8", "within": 4}}
    scattered = 4 * 3 / 4 + 1.25 / 4 / 2
    gathered = 1.25 / 4 / 2 + 1.25 * 3 / 4
    sent = needed_traffic(workload(MeshShape(data=8), **coded))
    assert sent == {"data": pytest.approx(ALL * (scattered + gathered))}
    sent = needed_traffic(workload(MeshShape(data=8), zero=1, **coded))
    assert sent == {"data": pytest.approx(ALL * (scattered + 2 * 7 / 8))}
    all_neighbours = needed_traffic(workload(MeshShape(data=4), **coded))
    assert all_neighbours == needed_traffic(workload(MeshShape(data=4)))


def test_an_exchange_among_all_devices_of_many_hosts_takes_the_time_of_float32():
    """Where each device has a network card, a ring uses all of a host for one copy."""

    def seconds(**coded):
        sums = data_sums(workload(MeshShape(data=64), **coded), 4)
        return sum(each.seconds(1e9, DEVICES["h100"], True) for each in sums)

    def compressed(within: int) -> float:
        codec = {"codec": "int8", "within": within}
        return seconds(sent_gradient_bytes=1 + 4 / 256, compression=codec)

    assert compressed(within=1) == pytest.approx(seconds(), rel=0.1)
    assert compressed(within=8) < 0.75 * seconds()


@pytest.mark.parametrize(
    ("remat", "split", "sums"),
    [("none", False, 18), ("full", False, 22), ("none", True, 22), ("full", True, 28)],
)
def test_tensor_sums_activations(remat, split, sums):
    x = 2 * 16 * 8 * 2
    sent = needed_traffic(workload(MeshShape(tensor=2), remat=remat, sequence_parallel=split))
    assert sent == {"tensor": 2 * 8 * sums * x / 2}


def test_devices_of_tensor_share_the_sums_over_the_stages_and_with_a_split_stream_the_hops():
    x = 2 * 16 * 8 * 2
    mesh = MeshShape(pipeline=2, tensor=2)
    of_stages = {"schedule": "interleaved", "chunks": 2}
    whole = needed_traffic(workload(mesh, **of_stages))
    split = needed_traffic(workload(mesh, **of_stages, sequence_parallel=True))
    sums = 2 * 4 / 2 / 2
    assert whole["pipeline"] == 8 * (2 * 1.5 + sums) * x
    assert split["pipeline"] == 8 * (2 * 1.5 / 2 + sums) * x
    put_together = 8 * 3 * x / 2  # slices, again
    gathered = 8 * 2 * 2 * x / 2  # tokens, for the gradients of the weights of a stage's two layers
    assert whole["tensor"] - split["tensor"] == put_together - gathered


def test_a_pipeline_sends_hops_and_sums_of_the_vocabulary():
    x = 2 * 16 * 8 * 2
    sent = needed_traffic(workload(MeshShape(pipeline=2), schedule="interleaved", chunks=2))
    assert sent == {"pipeline": 8 * (2 * 1.5 + 2 * 4 / 2) * x}


def test_context_gathers_keys_and_values():
    whole = 2 * 16 * 8 * 2  # of keys and values of a microbatch, in bytes
    sent = needed_traffic(workload(MeshShape(context=2)))
    assert sent == {"context": (8 * 4 * 2 * whole + 2 * 4 * ALL) / 2}


@pytest.mark.parametrize(
    ("ways", "remat", "times"),
    [
        (2, "none", 1 + 1 + 2),  # forward, keys again, float32 gradients
        (4, "none", 3 + 4 + 2 * 3),
        (4, "dots", 3 + 4 + 2 * 3),
        (4, "full", 2 * 3 + 4 + 2 * 3),
    ],
)
def test_a_ring_sends_keys_hop_by_hop(ways, remat, times):
    settings = {"context_attention": "ring", "remat": remat}
    sent = needed_traffic(workload(MeshShape(context=ways), **settings))["context"]
    kept = 2 * 16 // ways * 8 * 2  # keys and values of a device's tokens, in bytes
    assert sent == 8 * 4 * times * kept + 2 * (ways - 1) / ways * 4 * ALL


def test_ulysses_exchanges_heads_for_tokens():
    sent = needed_traffic(workload(MeshShape(context=2), context_attention="ulysses"))["context"]
    head = 2 * 8 * 4 * 2  # one head of a device's tokens, in bytes
    exchanged = 2 + 2 + 2  # queries, keys with values, outputs
    assert sent == 8 * 4 * 2 * exchanged * head / 2 + 4 * ALL
