"""Checks invariants of a run that need no second layout. Start with witness.py."""
