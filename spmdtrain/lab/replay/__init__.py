"""Repeats steps of a run, and says whether they are bit-equal to what the run recorded.

opened.py finds the checkpoint before a step, again.py repeats the steps from there, compare.py
finds the first difference in the order of a step, and replay.py puts them together.
"""
