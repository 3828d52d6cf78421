import functools
import time
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.compiled.hlo import (
    calls,
    collectives,
    events,
    instructions,
    overlaps,
    replica_groups,
    report,
    sent_per_output,
    traffic,
)
from spmdtrain.compiled.step_memory import StepMemory, memory_in, memory_of
from spmdtrain.processes.processes import simulate_devices

simulate_devices(8)

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
EVERY = P("data", "fsdp", "tensor")


@functools.cache
def cube(shuffled=False):
    devices = np.array(jax.devices())[[5, 0, 3, 6, 1, 7, 2, 4] if shuffled else slice(None)]
    return Mesh(devices.reshape(2, 2, 2), tuple(CUBE), axis_types=(AxisType.Auto,) * 3)


def compiled(function, *arguments, mesh=None, **options):
    """`arguments` are (shape, spec) pairs of float32."""
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh or cube(), spec))
        for shape, spec in arguments
    ]
    return jax.jit(function, **options).lower(*arrays).compile()


def seen(function, *arguments, mesh=None):
    """Collectives of `function` as (kind, axis, inside_loop, count, bytes)."""
    text = compiled(function, *arguments, mesh=mesh).as_text()
    return [tuple(each.values()) for each in collectives(text, CUBE)]


def manual(function, out=EVERY, mesh=None):
    """`function` sees the (4, 4, 4) block of an (8, 8, 8) array that a device holds."""
    return jax.shard_map(
        function, mesh=mesh or cube(), in_specs=EVERY, out_specs=out, check_vma=False
    )


BLOCK = 4 * 4 * 4 * 4  # bytes of a (4, 4, 4) float32 block
ARRAY = ((8, 8, 8), EVERY)
SWAP = [(0, 1), (1, 0)]

KNOWN = {
    "psum": (lambda x: lax.psum(x, "data"), ("all-reduce", "data", BLOCK)),
    "psum over two axes": (
        lambda x: lax.psum(x, ("data", "tensor")),
        ("all-reduce", "data+tensor", BLOCK),
    ),
    "psum over all": (
        lambda x: lax.psum(x, tuple(CUBE)),
        ("all-reduce", "data+fsdp+tensor", BLOCK),
    ),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "fsdp", scatter_dimension=0, tiled=True),
        ("reduce-scatter", "fsdp", BLOCK // 2),
    ),
    "all_gather": (
        lambda x: lax.all_gather(x, "tensor", axis=0, tiled=True),
        ("all-gather", "tensor", 2 * BLOCK),
    ),
    "all_to_all": (
        lambda x: lax.all_to_all(x, "fsdp", 0, 1, tiled=True),
        ("all-to-all", "fsdp", BLOCK),
    ),
    "ppermute": (
        lambda x: lax.ppermute(x, "tensor", SWAP),
        ("collective-permute", "tensor", BLOCK),
    ),
    "half a ppermute": (
        lambda x: lax.ppermute(x, "data", SWAP[:1]),
        ("collective-permute", "data", BLOCK),
    ),
    "diagonal ppermute": (
        lambda x: lax.ppermute(x, ("data", "fsdp"), [(0, 3), (3, 0)]),
        ("collective-permute", "data+fsdp", BLOCK),
    ),
}


@pytest.mark.parametrize("shuffled", [False, True], ids=["ids in order", "ids shuffled"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_collective_written_by_hand_is_found_over_its_axis(name, shuffled):
    function, (kind, axis, size) = KNOWN[name]
    mesh = cube(shuffled)
    assert seen(manual(function, mesh=mesh), ARRAY, mesh=mesh) == [(kind, axis, False, 1, size)]


def test_a_collective_in_a_scan_is_inside_the_loop_and_counts_once():
    def body(carry, _):
        return lax.psum(carry, "data") * 0.5, None

    def steps(x):
        return lax.psum(lax.scan(body, x, None, length=5)[0] * 2, "data")

    assert seen(manual(steps), ARRAY) == [
        ("all-reduce", "data", False, 1, BLOCK),
        ("all-reduce", "data", True, 1, BLOCK),
    ]


def test_a_conditional_inside_a_scan_is_inside_both_and_one_outside_is_not_inside_a_loop():
    def body(carry, at):
        return lax.cond(
            at % 2 == 0, lambda x: lax.psum(x, "data") * 0.5, lambda x: x * 2, carry
        ), None

    def steps(x):
        x = lax.scan(body, x, jnp.arange(4))[0]
        return lax.cond(x[0, 0, 0] > 0, lambda x: lax.psum(x * 3, "tensor"), lambda x: x, x)

    found = instructions(compiled(manual(steps), ARRAY).as_text(), CUBE)
    assert [(each.axis, each.inside_loop, each.inside_conditional) for each in found] == [
        ("data", True, True),
        ("tensor", False, True),
    ]


def test_nested_loops_are_inside_a_loop():
    def inner(carry, _):
        return lax.ppermute(carry, "fsdp", SWAP) + 1, None

    def outer(carry, _):
        return lax.scan(inner, carry * 2, None, length=3)[0], None

    assert seen(manual(lambda x: lax.scan(outer, x, None, length=3)[0]), ARRAY) == [
        ("collective-permute", "fsdp", True, 1, BLOCK)
    ]


def test_a_matmul_sharded_automatically_gathers_over_fsdp_and_reduces_over_tensor():
    def project_up_and_down(x, up, down):
        return jnp.tanh(x @ up) @ down

    batch = ((16, 32), P(("data", "fsdp"), None))
    up, down = ((32, 64), P("fsdp", "tensor")), ((64, 32), P("tensor", "fsdp"))
    out = NamedSharding(cube(), P(("data", "fsdp"), None))
    text = compiled(project_up_and_down, batch, up, down, out_shardings=out).as_text()
    found = [tuple(each.values()) for each in collectives(text, CUBE)]
    assert found == [
        ("all-gather", "fsdp", False, 2, 2 * 32 * 32 * 4),
        ("all-reduce", "tensor", False, 1, 4 * 32 * 4),
    ]


def test_the_gradient_of_replicated_weights_crosses_data_and_fsdp_once():
    def gradient(x, w):
        return jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)

    arguments = ((16, 32), P(("data", "fsdp"), None)), ((32, 64), P(None, "tensor"))
    assert seen(gradient, *arguments) == [("all-reduce", "data+fsdp", False, 1, 32 * 32 * 4)]


def test_memory_is_per_device_and_donation_shows_as_alias():
    def add(x):
        return x + 1

    kept, donated = compiled(add, ARRAY), compiled(add, ARRAY, donate_argnums=0)
    assert memory_of(kept) == StepMemory(BLOCK, BLOCK, alias_bytes=0, temp_bytes=0)
    assert memory_of(donated) == StepMemory(BLOCK, BLOCK, alias_bytes=BLOCK, temp_bytes=0)
    assert (memory_of(kept).held, memory_of(donated).held) == (2 * BLOCK, BLOCK)


def test_the_report_is_what_compiled_json_holds():
    began = time.perf_counter()
    step = compiled(manual(lambda x: lax.psum(x, "data")), ARRAY)
    seconds = time.perf_counter() - began
    assert report(step, cube(), seconds) == {
        "memory": asdict(memory_of(step)),
        "collectives": [
            {
                "kind": "all-reduce",
                "axis": "data",
                "inside_loop": False,
                "count": 1,
                "bytes": BLOCK,
            },
        ],
        "traffic": traffic(step.as_text(), CUBE),
        "calls": {},
        "compile_seconds": seconds,
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ENTRY %", "BEGIN %"),
        ("replica_groups=", "groups="),
        ("num_partitions=8", "num_partitions=9"),
        (" = f32[", " = odd["),
    ],
)
def test_a_text_that_cannot_be_read_costs_a_run_no_more_than_its_list(old, new):
    """A newer XLA may spell something in another way: `collectives` says so loudly, a training run
    goes on.
    """
    step = compiled(manual(lambda x: lax.psum(x, "data")), ARRAY)
    text = step.as_text().replace(old, new)
    assert text != step.as_text()
    with pytest.raises((AssertionError, ValueError)):
        collectives(text, CUBE)

    class Step:
        memory_analysis = staticmethod(step.memory_analysis)
        as_text = staticmethod(lambda: text)

    found = report(Step, cube(), 1.0)
    assert found["collectives"] is None and found["unread"]
    assert memory_in(found) == memory_of(step) and found["compile_seconds"] == 1.0


def test_what_a_program_calls_is_counted_by_its_name():
    def twice(x):
        return jax.lax.linalg.cholesky(x) + jax.lax.linalg.cholesky(x + 1)

    text = compiled(twice, ((4, 4), P())).as_text()
    [(name, count)] = calls(text).items()
    assert name.startswith("lapack_spotrf") and count == 2


def module(*lines, header="HloModule m, num_partitions=8"):
    body = "\n".join(f"  {line}" for line in lines)
    return f"{header}\n\nENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"


def reduce_over(groups, dtype="f32[4]{0}"):
    return module(f"ROOT %r = {dtype} all-reduce(%p), channel_id=1, replica_groups={groups}")


# Printed by XLA for 8 devices on jax 0.10 and 0.12 (CPU, and compiled for 8 H200 without one).
SPELLINGS = {
    "{{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true": "data",
    "{{0,2},{4,6},{1,3},{5,7}}, dimensions={0}": "fsdp",
    "{{0,1,4,5},{2,3,6,7}}": "data+tensor",
    "{{0,3},{1,2},{4,7},{5,6}}": "fsdp+tensor",
    "{{0},{1},{2},{3},{4},{5},{6},{7}}": "none",
    "{}, use_global_device_ids=true": "data+fsdp+tensor",
    "[4,2]<=[8], use_global_device_ids=true": "tensor",
    "[1,8]<=[8]": "data+fsdp+tensor",
    "[8,1]<=[8]": "none",
    "[4,2]<=[4,2]T(1,0)": "fsdp",
    "[2,4]<=[4,2]T(1,0)": "data+fsdp",
    "[4,2]<=[2,2,2]T(2,1,0)": "data",
    "[4,2]<=[2,2,2]T(0,2,1)": "fsdp",
    "[4,2]<=[2,4]T(1,0)": "data",
    "mesh['data'=2,'fsdp'=2,'tensor'=2] {'data'}": "data",
    "mesh['data'=2,'fsdp'=2,'tensor'=2] {'data','tensor'}, dimensions={0}": "data+tensor",
    "mesh['data'=2,'fsdp'=2,'tensor'=2] {}": "none",
    "mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1'}": "fsdp",
    (
        "mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_2'}, metadata={}"
    ): "data",
    "mesh['x'=4,'y'=2], device_ids=(0,2,1,3,4,6,5,7) {'y'}": "fsdp",
    "mesh['data'=8] {'data':(2)4}": "fsdp+tensor",
    "mesh['data'=8] {'data':(1)2}": "data",
    "mesh['data'=8] {'data':(2)2}": "fsdp",
    "mesh['data'=8] {'data':(1)2,'data':(4)2}": "data+tensor",
    "mesh[data=2,fsdp=4] {fsdp:(2)2}": "tensor",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_groups_is_read(spelling):
    assert [each["axis"] for each in collectives(reduce_over(spelling), CUBE)] == [
        SPELLINGS[spelling]
    ]


@given(st.permutations(range(3)), st.integers(1, 3))
def test_iota_groups_are_what_numpy_makes_of_them(order, inner):
    members = 2**inner
    text = f"[{8 // members},{members}]<=[2,2,2]T({','.join(map(str, order))})"
    expected = np.arange(8).reshape(2, 2, 2).transpose(order).reshape(-1, members)
    np.testing.assert_array_equal(replica_groups(text, 8), expected)
    # and the axis names follow from the last axes of the transposition
    assert collectives(reduce_over(text), CUBE)[0]["axis"] == "+".join(
        list(CUBE)[at] for at in sorted(order[-inner:])
    )


@pytest.mark.core
def test_the_mesh_spelling_agrees_with_what_this_jax_prints_for_the_same_groups():
    for axes in (("data",), ("fsdp", "tensor"), ("data", "tensor")):
        text = compiled(manual(lambda x, axes=axes: lax.psum(x, axes)), ARRAY).as_text()
        (found,) = instructions(text, CUBE)
        names = ",".join(f"'{axis}'" for axis in axes)
        (spelled,) = instructions(
            reduce_over(f"mesh['data'=2,'fsdp'=2,'tensor'=2] {{{names}}}"), CUBE
        )
        assert found.axis == spelled.axis == "+".join(axes)


UNREADABLE = {
    "groups in no known spelling": reduce_over("V3[what]"),
    "groups of an unknown axis": reduce_over("mesh['data'=8] {'model'}"),
    "no groups at all": module("%r = f32[4]{0} all-reduce(%p), channel_id=1"),
    "a position outside of the mesh": reduce_over("{{0,9}}"),
    "a device id where a position belongs": reduce_over("{{0,2048}}"),
    "an unknown dtype": reduce_over("{}", "weird[4]{0}"),
    "a start that nothing ends": module("%s = f32[4]{0} all-reduce-start(%p), replica_groups={}"),
    "another number of devices": module(
        "%p = f32[4] parameter(0)", header="HloModule m, num_partitions=4"
    ),
    "several replicas": module("%p = f32[4] parameter(0)", header="HloModule m, replica_count=8"),
    "a call of what is not there": module("%r = f32[4]{0} call(%p), to_apply=%lost"),
    "a collective nobody calls": "%lost (p: f32[4]) -> f32[4] {\n"
    "  %r = f32[4] all-reduce(%p), replica_groups={}\n}\n" + module("%p = f32[4] parameter(0)"),
    "no entry": "HloModule m",
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_is_not_understood_raises_and_is_never_skipped(case):
    with pytest.raises(AssertionError) as error:
        collectives(UNREADABLE[case], CUBE)
    assert str(error.value)


def test_bytes_of_a_tuple_are_those_of_all_its_elements():
    (found,) = instructions(
        reduce_over(
            "{}",
            "(f32[8,4]{1,0:S(1)}, bf16[3]{0}, pred[], "
            "/*index=3*/f8e4m3fn[5]{0:T(8)}, s4[3]{0:E(4)})",
        ),
        CUBE,
    )
    assert found.bytes_by_dtype == {"f32": 128, "bf16": 6, "pred": 1, "f8e4m3fn": 5, "s4": 2}
    assert found.bytes == 142


# As printed for H200: starts whose output is (operands, results), and a collective fused into a
# kernel.
ASYNC = """HloModule jit_misc, is_scheduled=true, num_partitions=8

%fused_psum (param_0: f32[16]) -> f32[16] {
  %param_0 = f32[16]{0} parameter(0)
  ROOT %psum.2 = f32[16]{0} all-reduce(%param_0), channel_id=1, replica_groups=[4,2]<=[8]
}

%body (arg: (s32[], f32[16])) -> (s32[], f32[16]) {
  %ag-start = ((f32[16]{0}, f32[16]{0}), (f32[32]{0}, f32[32]{0})) all-gather-start(%a, %b), \
channel_id=1, replica_groups={{0,2},{4,6},{1,3},{5,7}}, dimensions={0}, \
metadata={op_name="f(x, calls=%g) = (\\"calls=%h"}
  %fusion-start = ((f32[16]{0}), f32[16]{0}, u32[]) fusion-start(%a), kind=kCustom, \
calls=%fused_psum
  %ag-done = (f32[32]{0}, f32[32]{0}) all-gather-done(%ag-start), metadata={op_name="all-gather(x)"}
  %fusion-done = f32[16]{0} fusion-done(%fusion-start)
  ROOT %tuple.1 = (s32[], f32[16]{0}) tuple(%i, %fusion-done)
}

%condition (arg: (s32[], f32[16])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main.5_spmd (p: f32[16]) -> f32[16] {
  %rs-start = ((f32[16]{0}), f32[8]{0}) reduce-scatter-start(%p), channel_id=1, \
replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}
  %rs-done = f32[8]{0} reduce-scatter-done(%rs-start)
  %cp-start = (f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%p), channel_id=1, \
source_target_pairs={{0,2},{2,0}}
  %cp-done = f32[16]{0} collective-permute-done((f32[16]{0}, f32[16]{0}, u32[], u32[]) %cp-start)
  %nothing = f32[16]{0} collective-permute(%p), channel_id=1, source_target_pairs={}
  %loop = (s32[], f32[16]{0}) while(%init), condition=%condition, body=%body, \
backend_config={"n":"3"}
  %once = f32[16]{0} fusion(%p), kind=kCustom, calls=%fused_psum
  ROOT %out = f32[16]{0} get-tuple-element(%loop), index=1
}
"""


def test_a_start_and_its_done_are_one_and_a_kernel_called_from_two_places_is_two():
    assert [tuple(each.values()) for each in collectives(ASYNC, CUBE)] == [
        ("all-gather", "fsdp", True, 1, 2 * 32 * 4),
        ("all-reduce", "tensor", False, 1, 16 * 4),
        ("all-reduce", "tensor", True, 1, 16 * 4),
        ("collective-permute", "fsdp", False, 1, 16 * 4),
        ("collective-permute", "none", False, 1, 16 * 4),
        ("reduce-scatter", "data", False, 1, 8 * 4),
    ]


SCHEDULED = """HloModule scheduled, is_scheduled=true, num_partitions=4

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %neg = f32[8]{0} negate(%p)
}

%condition (q: f32[8]) -> pred[] {
  %q = f32[8]{0} parameter(0)
  ROOT %yes = pred[] constant(false)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %one = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), source_target_pairs={{0,2},{1,3}}
  %loop = f32[8]{0} while(%x), condition=%condition, body=%body
  %one.done = f32[8]{0} collective-permute-done(%one)
  %two = (f32[8]{0}, f32[8]{0}) collective-permute-start(%one.done), \
source_target_pairs={{0,2},{1,3}}
  %small = f32[8]{0} fusion(%x), kind=kLoop, calls=%body
  %two.done = f32[8]{0} collective-permute-done(%two)
  ROOT %sum = f32[8]{0} all-reduce(%two.done), replica_groups={{0,1},{2,3}}, to_apply=%body
}
"""


def test_what_runs_beside_a_collective_is_what_lies_between_its_start_and_its_end():
    found = overlaps(SCHEDULED, {"pipeline": 2, "tensor": 2})
    assert found == [
        {"kind": "all-reduce", "axis": "tensor", "count": 1, "beside_work": 0},
        {"kind": "collective-permute", "axis": "pipeline", "count": 2, "beside_work": 1},
    ]
    listed = [event for event, _ in events(SCHEDULED)["main"]]
    start, end = "collective-permute-start", "collective-permute-done"
    assert listed == [start, "loop", end, start, "fusion", end, "all-reduce"]


def test_traffic_counts_a_loop_as_often_as_it_runs():
    def summed(x):
        return lax.scan(lambda y, _: (lax.psum(y, "data") / 2, None), x, length=5)[0]

    text = compiled(manual(summed), ARRAY).as_text()
    (found,) = traffic(text, CUBE)
    assert (found["kind"], found["axis"], found["inside_loop"]) == ("all-reduce", "data", True)
    # A pair: half there, half back.
    assert (found["bytes"], found["sent"]) == (5 * BLOCK, 5 * BLOCK)


def test_traffic_refuses_a_loop_of_unknown_length():
    def summed(x):
        return lax.while_loop(lambda y: y.sum() > 1, lambda y: lax.psum(y, "data") / 3, x)

    text = compiled(manual(summed), ARRAY).as_text()
    with pytest.raises(AssertionError, match="how often the loop around"):
        traffic(text, CUBE)


ROUNDS = """HloModule rounds, is_scheduled=true, num_partitions=4

%wrapped (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %there = f32[8]{0} all-to-all(%p), replica_groups={{0,1},{2,3}}, dimensions={0}
}

%body (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %one = ((f32[8]{0}), f32[8]{0}) async-start(%q), calls=%wrapped
  %weights = f32[8]{0} custom-call(%q), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/grouped_matmul_weights/mpmd_map"}
  %one.done = f32[8]{0} async-done(%one)
  %two = ((f32[8]{0}), f32[8]{0}) async-start(%one.done), calls=%wrapped
  %sorted = f32[8]{0} negate(%q)
  ROOT %two.done = f32[8]{0} async-done(%two)
}

%condition (r: f32[8]) -> pred[] {
  %r = f32[8]{0} parameter(0)
  ROOT %yes = pred[] constant(false)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %loop = f32[8]{0} while(%x), condition=%condition, body=%body
}
"""


def test_rounds_of_an_exchange_count_once_and_run_beside_the_matmuls_of_experts():
    (found,) = traffic(ROUNDS, {"fsdp": 2, "expert": 2})
    assert (found["kind"], found["axis"], found["inside_loop"]) == ("all-to-all", "expert", True)
    assert (found["sent"], found["sent_beside_work"]) == (2 * 32 / 2, 32 / 2)
    with pytest.raises(AssertionError, match="how often the loop around there runs"):
        traffic(ROUNDS, {"fsdp": 2, "tensor": 2})


def test_groups_of_a_part_of_an_axis_send_among_themselves():
    (found,) = traffic(ROUNDS, {"expert": 4})
    assert (found["axis"], found["sent"]) == ("expert", 2 * 32 / 2)


def test_traffic_says_what_runs_beside_work():
    found = traffic(SCHEDULED, {"pipeline": 2, "tensor": 2})
    assert [(each["axis"], each["sent"], each["sent_beside_work"]) for each in found] == [
        ("tensor", 32, 0),
        ("pipeline", 64, 32),
    ]


@pytest.mark.parametrize(
    ("kind", "output", "sent"),
    [
        ("all-gather", 4, 3),
        ("reduce-scatter", 1, 3),
        ("all-reduce", 4, 6),
        ("collective-permute", 4, 4),
        ("all-to-all", 4, 3),
    ],
)
def test_what_one_of_four_sends_around_a_ring(kind, output, sent):
    """An array of four blocks, in blocks."""
    assert output * sent_per_output(kind, 4) == sent
    assert sent_per_output(kind, 1) == 0
