"""Optax transformations that optax does not have, and those that change how another one rests.

shipped_optimizers.py makes the optimizers of the settings from them.
"""
