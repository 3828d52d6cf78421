"""Decides which weights are zero: in which matrices, which elements, and from which step on."""
