"""Which weights are zero: in which arrays, which elements of one, and from which step on."""
