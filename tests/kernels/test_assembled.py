"""The main loop of an assembled kernel, and the bound on its time."""

import pytest

from pallas_kernels.assembled.__main__ import page
from pallas_kernels.assembled.bounds import assembled, forward_and_backward
from pallas_kernels.assembled.loops import Loop, main_loops
from pallas_kernels.gpus import GPUS

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
    written = page({("h100", "mosaic", 128): kernels})
    assert "| h100 | mosaic | 128 | 989 | 707 | 595 to 617 | 465 to 518 |" in written
    assert "| h100 | mosaic | 128 | dkv | 168 | 0 | 1 | 64 | 8 | 6 | 100% | matmuls |" in written
