"""Multiplies in layers: split over `tensor`, overlapped with transfers, and in 8 bits."""
