"""The bytes and launches of kernels, counted in texts in which they are known.

The sizes are small and different, so that a wrong array gives a wrong number.
"""

import pytest

from spmdtrain.compiled.kernel_launches import Kernel, kernels

ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def listed(entry: str, *computations: str) -> list[Kernel]:
    body = "\n".join(f"  {line}" for line in entry.strip().splitlines())
    text = "HloModule step, is_scheduled=true\n" + "".join(computations)
    return kernels(f"{text}\nENTRY %main (a: f32[8]) -> f32[8] {{\n{body}\n}}\n")


def only(entry: str, *computations: str) -> Kernel:
    (kernel,) = listed(entry, *computations)
    return kernel


def fused(body: str) -> str:
    lines = "\n".join(f"  {line}" for line in body.strip().splitlines())
    return f"\n%fused (p0: f32[8]) -> f32[8] {{\n{lines}\n}}\n"


# A fusion's parameters and root -> the bytes that it reads, and writes. One row of `stack` is
# 4 x 10 bytes, all of it 240.
STACK = "%stack = f32[6,10]{1,0} parameter(0)\n%at = s32[] parameter(1)\n%zero = s32[] constant(0)"
ROW = "%row = f32[1,10]{1,0} dynamic-slice(%stack, %at, %zero), dynamic_slice_sizes={1,10}"
NEW = "%new = f32[1,10]{1,0} parameter(2)"
FUSIONS = {
    "two arrays to one": (
        """
        %a = f32[10]{0} parameter(0)
        %b = bf16[10]{0} parameter(1)
        %wide = f32[10]{0} convert(%b)
        ROOT %sum = f32[10]{0} add(%a, %wide)
        """,
        *(40 + 20, 40),
    ),
    "an array that is used twice": (
        """
        %a = f32[10]{0} parameter(0)
        %b = f32[10]{0} negate(%a)
        ROOT %sum = f32[10]{0} add(%a, %b)
        """,
        *(40, 40),
    ),
    "two results": (
        """
        %a = f32[10]{0} parameter(0)
        %b = bf16[10]{0} convert(%a)
        %c = f32[10]{0} negate(%a)
        ROOT %both = (bf16[10]{0}, f32[10]{0}) tuple(%b, %c)
        """,
        *(40, 20 + 40),
    ),
    "a slice of a stack": (f"{STACK}\n{ROW}\nROOT %out = f32[10]{{0}} bitcast(%row)", 40 + 4, 40),
    "a slice by way of a bitcast": (
        f"""
        {STACK}
        %same = f32[6,10]{{1,0}} bitcast(%stack)
        {ROW.replace("%stack", "%same")}
        ROOT %out = f32[1,10]{{1,0}} negate(%row)
        """,
        *(40 + 4, 40),
    ),
    "a slice and the whole": (
        f"""
        {STACK}
        {ROW}
        %all = f32[1,10]{{1,0}} reduce(%stack, %zero), dimensions={{0}}, to_apply=%add
        ROOT %out = f32[1,10]{{1,0}} add(%row, %all)
        """,
        *(240 + 4, 40),
    ),
    "an update in place": (
        f"""
        {STACK}
        {NEW}
        ROOT %out = f32[6,10]{{1,0}} dynamic-update-slice(%stack, %new, %at, %zero)
        """,
        *(4 + 40, 40),
    ),
    "a row that is taken, changed and put back": (
        f"""
        {STACK}
        {NEW}
        {ROW}
        %sum = f32[1,10]{{1,0}} add(%row, %new)
        %whole = f32[6,10]{{1,0}} dynamic-update-slice(%stack, %sum, %at, %zero)
        ROOT %out = f32[6,10]{{1,0}} bitcast(%whole)
        """,
        *(40 + 4 + 40, 40),
    ),
    "a stack that is written into another": (
        """
        %small = f32[2,10]{1,0} parameter(0)
        %big = f32[6,10]{1,0} parameter(1)
        %at = s32[] constant(3)
        ROOT %out = f32[6,10]{1,0} dynamic-update-slice(%big, %small, %at, %at)
        """,
        *(80, 80),
    ),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_the_bytes_of_a_fusion(name):
    body, read, written = FUSIONS[name]
    lines = "\n".join(line.strip() for line in body.strip().splitlines())
    call = "ROOT %f = f32[10]{0} fusion(%a, %b), kind=kLoop, calls=%fused"
    kernel = only(call, ADD, fused(lines))
    assert (kernel.launches, kernel.read, kernel.written) == (1, read, written)


# Instructions that are kernels by themselves -> their bytes.
ALONE = {
    "a copy": ("%k = f32[8]{0} copy(%a)", 32, 32),
    "a matmul with its workspace": (
        '%k = (f32[5]{0}, s8[64]{0}) custom-call(%a, /*index=1*/%b), custom_call_target="gemm"',
        *(32 + 24, 20 + 64),
    ),
    "an array that another kernel began": (
        "%k = (f32[5]{0}, f32[8]{0}) custom-call(%b, %a), "
        'custom_call_target="mosaic_gpu_v2", output_to_operand_aliasing={{1}: (1, {})}',
        *(24, 20),
    ),
    "an array that is read and replaced": (
        '%k = f32[8]{0} custom-call(%a), custom_call_target="own", '
        "output_to_operand_aliasing={{}: (0, {})}",
        *(32, 32),
    ),
    "operands with their types": ("%k = f32[8]{0} copy(f32[8]{0} %a)", 32, 32),
    "a slice": ("%k = f32[1,4]{1,0} dynamic-slice(%m, %i, %i)", 16, 16),
    "an update": ("%k = f32[7,4]{1,0} dynamic-update-slice(%m, %r, %i, %i)", 16, 16),
    "rows of a table": ("%k = f32[2,4]{1,0} gather(%m, %ids)", 32, 32),
    "a copy that runs beside others": (
        "%s = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%a)\n%k = f32[8]{0} copy-done(%s)",
        *(32, 32),
    ),
    "a sum over devices that runs beside others": (
        "%s = f32[8]{0} all-reduce-start(%a), to_apply=%add\n%k = f32[8]{0} all-reduce-done(%s)",
        *(32, 32),
    ),
    "a gather over devices that runs beside others": (
        "%s = (f32[8]{0}, f32[16]{0}) all-gather-start(%a), dimensions={0}\n"
        "%k = f32[16]{0} all-gather-done(%s)",
        *(32, 64),
    ),
}
ARRAYS = """
%a = f32[8]{0} parameter(0)
%b = f32[6]{0} parameter(1)
%m = f32[7,4]{1,0} parameter(2)
%r = f32[1,4]{1,0} parameter(3)
%i = s32[] parameter(4)
%ids = s32[2]{0} parameter(5)
"""


@pytest.mark.parametrize("name", ALONE)
def test_the_bytes_of_an_instruction(name):
    entry, read, written = ALONE[name]
    kernel = only(ARRAYS + entry, ADD)
    assert (kernel.launches, kernel.read, kernel.written) == (1, read, written)


def test_what_computes_nothing_launches_nothing():
    free = """
    %t = (f32[8]{0}, f32[6]{0}) tuple(%a, %b)
    %g = f32[8]{0} get-tuple-element(%t), index=0
    %c = f32[2,4]{1,0} bitcast(%g)
    %n = f32[] constant(1)
    """
    assert listed(ARRAYS + free) == []


LOOP = """
%inner (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %v = f32[8]{0} get-tuple-element(%p), index=1
  %two = f32[8]{0} copy(%v)
  ROOT %t = (s32[], f32[8]{0}) tuple(%p, %two)
}

%ends (p.1: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%outer (p.2: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.2 = (s32[], f32[8]{0}) parameter(0)
  %again = (s32[], f32[8]{0}) while(%p.2), condition=%ends, body=%inner, \
backend_config={"known_trip_count":{"n":"5"}}
  %v.1 = f32[8]{0} get-tuple-element(%again), index=1
  %one = f32[8]{0} copy(%v.1)
  ROOT %t.1 = (s32[], f32[8]{0}) tuple(%p.2, %one)
}
"""
WHILE = "%w = (s32[], f32[8]{{0}}) while(%t), condition=%ends, body=%outer{}"
TRIPS = ', backend_config={"known_trip_count":{"n":"3"}}'


def test_a_loop_launches_its_kernels_once_a_trip_and_a_loop_in_it_as_often_again():
    launches = {each.name: each.launches for each in listed(WHILE.format(TRIPS), LOOP)}
    assert launches == {"two": 15, "one": 3}


def test_a_loop_of_unknown_length_counts_once():
    launches = {each.name: each.launches for each in listed(WHILE.format(""), LOOP)}
    assert launches == {"two": 5, "one": 1}


def test_what_is_moved_is_that_of_all_launches():
    moved = {each.name: each.moved for each in listed(WHILE.format(TRIPS), LOOP)}
    assert moved == {"two": 15 * 64, "one": 3 * 64}


def test_a_call_is_no_kernel_and_those_that_it_makes_are():
    called = "\n%work (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n" + (
        "  ROOT %k = f32[8]{0} copy(%p)\n}\n"
    )
    assert [each.name for each in listed("%c = f32[8]{0} call(%a), to_apply=%work", called)] == [
        "k"
    ]
    start = "%c = ((f32[8]{0}), f32[8]{0}) async-start(%a), calls=%work"
    assert [each.name for each in listed(start, called)] == ["k"]


# The root of a fusion over `a` -> does it only move, does it only convert?
KINDS = {
    "moves": ("%r = f32[2,4]{1,0} reshape(%a)\nROOT %k = f32[4,2]{1,0} transpose(%r)", True, False),
    "converts": ("ROOT %k = bf16[8]{0} convert(%a)", False, True),
    "converts and moves": (
        "%n = bf16[8]{0} convert(%a)\nROOT %k = bf16[2,4]{1,0} reshape(%n)",
        *(False, True),
    ),
    "computes": ("ROOT %k = f32[8]{0} negate(%a)", False, False),
    "converts and computes": (
        "%n = bf16[8]{0} convert(%a)\nROOT %k = bf16[8]{0} negate(%n)",
        *(False, False),
    ),
    "an index is computed": (
        "%n = s32[] parameter(1)\n%m = s32[] add(%n, %n)\n"
        "ROOT %k = f32[2]{0} dynamic-slice(%a, %m), dynamic_slice_sizes={2}",
        *(True, False),
    ),
    "integers become floats": (
        "%ids = s32[8]{0} parameter(1)\nROOT %k = f32[8]{0} convert(%ids)",
        *(False, False),
    ),
    "floats become a mask": ("ROOT %k = pred[8]{0} convert(%a)", False, False),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_only_moves_and_what_only_converts(name):
    root, moves, converts = KINDS[name]
    body = "%a = f32[8]{0} parameter(0)\n" + root
    kernel = only("ROOT %f = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused", fused(body))
    assert (kernel.only_moves, kernel.only_converts) == (moves, converts)


def test_a_kernel_bears_the_name_of_what_it_calls():
    entry = '%k = f32[8]{0} custom-call(%a), custom_call_target="__cublas$lt$matmul"'
    assert only(ARRAYS + entry).kind == "__cublas$lt$matmul"
    assert only(ARRAYS + "%k = f32[8]{0} copy(%a)").kind == "copy"
