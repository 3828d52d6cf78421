"""The main loop of an assembled kernel, and the bound on its time."""

import pytest

from pallas_kernels.assembled.__main__ import Figures, page
from pallas_kernels.assembled.bounds import (
    LATENCY,
    PORT,
    assembled,
    carried,
    forward_and_backward,
    streamed,
)
from pallas_kernels.assembled.loops import Loop, main_loops, stream
from pallas_kernels.assembled.recurrences import MODELS, SCANS, scans_of
from pallas_kernels.gpus import GPUS
from pallas_kernels.recurrence import cases

# A wait at a barrier has its slow way at the end; a masked tile has a longer way.
TEXT = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R0 ;
        /*0020*/              @!P1 BRA `(.L_x_4) ;
.L_x_2:
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0040*/              @!P2 BRA P3, `(.L_x_3) ;
        /*0050*/                   FSEL R0, R1, -INF , P0 ;
        /*0060*/                   FSEL R1, R1, -INF , P0 ;
.L_x_3:
        /*0070*/                   MUFU.EX2 R0, R0 ;
        /*0080*/               @P1 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_4:
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R0 ;
        /*00b0*/              @!P1 BRA `(.L_x_4) ;
        /*00c0*/                   BRA `(.L_x_2) ;
"""
TURN = 2 * 64 * 128 * 16 // 4
PTX = ".visible .entry {}_mosaic_gpu_kernel(\n)\n.maxntid 384, 1, 1\n"
SAID = "0 bytes stack frame, {} bytes spill stores\nptxas info : Used 168 registers, used 16"


def test_a_turn_is_the_shortest_way_from_the_head_of_the_loop_back_to_it():
    assert main_loops(TEXT) == [Loop(flops=TURN, exponentials=1, instructions=6)]
    with pytest.raises(ValueError, match="no loop has a matmul"):
        main_loops(TEXT.replace("HGMMA", "FFMA"))


def test_a_loop_of_single_warps_is_counted_on_ampere():
    text = TEXT.replace("HGMMA.64x128x16.F32.BF16", "HMMA.16816.F32.BF16")
    assert main_loops(text) == [Loop(flops=4096, exponentials=1, instructions=6)]


def kernel(name, text=TEXT, needed=TURN, spilled=0, own_loops=1):
    ptx, said = PTX.format(name), SAID.format(spilled)
    return assembled(GPUS["h100"], ptx, said, text, needed, own_loops)


@pytest.mark.parametrize(
    ("changed", "share", "limit"),
    [
        ({}, 1.0, "matmuls"),
        ({"needed": TURN / 2}, 0.5, "matmuls made twice"),
        ({"spilled": 8}, 1.0, "matmuls, spills"),
    ],
)
def test_what_bounds_a_kernel(changed, share, limit):
    found = kernel("attention_dq", **changed)
    assert (found.share, found.limit) == (pytest.approx(share), limit)
    assert found.matmul_cycles == 64 and found.exponential_cycles == 8 and found.programs == 1


def test_more_exponentials_than_matmuls_bound_it():
    more = TEXT.replace(
        "/*0070*/                   MUFU.EX2 R0, R0 ;",
        "\n".join(f"/*{0x1000 + i:04x}*/ MUFU.EX2 R0, R0 ;" for i in range(16)),
    )
    found = kernel("attention_forward", text=more)
    assert found.limit == "exponentials" and found.share == pytest.approx(64 / (16 * 8))


def test_backward_counts_five_of_seven_matmuls():
    names = ("attention_forward", "attention_dq", "attention_dkv")
    kernels = {name: kernel(name) for name in names}
    assert forward_and_backward(kernels) == pytest.approx((1, 5 / 7))
    grouped = {("h100", "triton", 2048): {"grouped_matmul": kernel("grouped_matmul")}}
    norms = {("h100", "triton", 4096): {"norm_forward": norm()}}
    scans = {("h100", "mosaic", "Qwen3.5 27B"): {"chunk_scan_forward": scan()}}
    written = page(Figures({("h100", "mosaic", 128): kernels}, grouped, norms, scans))
    assert "| h100 | triton |  | grouped_matmul | 168 | 0 | 1 | 64 | 0 |" not in written
    assert "| h100 | triton |  | grouped_matmul | 168 | 0 | 1 | 64 | 8 | 6 | 100% |" in written
    assert "| h100 | 4096 | forward | 32 | 0 | 8 |" in written
    assert "| h100 | mosaic | Qwen3.5 27B | chunk_scan_forward | 168 | 0 | 1 |" in written
    assert "| h100 | mosaic | 128 | 989 | 707 | 595 to 617 | 465 to 518 |" in written
    assert "| h100 | mosaic | 128 | dkv | 168 | 0 | 1 | 64 | 8 | 6 | 100% | matmuls |" in written


# Blackwell: one warp issues a matmul of the whole program, whose shape a register has.
BLACKWELL = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/               @P1 BRA `(.L_x_2) ;
        /*0020*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], idesc[UR11] ;
.L_x_2:
        /*0030*/                   MUFU.EX2 R0, R0 ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
"""


def test_a_matmul_that_one_warp_issues_takes_what_its_tile_needs():
    assert main_loops(BLACKWELL) == [Loop(flops=0, exponentials=1, instructions=3, matmuls=1)]
    ptx, said = PTX.format("attention_dq"), SAID.format(0)
    needed = 2048 * 100.0  # a scheduler of Blackwell does 2048 FLOPs in a cycle
    found = assembled(GPUS["b200"], ptx, said, BLACKWELL, needed)
    assert (found.matmul_cycles, found.share, found.limit) == (100, 1.0, "matmuls")


NORM = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   FADD R4, R4, R5 ;
        /*0020*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0030*/                   EXIT ;
.L_x_9:
        /*0040*/                   BRA `(.L_x_9) ;
"""


def norm(moved=32768.0, grid=1e6, registers=32, gpu="h100", text=NORM):
    ptx = ".visible .entry norm_forward(\n)\n.reqntid 256, 1, 1\n"
    said = f"0 bytes spill stores\nptxas info : Used {registers} registers, used 16"
    return streamed(GPUS[gpu], ptx, said, text, moved, grid)


def test_a_norm_without_a_loop_is_counted_from_end_to_end_and_moves_its_bytes():
    assert stream(NORM) == Loop(flops=0, exponentials=0, instructions=4, loads=1)
    found = norm()
    assert found.issue_cycles == 4 * 8 / 4 and found.programs == 8
    clock = GPUS["h100"].bfloat16 / 132 / 4096
    assert found.memory_cycles == pytest.approx(32768 / (3352e9 / 132 / clock))
    assert found.share == pytest.approx(1) and found.limit == "memory"


def test_the_loop_that_loads_is_what_a_norm_repeats():
    text = NORM.replace(
        "        /*0020*/", ".L_x_3:\n        /*0015*/ LDG.E R1, R2 ;\n        /*0020*/"
    )
    text = text.replace(
        "        /*0030*/", "        /*0025*/ @P0 BRA `(.L_x_3) ;\n        /*0030*/"
    )
    assert stream(text) == Loop(flops=0, exponentials=0, instructions=3, loads=1)


def test_a_last_wave_of_few_programs_and_one_program_alone_bound_a_norm():
    full = norm(grid=2 * 132, registers=127)
    assert full.programs == 2 and full.share == pytest.approx(1)
    late = norm(grid=2.25 * 132, registers=127)
    assert late.limit == "a last wave that leaves cores idle"
    last = max(0.25 * late.memory_cycles, LATENCY + 32768 / PORT + late.issue_cycles)
    wanted = 2.25 * late.memory_cycles / (2 * late.memory_cycles + last)
    assert late.share == pytest.approx(wanted) and wanted < 0.95
    alone = norm(moved=4096.0, grid=132.0)
    assert alone.limit == "one program after another" and alone.share < 0.5


def scan(moved=16384.0, grid=132.0, flops=4096.0, registers=168, gpu="h100"):
    ptx, said = PTX.format("chunk_scan_forward"), SAID.format(0).replace("168", str(registers))
    return carried(GPUS[gpu], ptx, said, TEXT, moved=moved, grid=grid, flops=flops, warps=4)


def test_a_scan_is_bounded_by_bytes_matmuls_or_instructions_of_a_chunk():
    """Its loop has 6 instructions, which each of a scheduler's warps issues."""
    bound = scan()
    assert (bound.matmul_cycles, bound.issue_cycles, bound.alone_cycles) == (1, 6, 16384 / PORT)
    assert (bound.share, bound.limit) == (pytest.approx(1), "memory")
    of_matmuls = scan(flops=4096 * 2 * bound.memory_cycles)
    assert (of_matmuls.share, of_matmuls.limit) == (pytest.approx(0.5), "matmuls")
    both = scan(flops=4096 * 2 * bound.memory_cycles, grid=264.0, registers=40)
    assert (both.programs, both.share) == (2, pytest.approx(0.5))
    # A tenth of the cores have a program: the others' share of the bandwidth is no use to it.
    few = scan(grid=13.2)
    assert few.programs == pytest.approx(0.1) and few.limit == "one program after another"
    assert few.share == pytest.approx(0.1 * few.memory_cycles / few.alone_cycles)


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("model", MODELS)
def test_the_programs_of_a_scan_move_each_byte_of_a_block_once(model, implementation):
    """By the shapes of the arrays: the first and the last state come on top."""
    case = cases.PUBLISHED[model]
    sizes = {
        name: x.size * x.dtype.itemsize for name, x in case.abstract().items() if x is not None
    }
    factors = sizes["write"] + sizes.get("erase", 0)
    states = 2 * case.chunks * case.heads * case.key_dim * case.value_dim
    values = sizes["new"] // 2
    wanted = {
        "chunk_scan_forward": factors + sizes["new"] + states + values,
        "chunk_scan_backward": factors + sizes["new"] + 3 * states + values,
    }
    texts = [(name, PTX.format(name), SAID.format(0), TEXT) for name in SCANS]
    gpu = GPUS["h100"]
    bytes_of_cycle = gpu.memory_bandwidth / gpu.bfloat16 * 4096
    for name, bound in scans_of(gpu, implementation, model, texts).items():
        moved = bound.memory_cycles * bytes_of_cycle * bound.launched * gpu.cores * case.chunks
        assert moved == pytest.approx(wanted[name]), name
