"""Reads a trained run: samples, evaluations, and tasks of other harnesses.

trained_run.py opens a run; the other files work on the opened run.
"""
