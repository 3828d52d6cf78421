"""Leaves of a state on their way to the disk and back: names, layouts and fingerprints."""
