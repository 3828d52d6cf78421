"""Checks the arrays that a caller passes to a step, and puts them on the right devices.

Start with arrays.py.
"""
