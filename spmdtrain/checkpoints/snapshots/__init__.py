"""Snapshots of a run: its newest states in the memory of the launcher, next to those on disk.

snapshots.py takes and restores them; parts.py says which parts of the arrays a process holds.
"""
