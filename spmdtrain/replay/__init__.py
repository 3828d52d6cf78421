"""Takes steps of a run again, and says whether they are to the bit what the run wrote.

opened.py finds the checkpoint before a step, again.py takes the steps from there, compare.py finds
the first difference in the order of a step, and replay.py puts them together.
"""
