"""What the text of a compiled program says: collectives, memory, traffic and what is hidden."""
