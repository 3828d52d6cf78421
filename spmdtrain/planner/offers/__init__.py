"""Compares kinds and numbers of GPUs: `spmdtrain plan` with several of them, or with a price."""
