"""Computes loss and gradients of one batch: by accumulation over microbatches, or by a pipeline."""
