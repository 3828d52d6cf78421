"""Handles the leaves of a saved state: their names, layouts and fingerprints."""
