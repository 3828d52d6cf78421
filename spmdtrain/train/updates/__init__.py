"""What an optimizer does to the weights.

optimizers.py turns any optax transformation into updates of weights at rest, whole_tree.py finds
those that look at more than one tensor, shipped_optimizers.py has ours by name, and
learning_rates.py their rates.
"""
