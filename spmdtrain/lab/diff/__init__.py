"""Compares two runs by meaning, and names the likeliest cause of their difference.

sides.py reads each run, differences.py compares what they ran, parting.py compares the results, and
speed.py the speed; causes.py ranks, and diff.py puts them together.
"""

FEW = 30  # steps judged after the first difference; a cause shows up in fewer
