"""Carries the state of a linear-time mixer from chunk to chunk of its tokens.

Start with chunks.py, then api.py.
"""

from pallas_kernels.recurrence.api import scan_chunks as scan_chunks
from pallas_kernels.recurrence.api import state_behind as state_behind
from pallas_kernels.recurrence.chunks import Chunks as Chunks
