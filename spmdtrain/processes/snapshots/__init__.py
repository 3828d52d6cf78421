"""Snapshots: copies of a training state in memory that outlives the process that trains.

slot.py is the memory of one snapshot, and given.py how a process gets its slots from the launcher.
What a snapshot holds is not known here: see checkpoints/snapshots. The launcher, which has no jax,
keeps the memory and copies it from host to host: see launch/snapshots.
"""
