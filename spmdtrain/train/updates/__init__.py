"""Computes the updates of the weights with an optimizer.

optimizers.py turns any optax transformation into updates of weights at rest, whole_tree.py finds
those that look at more than one tensor, shipped_optimizers.py has ours by name, and
learning_rates.py has their rates.
"""
