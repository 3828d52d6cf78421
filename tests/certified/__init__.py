"""Campaigns of certificates: planted breakages are found, and drawn layouts agree."""
