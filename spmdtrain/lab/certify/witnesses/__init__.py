"""Checks invariants of a run that need no second layout to compare with. Start with witness.py."""
