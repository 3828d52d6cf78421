"""Snapshots: copies of a training state in memory that outlives the process that trains.

slot.py is the memory of one snapshot, and handed_slots.py hands slots from the launcher to a
process. The contents of a snapshot are the business of checkpoints/snapshots. The launcher, which
has no jax, keeps the memory (launch/snapshot_memory.py) and copies it from host to host
(launch/peer).
"""
