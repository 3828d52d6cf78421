"""Multiplies in layers otherwise than by a plain dot: overlapped with transfers, or in 8 bits."""
