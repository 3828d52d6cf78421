"""The files below RUN/checkpoints: which contents are safe, and names that libraries can read."""
