"""The folders and files below RUN/checkpoints: their names, and what may be in them."""
