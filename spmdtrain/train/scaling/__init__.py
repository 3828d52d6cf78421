"""Scales the 8-bit matmuls of a step by the magnitudes of earlier steps (magnitudes.py)."""
