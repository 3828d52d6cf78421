"""Repeats steps of a run, and checks whether they are bit-equal to what the run recorded.

opened.py finds the checkpoint before a step, again.py repeats the steps from there,
first_difference.py finds what differs first within a step, and replay.py puts them together.
"""
