"""A step in words: where its seconds went, by sort of work and by part, read from a trace.

trace.py reads what the profiler wrote, seconds.py sums it up, and take.py traces steps of a run
that has none.
"""
