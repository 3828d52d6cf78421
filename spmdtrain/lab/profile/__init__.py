"""Shows from a trace where the time of a step went, by sort of work and by part.

trace.py reads the files of the profiler, seconds.py sums them up, and take.py traces steps of a run
that has no trace.
"""
