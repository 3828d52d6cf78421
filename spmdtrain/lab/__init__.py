"""Reads runs from outside, or repeats them to compare them.

Only the page is drawn by a run itself: it lies on a lower floor.
"""
