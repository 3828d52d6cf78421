"""Reads from a trace where the seconds of a step went, by sort of work and by part.

trace.py reads what the profiler wrote, seconds.py sums it up, and take.py traces steps of a run
that has none.
"""
