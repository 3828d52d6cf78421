"""What differs between two runs, by meaning, and which difference is the likeliest cause.

sides.py reads each run, differences.py compares what they ran and parting.py what came out of it,
speed.py how fast; causes.py ranks, and diff.py puts them together.
"""

FEW = 30  # steps after the first difference that are judged: a cause shows in fewer
