"""Opens the teacher of [distill]."""
