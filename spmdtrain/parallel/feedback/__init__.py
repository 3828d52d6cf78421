"""Sums gradients of which each device sends a small part, and keeps the rest for later steps."""
