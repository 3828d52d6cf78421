"""What native libraries print: remarks about connections are dropped, all else goes through."""

import subprocess
import sys

import pytest

NATIVE = """
import os, sys, time
from spmdtrain.processes import closed_outputs, native_output
native_output.drop_remarks()
print("ours")
for line in {lines}:
    os.write(1, line)
time.sleep(0.3)  # the filter is a thread
"""
REST = b" peer ranks. Expected number of connected peer ranks is : 3\n"
REMARK = b"[Gloo] Rank 1 is connected to 3" + REST
MIXED = b"[Gloo] Rank [Gloo] Rank 1 is connected to 3" + REST + b"0 is connected to 3" + REST
OTHER = b"host:1:2 [0] NCCL INFO Bootstrap: Using eth0\n"


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ([REMARK, REMARK], b"ours\n"),
        ([MIXED, OTHER, REMARK], OTHER + b"ours\n"),
        ([REMARK[:20], REMARK[20:] + OTHER], OTHER + b"ours\n"),
    ],
)
def test_remarks_of_gloo_are_dropped_and_all_else_goes_through(lines, wanted):
    program = [sys.executable, "-c", NATIVE.format(lines=lines)]
    assert subprocess.run(program, capture_output=True, check=True).stdout == wanted


def test_an_output_without_a_reader_is_still_found():
    """Though the file descriptor of standard output is the filter's, which always reads."""
    code = (
        NATIVE.format(lines=[OTHER]).replace('print("ours")', "")
        + "sys.exit(7 if closed_outputs.drop_closed() else 0)"
    )
    program = subprocess.Popen(
        [sys.executable, "-uc", "import time; time.sleep(0.5)" + code], stdout=subprocess.PIPE
    )
    assert program.stdout
    program.stdout.close()
    assert program.wait() == 7
