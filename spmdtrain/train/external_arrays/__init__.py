"""Takes arrays from outside a run: checks them, and puts them on the right devices.

They are weights and states that a caller or a file brings, and batches. Start with check_arrays.py.
"""
