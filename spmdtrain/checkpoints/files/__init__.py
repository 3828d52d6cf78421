"""The files below RUN/checkpoints: what may be in them, and names that libraries read."""
