"""Certifies a run: compares the same step on one device and on other layouts, leaf by leaf.

A layout that maps each state of the reference to its next state trains what one device trains, by
induction. Start with certify.py.
"""
