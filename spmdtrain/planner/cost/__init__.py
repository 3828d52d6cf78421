"""Formulas for the cost of a layout, in seconds and bytes; plan.py and estimate.py use them."""
