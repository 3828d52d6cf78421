"""Scales the 8-bit matmuls of a step by what earlier steps have seen (magnitudes.py)."""
