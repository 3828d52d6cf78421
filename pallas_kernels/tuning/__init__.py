"""Measures, on this GPU, which implementation of a call is correct and fastest.

from pallas_kernels.chosen import using
from pallas_kernels.tuning import Table
from pallas_kernels.tuning.tune import tune

with using({}) as decisions:  # which calls does the program have?
    jax.jit(step).trace(state)
table = Table()
tune(decisions.calls.values(), table)  # in another process; what is known costs nothing
with using(table.chosen(jax.devices()[0].device_kind)):
    compiled = jax.jit(step).lower(state).compile()

tune.py      which calls are to be measured, and what is remembered
measure.py   the process that measures, and what happens if it crashes or hangs
worker.py    what runs in it; on_jax.py, calls on the device
right.py     whether values are right
decide.py    which implementation is taken, given times
table.py     the file
"""

from pallas_kernels.tuning.table import Table as Table
