"""Checkpoints: the files that a run leaves on disk, and the checks that detect damage to them.

Start with checkpoints.py, on top of saved_steps.py (read and verified) and store.py, the only file
that uses Orbax. newest.py finds the step to resume from, restore.py reads a finished or foreign
run, identity.py checks that a checkpoint belongs to this run, and fingerprint.py checks that a leaf
is intact.
"""
