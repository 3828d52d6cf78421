"""Snapshots of a run: its newest states in the memory of the launcher, next to those on disk.

snapshots.py takes and restores them; array_parts.py copies the parts that a process holds.
"""
