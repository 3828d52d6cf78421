"""Checkpoints: what a run leaves on disk, and how it is known to be whole.

Start with store.py, the only door to Orbax. newest.py finds the step to go on from, restore.py
reads a run that somebody else trained, identity.py says whether a checkpoint is of this run, and
fingerprint.py whether a leaf is as it was saved.
"""
