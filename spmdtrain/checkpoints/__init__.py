"""Checkpoints: what a run leaves on disk, and how damage to it is detected.

Start with checkpoints.py, on top of saved_steps.py (read and verified) and store.py, the only file
that uses Orbax. newest.py finds the step to resume from, restore.py reads a finished or foreign
run, identity.py checks that a checkpoint belongs to this run, and fingerprint.py checks that a leaf
is intact.
"""
